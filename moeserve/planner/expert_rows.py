"""Distribution of rows over the ranks of their experts: how many leave a rank, and how many the fullest rank gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, TypeAlias

from moeserve.planner.formula import Formula

ExchangeName: TypeAlias = Literal["direct", "by_node", "node_limited"]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Rows of the fullest rank over the mean of the ranks, from the placement and from chance.

    Tokens choose independently, each of them different experts. The rows of a rank are then about normal, and the
    largest of n independent normal values lies about z deviations above their mean (Blom, 1958). Ranks are negatively
    correlated, which raises the largest as much as leaving out "not this rank" from the variance does. The skewness of
    the distribution raises it further (Cornish and Fisher, 1938). The number of competing ranks is the number that
    could have the fullest one's expected rows.
    """

    placement: float  # the fullest rank's expected rows, where the mean is 1
    num_ranks: int
    num_experts: int
    chosen: int  # of them, by each token

    def imbalance(self, num_tokens: float) -> float:
        """Return the fullest rank's rows over the mean, for these tokens of all ranks; 1 without any."""
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
        """Upper bound of the imbalance: a token chooses each of a rank's experts at most once."""
        return min(self.chosen, math.ceil(self.num_experts / self.num_ranks)) * self.num_ranks / self.chosen

    @property
    def _quantile(self) -> float:
        competing = max(1.0, self.num_ranks / self.placement)
        return NormalDist().inv_cdf((competing - 0.375) / (competing + 0.25))

    def _deviation(self, num_tokens: float) -> tuple[float, float]:
        """Return the standard deviation and third over second moment of the fullest rank's rows, over the mean."""
        share = min(1.0, self.placement / self.num_ranks)
        mean = num_tokens * self.chosen / self.num_ranks
        without_repeats = (self.num_experts - self.chosen) / max(1, self.num_experts - 1)
        variance = num_tokens * self.chosen * share * without_repeats
        return math.sqrt(variance) / mean, (1 - 2 * share) * without_repeats / mean


@dataclass(frozen=True)
class LeavingRows:
    """Rows that leave a rank for each of its tokens: to other ranks of its node, and to other nodes."""

    inside: Formula
    outside: Formula


def rows_that_leave(
    exchange: ExchangeName,
    *,
    num_ranks: int,
    ranks_per_node: int,
    num_experts: int,
    chosen: int,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
) -> LeavingRows:
    """Return the rows that dispatch sends and combine returns, if all experts are chosen equally often.

    With "by_node", a row enters a node at one rank, which forwards it once for each expert on another of its ranks.

    Args:
        num_groups: of the router's experts. With "node_limited", nodes must hold whole groups, or groups whole nodes.
        num_chosen_groups: groups among which a token chooses its experts.
    """
    in_node = min(num_ranks, ranks_per_node)
    numbers: dict[str, float] = {"chosen": chosen, "ranks_of_a_node": in_node, "ranks": num_ranks}
    if exchange == "direct":
        inside = "{chosen} x ({ranks_of_a_node} - 1) / {ranks}"
        outside = "{chosen} x ({ranks} - {ranks_of_a_node}) / {ranks}"
        return LeavingRows(
            Formula(_ROWS_INSIDE, inside, numbers, chosen * (in_node - 1) / num_ranks, unit="rows"),
            Formula(_ROWS_OUTSIDE, outside, numbers, chosen * (num_ranks - in_node) / num_ranks, unit="rows"),
        )
    num_nodes = num_ranks / in_node
    if exchange == "by_node":
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
    """Return the probability that a token needs a given node, if it draws experts (with repeats) from few groups."""
    if num_nodes > num_groups:
        share = num_groups / (num_nodes * num_chosen_groups)  # of the chosen groups' experts, if its group is chosen
        return num_chosen_groups / num_groups * (1 - (1 - share) ** chosen)
    groups_of_node = round(num_groups / num_nodes)
    chance = 0.0
    for present in range(1, min(groups_of_node, num_chosen_groups) + 1):
        ways = math.comb(groups_of_node, present) * math.comb(num_groups - groups_of_node, num_chosen_groups - present)
        chance_of_present = ways / math.comb(num_groups, num_chosen_groups)
        chance += chance_of_present * (1 - (1 - present / num_chosen_groups) ** chosen)
    return chance
