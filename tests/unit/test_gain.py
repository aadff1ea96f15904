"""Whether experts should move: by numbers alone."""

from __future__ import annotations

import random

import pytest

from moeserve.expert_placement.eplb import imbalance
from moeserve.expert_placement.gain import LEAST_GAIN, Proposal, excess, pays, propose, remembered
from moeserve.expert_placement.placement import Placement

TWO_RANKS = Placement(((0, 1), (2, 3)), 4)


def test_what_fullest_ranks_have_more() -> None:
    assert excess([30, 30, 10, 10], TWO_RANKS) == 20
    assert excess([1, 2, 2, 1], TWO_RANKS) == 0


def test_a_proposal_takes_what_it_says_from_the_fullest_rank() -> None:
    proposal = propose([3000, 3000, 1000, 1000], TWO_RANKS)
    assert proposal is not None
    assert imbalance([3000, 3000, 1000, 1000], proposal.after) == 1
    assert proposal.gained == 2000


@pytest.mark.parametrize("loads", [[0, 0, 0, 0], [10, 12, 9, 11], [1000, 1010, 990, 1000]])
def test_nothing_is_proposed_for_what_is_even_or_chance(loads: list[int]) -> None:
    assert propose(loads, TWO_RANKS) is None


def test_rows_drawn_alike_are_left_where_they_are() -> None:
    dice = random.Random(0)
    before = Placement.even(16, 4)
    for _ in range(100):
        drawn = [0] * 16
        for _ in range(400):
            drawn[dice.randrange(16)] += 1
        proposal = propose(drawn, before)
        assert proposal is None or imbalance(drawn, before) > 1.09, "ten in a hundred rows of a rank may be chance"


def test_moves_pay_where_less_waiting_makes_up_for_them() -> None:
    half = Proposal(TWO_RANKS, gained=50)
    assert pays(half, all_excess=100, waited_s=2.0, cost_s=0.99)
    assert not pays(half, all_excess=100, waited_s=2.0, cost_s=1.0)
    assert not pays(half, all_excess=0, waited_s=2.0, cost_s=0.0)
    assert not pays(Proposal(TWO_RANKS, gained=500), all_excess=100, waited_s=1.0, cost_s=1.0), "no more than all"


def test_older_counts_fade() -> None:
    loads = [0.0, 0.0]
    for counts in ([8, 0], [0, 8], [0, 8]):
        loads = remembered(loads, counts)
    assert loads == [2.0, 12.0]
    assert LEAST_GAIN < 0.05
