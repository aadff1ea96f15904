"""The placement of experts on the ranks that are left after other ranks were lost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moeserve.layers.moe.placement.placement import Placement


def hand_over(before: Placement, survivors: Sequence[int]) -> Placement:
    """Return the placement in which survivors keep their slots, and take over the experts that no survivor has.

    Each expert that is taken over gets one new slot, at the end of the rank with the fewest slots. Ties go to the
    lowest rank.

    Args:
        before: the placement before ranks were lost, of whole experts.
        survivors: surviving ranks of `before`, ascending, at least one. The result numbers ranks in this order.
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
    """Return the experts that a rank did not hold in `before`, by the rank from which it takes them.

    Each expert is taken from the lowest other rank that held the expert.

    Args:
        rank: the number of the rank in `before`.
        own: the experts that the rank held in `before`.
        experts: the experts that the rank holds afterwards; `own` comes first.
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
