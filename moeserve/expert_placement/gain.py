"""Decides if experts should move: the gain of a better placement against the cost of the moves.

The engine and the simulator both decide by these functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.expert_placement.eplb import imbalance, rank_loads, rebalance
from moeserve.expert_placement.placement import Placement

MIN_GAIN = 0.02  # least improvement of a layer's imbalance
DECAY = 0.5  # factor on older counts, per window


@dataclass(frozen=True)
class Proposal:
    """A better placement of one layer."""

    placement: Placement
    rows_saved: float  # reduction of the fullest rank's rows


def add_window(loads: Sequence[float], counts: Sequence[float]) -> list[float]:
    """Return a layer's loads after another window, in which older counts have decayed.

    Args:
        loads: by expert, before.
        counts: by expert, of the new window.
    """
    return [DECAY * old + new for old, new in zip(loads, counts, strict=True)]


def excess_rows(loads: Sequence[float], placement: Placement) -> float:
    """Return the rows of the fullest rank above the mean of the ranks, for which all ranks wait."""
    of_rank = rank_loads(loads, placement)
    return max(of_rank) - sum(of_rank) / len(of_rank)


def propose(loads: Sequence[float], placement: Placement) -> Proposal | None:
    """Propose a better placement for one layer. Return None unless it gains more than chance explains.

    Args:
        loads: rows by expert, as counted.
        placement: in use.
    """
    if not any(loads):
        return None
    after = rebalance(loads, placement)
    chance = 1 / math.sqrt(max(1.0, sum(loads) / placement.num_ranks))
    if imbalance(loads, placement) - imbalance(loads, after) <= max(MIN_GAIN, chance):
        return None
    return Proposal(after, max(rank_loads(loads, placement)) - max(rank_loads(loads, after)))


def is_worth_it(proposal: Proposal, *, excess_of_model: float, waited_s: float, cost_s: float) -> bool:
    """True if less waiting makes up for the moves.

    Args:
        excess_of_model: `excess_rows` of all layers together.
        waited_s: forecast of the time that ranks wait for fuller ones, in all layers, if nothing moves.
        cost_s: time by which the moves make steps longer, in total.
    """
    return excess_of_model > 0 and waited_s * min(1.0, proposal.rows_saved / excess_of_model) > cost_s
