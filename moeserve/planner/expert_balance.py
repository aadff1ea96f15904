"""The load of experts, their placement, and its rebalancing in virtual time.

Every `DRIFT_PERIOD_S` seconds, pairs of experts swap their loads, so the skew of a layer stays constant. At the end of
each window, the engine's own policy (layers/moe/placement/gain.py) decides on rebalancing. Experts move at once, and
the step that ends the window takes longer by the time of the transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeserve.layers.moe.placement.eplb import imbalance, moves, place_experts
from moeserve.layers.moe.placement.gain import add_window, excess_rows, is_worth_it, propose
from moeserve.layers.moe.placement.placement import Placement
from moeserve.planner.costs import LayoutCosts, StepLoad
from moeserve.planner.settings import ExpertSettings

DRIFT_PERIOD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Rebalance:
    """A rebalancing of experts at the end of a window."""

    at_s: float
    num_layers: int  # layers that changed
    num_bytes: float  # weights of the experts that moved to other ranks
    transfer_s: float  # time on the busiest links, all layers together
    balance_before: float  # value of `ExpertBalance.expected`
    balance_after: float


class ExpertBalance:
    """The experts of all layers during a simulation."""

    def __init__(
        self, costs: LayoutCosts, settings: ExpertSettings, loads: Sequence[Sequence[float]], seed: int
    ) -> None:
        """
        Args:
            loads: tokens by layer and by expert.

        Raises:
            SettingsError: the number of expert slots is impossible.
        """
        self._costs = costs
        self._settings = settings
        self._random = np.random.default_rng([seed, 1])
        self._loads = [list(of_layer) if any(of_layer) else [1.0] * len(of_layer) for of_layer in loads]
        num_experts = len(loads[0]) if loads else 0
        self._node_of_rank = [rank // costs.ranks_per_node for rank in range(costs.num_ranks)]
        self._placements = list(
            place_experts(
                self._loads if settings.placement == "loads" else (),
                num_layers=len(loads),
                num_experts=num_experts,
                num_ranks=costs.num_ranks,
                num_redundant=settings.num_redundant_experts,
                node_of_rank=self._node_of_rank,
                num_groups=costs.num_expert_groups,
            )
        )
        self._counted_loads = [[0.0] * num_experts] * len(loads)
        self._now = 0.0
        self._next_drift_s = DRIFT_PERIOD_S
        self._start_window()
        self._measure()
        self.rebalances: list[Rebalance] = []

    def advance(self, load: StepLoad, step_s: float) -> float:
        """Advance by one step. Return the seconds by which transfers of experts made the step longer."""
        self._pass_time(step_s)
        if self._settings.rebalance == "off" or not self._loads:
            return 0.0
        self._num_tokens += load.num_tokens
        self._steps_s += step_s
        self._waited_s += step_s - self._costs.for_step(load).step_seconds(load, imbalance=1.0).seconds
        if self._now < self._window_ends_at:
            return 0.0
        moving_s = self._rebalance()
        self._pass_time(moving_s)
        self._start_window()
        return moving_s

    def rest(self, seconds: float) -> None:
        """Advance the time without a step."""
        self._pass_time(seconds)

    def _start_window(self) -> None:
        self._window_ends_at = self._now + self._settings.rebalance_window
        self._num_tokens = self._steps_s = self._waited_s = 0.0

    def _measure(self) -> None:
        """Compute `expected` after loads or placements have changed."""
        imbalances = list(map(imbalance, self._loads, self._placements))
        # Rows of the fullest rank over the mean, as expected from the placement alone. Mean over the layers.
        self.expected = sum(imbalances) / len(imbalances) if imbalances else 1.0

    def _pass_time(self, seconds: float) -> None:
        self._now += seconds
        while self._now >= self._next_drift_s:
            self._next_drift_s += DRIFT_PERIOD_S
            if self._settings.drift:
                self._drift()

    def _drift(self) -> None:
        for loads in self._loads:
            # Each swap changes two experts.
            mean = self._settings.drift * len(loads) / 2 * DRIFT_PERIOD_S / 3600
            num_exchanges = int(self._random.poisson(mean))
            for one, other in self._random.integers(len(loads), size=(num_exchanges, 2)).tolist():
                loads[one], loads[other] = loads[other], loads[one]
        self._measure()

    def _rebalance(self) -> float:
        """Rebalance each layer whose forecast gain exceeds the cost of its moves. Return the seconds of transfers."""
        for layer, loads in enumerate(self._loads):
            rows = self._num_tokens * self._costs.top_k / sum(loads)
            counts = [rows * load for load in loads]
            self._counted_loads[layer] = add_window(self._counted_loads[layer], counts)
        waited_s = self._waited_s / self._steps_s * self._settings.rebalance_horizon
        excess_of_model = sum(map(excess_rows, self._counted_loads, self._placements))
        before, num_layers, num_moves, transfer_s = self.expected, 0, 0, 0.0
        for layer, (loads, placement) in enumerate(zip(self._counted_loads, self._placements, strict=True)):
            proposal = propose(loads, placement)
            if proposal is None:
                continue
            num_sent, cost_s = self._transfer(placement, proposal.placement)
            if is_worth_it(proposal, excess_of_model=excess_of_model, waited_s=waited_s, cost_s=cost_s):
                self._placements[layer] = proposal.placement
                num_layers, num_moves, transfer_s = num_layers + 1, num_moves + num_sent, transfer_s + cost_s
        if num_layers:
            self._measure()
            self.rebalances.append(
                Rebalance(
                    at_s=self._now,
                    num_layers=num_layers,
                    num_bytes=num_moves * self._costs.expert_bytes,
                    transfer_s=transfer_s,
                    balance_before=before,
                    balance_after=self.expected,
                )
            )
        return transfer_s

    def _transfer(self, before: Placement, after: Placement) -> tuple[int, float]:
        """Return the number of experts that change ranks, and the seconds for which the busiest link transfers them."""
        # Experts sent and received by each rank; axes: kind of link (node, network), direction, rank.
        counts = np.zeros((2, 2, before.num_ranks))
        for move in moves(before, after, self._node_of_rank):
            if move.from_rank != move.to_rank:
                is_far = int(self._node_of_rank[move.from_rank] != self._node_of_rank[move.to_rank])
                counts[is_far, 0, move.from_rank] += 1
                counts[is_far, 1, move.to_rank] += 1
        inside, outside = counts.max(axis=(1, 2)).tolist()
        costs = self._costs
        seconds = costs.expert_bytes * max(inside / costs.node_bandwidth, outside / costs.network_bandwidth)
        return int(counts[:, 0].sum()), seconds


def draw_loads(num_layers: int, num_experts: int, skew: float, seed: int) -> list[list[float]]:
    """Return loads by layer and by expert, drawn log-normally with standard deviation `skew` of the logarithm."""
    generator = np.random.default_rng([seed, 0])
    return [np.exp(generator.normal(0.0, skew, num_experts)).tolist() for _ in range(num_layers)]
