"""Simulated policies of replacement: the optimum is that of a search of all choices, and no policy reads less."""

from __future__ import annotations

import itertools
import random

import pytest

from moeserve.bench.expert_policies import POLICIES, count_reads, fewest_reads, frequent, least_recent


def searched(visits: list[list[int]], num_slots: int) -> int:
    """Return the fewest reads of all choices of what to hold after each visit."""
    fewest = {frozenset[int](): 0}
    for experts in visits:
        following: dict[frozenset[int], int] = {}
        for held, num_reads in fewest.items():
            choices = sorted(held | {*experts})
            for kept in itertools.combinations(choices, min(num_slots, len(choices))):
                reads = num_reads + len({*experts} - held)
                following[frozenset(kept)] = min(reads, following.get(frozenset(kept), reads))
        fewest = following
    return min(fewest.values())


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_that_of_a_search(num_slots: int, seed: int) -> None:
    rng = random.Random(seed)
    visits = [sorted(rng.sample(range(5), rng.choice([1, 2, 2, 4]))) for _ in range(9)]
    assert fewest_reads(visits, num_slots) == searched(visits, num_slots)
    for policy in POLICIES.values():
        assert count_reads(visits, num_slots, policy(visits)) >= searched(visits, num_slots)


def test_the_least_recent_is_replaced() -> None:
    visits = [[0], [1], [2], [0], [3], [0], [1]]  # 2 and then 1 are gone
    assert count_reads(visits, 2, least_recent(visits)) == 6
    assert count_reads(visits, 4, least_recent(visits)) == 4


def test_what_is_frequent_stays() -> None:
    visits = [[0], [0], [0], [1], [2], [3], [0]]
    assert count_reads(visits, 2, frequent(visits)) == 4
    assert count_reads(visits, 2, frequent(visits, half_life=0.25)) == 5  # short memory: the same as the least recent
