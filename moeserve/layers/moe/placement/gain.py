"""Decides whether experts should move: compares the gain of a better placement with the cost of the moves.

The engine and the simulator share these functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.layers.moe.placement.eplb import imbalance, rank_loads, rebalance
from moeserve.layers.moe.placement.placement import Placement

MIN_GAIN = 0.02  # minimum improvement of a layer's imbalance
DECAY = 0.5  # factor on older counts for each new window


@dataclass(frozen=True)
class Proposal:
    """A better placement of one layer."""

    placement: Placement
    rows_saved: float  # reduction of the fullest rank's rows


def add_window(loads: Sequence[float], counts: Sequence[float]) -> list[float]:
    """Return a layer's loads after another window. Older counts decay.

    Args:
        loads: loads before the window, by expert.
        counts: counts of the window, by expert.
    """
    return [DECAY * old + new for old, new in zip(loads, counts, strict=True)]


def excess_rows(loads: Sequence[float], placement: Placement) -> float:
    """Return the rows of the fullest rank above the mean of the ranks. All other ranks wait for these rows."""
    of_rank = rank_loads(loads, placement)
    return max(of_rank) - sum(of_rank) / len(of_rank)


def propose(loads: Sequence[float], placement: Placement) -> Proposal | None:
    """Return a better placement for one layer, or None if the gain could be due to chance.

    Args:
        loads: counted rows by expert.
        placement: the current placement.
    """
    if not any(loads):
        return None
    after = rebalance(loads, placement)
    chance = 1 / math.sqrt(max(1.0, sum(loads) / placement.num_ranks))
    if imbalance(loads, placement) - imbalance(loads, after) <= max(MIN_GAIN, chance):
        return None
    return Proposal(after, max(rank_loads(loads, placement)) - max(rank_loads(loads, after)))


def is_worth_it(proposal: Proposal, *, excess_of_model: float, waited_s: float, cost_s: float) -> bool:
    """Return True if the reduction of waiting time exceeds the cost of the moves.

    Args:
        excess_of_model: the sum of `excess_rows` over all layers.
        waited_s: forecast of the time that ranks wait for fuller ranks, over all layers, if nothing moves.
        cost_s: total time by which the moves make steps longer.
    """
    return excess_of_model > 0 and waited_s * min(1.0, proposal.rows_saved / excess_of_model) > cost_s
