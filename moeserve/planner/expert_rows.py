"""How the rows of tokens spread over the ranks that have their experts: how many leave, and how many the fullest gets.

Knows numbers alone, and takes experts to be chosen as often as each other: what a placement makes of loads is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, TypeAlias

from moeserve.planner.formula import Formula

ExchangeName: TypeAlias = Literal["direct", "by_node", "node_limited"]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How many rows the fullest rank has, where the mean is 1: from the placement, and from chance.

    Tokens choose independently, and each of them different experts. The rows of a rank are then about normal, and the
    largest of n independent normal values lies about z deviations above their mean (Blom, 1958). Where one rank has
    more, others have less: that makes the largest as much larger as leaving out "not this rank" from the variance. That
    the distribution is skewed moves it further (Cornish and Fisher, 1938). As many ranks are taken to compete as could
    have the fullest one's expected rows.
    """

    placement: float  # the fullest rank's expected rows, where the mean is 1
    num_ranks: int
    num_experts: int
    chosen: int  # of them, by each token

    def imbalance(self, num_tokens: float) -> float:
        """The fullest rank's rows over the mean, for so many tokens of all ranks; 1 where there are none."""
        if self.num_ranks == 1 or not self.chosen or not num_tokens:
            return 1.0
        z = self._quantile
        deviation, skewness = self._deviation(num_tokens)
        most = self.placement + z * deviation + (z * z - 1) / 6 * skewness
        return max(self.placement, min(most, max(self._highest, self.placement)))

    def formula(self, num_tokens: float) -> Formula:
        template = (
            "max({placement}, min({placement} + {z} x {deviation} + ({z} x {z} - 1) / 6 x {skewness}, {highest}))"
        )
        deviation, skewness = self._deviation(num_tokens)
        numbers = {
            "placement": self.placement,
            "z": self._quantile,
            "deviation": deviation,
            "skewness": skewness,
            "highest": max(self._highest, self.placement),
        }
        return Formula("rows of the fullest rank / mean", template, numbers, self.imbalance(num_tokens), unit="")

    @property
    def _highest(self) -> float:
        """Chosen experts differ, so a rank has at most the tokens times its experts."""
        return min(self.chosen, math.ceil(self.num_experts / self.num_ranks)) * self.num_ranks / self.chosen

    @property
    def _quantile(self) -> float:
        competing = max(1.0, self.num_ranks / self.placement)
        return NormalDist().inv_cdf((competing - 0.375) / (competing + 0.25))

    def _deviation(self, num_tokens: float) -> tuple[float, float]:
        """Of the fullest rank's rows, and their third moment over their second; both over the mean of the ranks."""
        share = min(1.0, self.placement / self.num_ranks)
        mean = num_tokens * self.chosen / self.num_ranks
        without_repeats = (self.num_experts - self.chosen) / max(1, self.num_experts - 1)
        variance = num_tokens * self.chosen * share * without_repeats
        return math.sqrt(variance) / mean, (1 - 2 * share) * without_repeats / mean


@dataclass(frozen=True)
class LeavingRows:
    """Rows that leave a rank for each of its tokens: to others of its node, and to other nodes."""

    inside: Formula
    outside: Formula


def rows_that_leave(
    how: ExchangeName,
    *,
    num_ranks: int,
    ranks_per_node: int,
    num_experts: int,
    chosen: int,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
) -> LeavingRows:
    """What dispatch sends, and combine brings back, if all experts are chosen equally often.

    By node, a row enters a node at one rank and is handed on from there, once for each expert that is elsewhere in it.

    Args:
        num_groups: of experts, as the router groups them; used by "node_limited" only, where each node must hold whole
            groups or each group whole nodes.
        num_chosen_groups: that a token's experts can be in.
    """
    in_node = min(num_ranks, ranks_per_node)
    numbers: dict[str, float] = {"chosen": chosen, "ranks_of_a_node": in_node, "ranks": num_ranks}
    if how == "direct":
        inside = "{chosen} x ({ranks_of_a_node} - 1) / {ranks}"
        outside = "{chosen} x ({ranks} - {ranks_of_a_node}) / {ranks}"
        return LeavingRows(
            Formula(_ROWS_INSIDE, inside, numbers, chosen * (in_node - 1) / num_ranks, unit="rows"),
            Formula(_ROWS_OUTSIDE, outside, numbers, chosen * (num_ranks - in_node) / num_ranks, unit="rows"),
        )
    num_nodes = num_ranks / in_node
    if how == "by_node":
        chance_of_none = 1.0
        for draw in range(chosen):
            chance_of_none *= max(0.0, num_experts * (1 - 1 / num_nodes) - draw) / (num_experts - draw)
        needed = 1 - chance_of_none
    else:
        needed = _chance_with_groups(num_nodes, chosen, num_groups, num_chosen_groups)
    numbers |= {"nodes": num_nodes, "chance_that_a_token_needs_a_node": needed}
    inside = "{chosen} x ({ranks_of_a_node} - 1) / {ranks_of_a_node}"
    outside = "({nodes} - 1) x {chance_that_a_token_needs_a_node}"
    return LeavingRows(
        Formula(_ROWS_INSIDE, inside, numbers, chosen * (in_node - 1) / in_node, unit="rows"),
        Formula(_ROWS_OUTSIDE, outside, numbers, (num_nodes - 1) * needed, unit="rows"),
    )


_ROWS_INSIDE, _ROWS_OUTSIDE = "rows inside the node, per token", "rows to other nodes, per token"


def _chance_with_groups(num_nodes: float, chosen: int, num_groups: int, num_chosen_groups: int) -> float:
    """That a token needs a given node, when its experts are drawn (with repeats) from a few groups of experts."""
    if num_nodes > num_groups:
        share = num_groups / (num_nodes * num_chosen_groups)  # of the experts of the chosen groups, if it is among them
        return num_chosen_groups / num_groups * (1 - (1 - share) ** chosen)
    groups_of_node = round(num_groups / num_nodes)
    chance = 0.0
    for present in range(1, min(groups_of_node, num_chosen_groups) + 1):
        ways = math.comb(groups_of_node, present) * math.comb(num_groups - groups_of_node, num_chosen_groups - present)
        chance_of_present = ways / math.comb(num_groups, num_chosen_groups)
        chance += chance_of_present * (1 - (1 - present / num_chosen_groups) ** chosen)
    return chance
