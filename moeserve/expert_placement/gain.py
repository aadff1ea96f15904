"""Whether experts should move: what a better placement gains, against what it costs. Knows loads and seconds only.

Engine and simulator decide by the same functions, from what they have counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.expert_placement.eplb import imbalance, rank_loads, rebalance
from moeserve.expert_placement.placement import Placement

LEAST_GAIN = 0.02  # of a layer's fullest rank, over the mean of ranks
MEMORY = 0.5  # of a window's counts, so much is left when the next one comes


@dataclass(frozen=True)
class Proposal:
    """A better placement of one layer."""

    after: Placement
    gained: float  # rows that its fullest rank has less


def remembered(before: Sequence[float], counts: Sequence[int]) -> list[float]:
    """A layer's loads after another window: counts of older ones fade.

    Args:
        before: by expert, as this function gave it.
        counts: by expert, of the new window.
    """
    return [MEMORY * old + new for old, new in zip(before, counts, strict=True)]


def excess(loads: Sequence[float], placement: Placement) -> float:
    """Rows of the fullest rank above the mean of the ranks: what all of them wait for."""
    of_rank = rank_loads(loads, placement)
    return max(of_rank) - sum(of_rank) / len(of_rank)


def propose(loads: Sequence[float], before: Placement) -> Proposal | None:
    """A placement of few moves that is better by more than rows are uneven by chance; None if there is none.

    Args:
        loads: rows by expert, as many as were counted.
        before: the placement in use.
    """
    if not any(loads):
        return None
    after = rebalance(loads, before)
    chance = 1 / math.sqrt(max(1.0, sum(loads) / before.num_ranks))
    if imbalance(loads, before) - imbalance(loads, after) <= max(LEAST_GAIN, chance):
        return None
    gained = max(rank_loads(loads, before)) - max(rank_loads(loads, after))
    return Proposal(after, gained) if after != before else None


def pays(proposal: Proposal, *, all_excess: float, waited_s: float, cost_s: float) -> bool:
    """Whether less waiting makes up for the moves.

    Args:
        all_excess: of all layers together, see `excess`.
        waited_s: what ranks are forecast to wait for fuller ones, in all layers, if nothing moves.
        cost_s: by which moving makes steps longer, in all.
    """
    return all_excess > 0 and waited_s * min(1.0, proposal.gained / all_excess) > cost_s
