"""After ranks are lost, every expert has a rank, and whoever takes one over knows the one rank to take it from."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moeserve.layers.moe.placement.handover import hand_over, sources_of
from moeserve.layers.moe.placement.placement import Placement


def drawn(seed: int) -> tuple[Placement, list[int]]:
    """Return a placement on up to 320 ranks, and those that are left."""
    dice = random.Random(seed)
    num_ranks = dice.choice([2, 3, 4, 8, 64, 320])
    num_experts = dice.choice([1, 8, 60, 256, 384])
    num_redundant = dice.randrange(num_experts * (num_ranks - 1) + 1) if dice.random() < 0.5 else 0
    even = Placement.even(num_experts, num_ranks, num_redundant)
    names = dice.sample(range(num_experts), num_experts)
    placement = Placement(tuple(tuple(names[each] for each in slots) for slots in even.logical_of_slot), num_experts)
    return placement, sorted(dice.sample(range(num_ranks), dice.randrange(1, num_ranks)))


@pytest.mark.parametrize("seed", range(100))
def test_every_expert_has_a_rank_and_one_source(seed: int) -> None:
    before, survivors = drawn(seed)
    after = hand_over(before, survivors)  # its constructor checks that no expert is missing
    held = {expert for rank in survivors for expert in before.logical_of_slot[rank]}
    taken: Counter[int] = Counter()
    for rank, survivor in enumerate(survivors):
        own, slots = before.logical_of_slot[survivor], after.logical_of_slot[rank]
        assert slots[: len(own)] == own
        assert len(set(slots)) == len(slots)
        sources = sources_of(before, survivor, own, slots)
        assert sorted(expert for experts in sources.values() for expert in experts) == sorted(slots[len(own) :])
        for holder, experts in sources.items():
            assert holder not in survivors
            assert {*experts} <= {*before.logical_of_slot[holder]}
        taken.update(slots[len(own) :])
    assert taken == Counter(set(range(before.num_logical)) - held)
    takers = [
        len(slots)
        for slots, rank in zip(after.logical_of_slot, survivors, strict=True)
        if len(slots) > before.num_slots[rank]
    ]
    assert not takers or max(takers) <= min(after.num_slots) + 1
