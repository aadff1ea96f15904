"""The placement of experts on the ranks that are left after others were lost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moeserve.layers.moe.placement.placement import Placement


def hand_over(before: Placement, survivors: Sequence[int]) -> Placement:
    """Return the placement in which survivors keep their slots, and take over the experts that none of them has.

    Each of these experts gets one slot, behind the others of the rank that has the fewest; ties go to the lowest rank.

    Args:
        before: whole experts, not slices.
        survivors: ranks of `before`, ascending, at least one. They are numbered in this order.
    """
    assert before.num_slices == 1
    ranks = [list(before.logical_of_slot[rank]) for rank in survivors]
    held = {expert for slots in ranks for expert in slots}
    by_size = [(len(slots), rank) for rank, slots in enumerate(ranks)]
    heapq.heapify(by_size)
    for expert in range(before.num_logical):
        if expert not in held:
            size, rank = by_size[0]
            ranks[rank].append(expert)
            heapq.heapreplace(by_size, (size + 1, rank))
    return Placement(tuple(map(tuple, ranks)), before.num_logical)


def sources_of(before: Placement, rank: int, own: Sequence[int], experts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return from which ranks of `before` a rank takes the experts that it has not held, by rank.

    Each is taken from the lowest other rank that held it.

    Args:
        rank: the rank in `before`.
        own: the experts that it held.
        experts: those that it holds afterwards.
    """
    first_holder: dict[int, int] = {}
    for holder, slots in enumerate(before.logical_of_slot):
        for expert in slots:
            if holder != rank:
                first_holder.setdefault(expert, holder)
    taken: dict[int, tuple[int, ...]] = {}
    for expert in experts[len(own) :]:
        holder = first_holder[expert]
        taken[holder] = (*taken.get(holder, ()), expert)
    return taken
