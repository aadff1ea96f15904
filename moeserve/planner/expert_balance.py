"""The load of experts, their placement and its rebalancing while virtual time passes.

Time is passed by `advance` and `rest`. Every `DRIFT_PERIOD_S`, pairs of experts exchange their loads, so the skew of a
layer is constant. At the end of a window its counts are drawn from the loads; rebalancing sees only these counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moeserve.expert_placement.eplb import imbalance, moves, place_experts
from moeserve.expert_placement.gain import add_window, excess_rows, is_worth_it, propose
from moeserve.expert_placement.placement import Placement
from moeserve.planner.costs import LayoutCosts, StepLoad
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import with_shared
from moeserve.planner.simulation_settings import ExpertSettings

DRIFT_PERIOD_S = 60.0
MAX_KEPT = 2**17  # cached results


@dataclass(frozen=True, kw_only=True)
class ExpertCounts:
    """The experts of a layer, and how many of them a token chooses."""

    routed: int
    shared: int = 0  # further ones, which every token chooses
    top_k: int  # routed experts of a token


@dataclass(frozen=True, kw_only=True)
class Rebalance:
    """A decision at the end of a window, carried out during the following steps."""

    at_s: float
    num_layers: int  # that changed
    num_moves: int  # experts that went to other ranks
    num_bytes: float  # of their weights
    transfer_s: float  # on the links of the busiest ranks, all layers together; steps get longer by this
    gain_s: float  # forecast
    balance_before: float  # rows of the fullest rank over the mean, by the window's counts; mean of all layers
    balance_after: float


class ExpertBalance:
    """The experts of all layers, from the start of a run to its end."""

    def __init__(
        self,
        costs: LayoutCosts,
        hardware: Hardware,
        settings: ExpertSettings,
        experts: ExpertCounts,
        loads: Sequence[Sequence[float]],
        seed: int,
    ) -> None:
        """
        Args:
            loads: by layer, by routed expert; empty: drawn with the settings' skew.

        Raises:
            SettingsError: the number of slots is impossible.
        """
        shape = costs.shape
        self._costs = costs
        self._settings = settings
        self._experts = experts
        # Separate generators, so that drift is the same with and without rebalancing.
        self._drift_random, self._count_random = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
        self._num_layers = shape.num_sparse_layers
        self._loads = _even_if_zero(loads) or _draw_loads(self._num_layers, experts.routed, settings.skew, seed)
        by_loads = self._loads if settings.placement == "loads" else ()
        if experts.shared and not by_loads:  # an expert that every token chooses needs many copies
            by_loads = [[1.0] * experts.routed] * self._num_layers
        self._placements = list(
            place_experts(
                [with_shared(of_layer, experts.top_k, experts.shared) for of_layer in by_loads],
                num_layers=self._num_layers,
                num_experts=experts.routed + experts.shared,
                num_ranks=shape.num_ranks,
                num_redundant=settings.num_redundant_experts,
            )
        )
        self._node_of_rank = [rank // shape.ranks_per_node for rank in range(shape.num_ranks)]
        self._expert_bytes = shape.expert_parameters * shape.weight_bytes
        efficiency = costs.assumptions.link_efficiency
        self._bandwidth = hardware.node_bandwidth * efficiency, hardware.network_bandwidth * efficiency
        self._counted_loads = [[0.0] * (experts.routed + experts.shared)] * self._num_layers
        self._imbalance_of_layer = [1.0] * self._num_layers
        self._imbalance_of_tokens: dict[int, float] = {}  # cache of `of_step`, until loads or placements change
        self._chance_cache: dict[tuple[float, int], float] = {}
        self._now = 0.0
        self._next_drift_s = DRIFT_PERIOD_S
        self._window = _Window(ends_at=settings.rebalance_window)
        self._moving: deque[_LayerMove] = deque()
        self.placement_epoch = 0  # placements that took effect, over all layers
        self.rebalances: list[Rebalance] = []
        self._refresh(range(self._num_layers))

    @property
    def expected(self) -> float:
        """Expected rows of the fullest rank over the mean, without chance; the mean of all layers."""
        return sum(self._imbalance_of_layer) / self._num_layers if self._num_layers else 1.0

    def of_step(self, num_tokens: int) -> float:
        """Return `expected` with the effect of chance in a step of `num_tokens`. See `LayoutCosts.step_seconds`."""
        known = self._imbalance_of_tokens.get(num_tokens)
        if known is None:
            of_layers = [self._with_chance(placement, num_tokens) for placement in self._imbalance_of_layer]
            known = self._imbalance_of_tokens[num_tokens] = sum(of_layers) / len(of_layers) if of_layers else 1.0
        return known

    def advance(self, load: StepLoad, step_s: float) -> float:
        """Run a step. Return the seconds by which moving experts made it longer.

        Args:
            load: of the step.
            step_s: its time without moves.
        """
        moving_s = self._move(step_s * self._settings.rebalance_share) if self._moving else 0.0
        self._window.count(load, step_s)
        self._pass_time(step_s + moving_s)
        return moving_s

    def rest(self, seconds: float) -> None:
        """Let time pass without steps. Nothing moves meanwhile, because moves are part of steps."""
        self._pass_time(seconds)

    def _pass_time(self, seconds: float) -> None:
        self._now += seconds
        while self._now >= self._next_drift_s:
            self._next_drift_s += DRIFT_PERIOD_S
            self._drift()
        if self._now >= self._window.ends_at:
            window = self._window
            self._window = _Window(ends_at=self._now + self._settings.rebalance_window)
            if self._settings.rebalance == "auto" and window.num_steps and self._num_layers:
                self._count_experts(window)
                if not self._moving:
                    self._rebalance(window)

    def _drift(self) -> None:
        if not self._settings.drift:
            return
        changed = []
        for layer, loads in enumerate(self._loads):
            # Each exchange changes two experts.
            mean = self._settings.drift * len(loads) / 2 * DRIFT_PERIOD_S / 3600
            num_exchanges = int(self._drift_random.poisson(mean))
            for one, other in self._drift_random.integers(len(loads), size=(num_exchanges, 2)).tolist():
                loads[one], loads[other] = loads[other], loads[one]
            if num_exchanges:
                changed.append(layer)
        self._refresh(changed)

    def _refresh(self, layers: Sequence[int]) -> None:
        """Update the imbalance of layers whose loads or placement have changed."""
        for layer in layers:
            loads = with_shared(self._loads[layer], self._experts.top_k, self._experts.shared)
            self._imbalance_of_layer[layer] = imbalance(loads, self._placements[layer])
        self._imbalance_of_tokens.clear()

    def _with_chance(self, placement: float, num_tokens: int) -> float:
        known = self._chance_cache.get((placement, num_tokens))
        if known is None:
            balance = replace(self._costs.shape.balance, placement=placement)
            known = balance.imbalance(num_tokens / self._costs.num_parts)
            if len(self._chance_cache) >= MAX_KEPT:
                self._chance_cache.clear()
            self._chance_cache[placement, num_tokens] = known
        return known

    def _count_experts(self, window: _Window) -> None:
        """Draw the counts that the tokens of a window would have given."""
        num_tokens = int(window.load.num_tokens)
        for layer in range(self._num_layers):
            loads = np.asarray(self._loads[layer])
            drawn = self._count_random.multinomial(num_tokens * self._experts.top_k, loads / loads.sum()).tolist()
            counts = [*drawn, *[num_tokens] * self._experts.shared]
            self._counted_loads[layer] = add_window(self._counted_loads[layer], counts)

    def _rebalance(self, window: _Window) -> None:
        """Start the moves of each layer that is forecast to gain more than they cost, as the engine does."""
        load = window.load.divided(window.num_steps)  # of the average step
        lasted_s = self._now - window.ends_at + self._settings.rebalance_window
        busy_s = self._settings.rebalance_horizon * window.seconds / lasted_s
        now_s = self._costs.step_seconds(load, self.of_step(max(1, round(load.num_tokens)))).seconds
        waited_s = busy_s * (1 - self._costs.step_seconds(load, 1.0).seconds / now_s)

        excess_of_model = sum(map(excess_rows, self._counted_loads, self._placements))
        before_all, after_all, gain_s = [], [], 0.0
        for layer, placement in enumerate(self._placements):
            loads = self._counted_loads[layer]
            proposal = propose(loads, placement)
            before_all.append(imbalance(loads, placement))
            after_all.append(before_all[-1])
            if proposal is None:
                continue
            move = self._layer_move(layer, placement, proposal.placement)
            if is_worth_it(proposal, excess_of_model=excess_of_model, waited_s=waited_s, cost_s=move.seconds):
                self._moving.append(move)
                after_all[-1] = imbalance(loads, proposal.placement)
                gain_s += waited_s * proposal.rows_saved / excess_of_model
        if self._moving:
            num_moves = sum(move.num_moves for move in self._moving)
            self.rebalances.append(
                Rebalance(
                    at_s=self._now,
                    num_layers=len(self._moving),
                    num_moves=num_moves,
                    num_bytes=num_moves * self._expert_bytes,
                    transfer_s=sum(move.seconds for move in self._moving),
                    gain_s=gain_s,
                    balance_before=sum(before_all) / len(before_all),
                    balance_after=sum(after_all) / len(after_all),
                )
            )

    def _layer_move(self, layer: int, before: Placement, after: Placement) -> _LayerMove:
        """Return the moves of a layer. Their time is that of the busiest link of any rank, in either direction."""
        num_ranks = before.num_ranks
        # Experts sent or received by each rank, by kind of link (inside the node, network) and direction.
        counts = [[0] * num_ranks for _ in range(4)]
        num_moves = 0
        for move in moves(before, after, self._node_of_rank):
            if move.from_rank != move.to_rank:
                is_far = self._node_of_rank[move.from_rank] != self._node_of_rank[move.to_rank]
                counts[2 * is_far][move.from_rank] += 1
                counts[2 * is_far + 1][move.to_rank] += 1
                num_moves += 1
        inside, outside = max(counts[0] + counts[1]), max(counts[2] + counts[3])
        node_bandwidth, network_bandwidth = self._bandwidth
        seconds = self._expert_bytes * max(inside / node_bandwidth, outside / network_bandwidth)
        return _LayerMove(layer, after, num_moves, seconds, seconds)

    def _move(self, budget_s: float) -> float:
        """Continue the moves for at most this long. A placement takes effect when its layer is complete."""
        used_s = 0.0
        while self._moving:
            move = self._moving[0]
            spent_s = min(move.left_s, budget_s - used_s)
            move.left_s -= spent_s
            used_s += spent_s
            if move.left_s > 0.0:
                break
            self._moving.popleft()
            self._placements[move.layer] = move.after
            self.placement_epoch += 1
            self._refresh([move.layer])
        return used_s


def _even_if_zero(loads: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the loads, with equal ones in layers without counts."""
    return [list(of_layer) if any(of_layer) else [1.0] * len(of_layer) for of_layer in loads]


def _draw_loads(num_layers: int, num_experts: int, skew: float, seed: int) -> list[list[float]]:
    generator = np.random.default_rng([seed, 0])
    return [np.exp(generator.normal(0.0, skew, num_experts)).tolist() for _ in range(num_layers)]


@dataclass(eq=False)
class _LayerMove:
    layer: int
    after: Placement
    num_moves: int
    seconds: float
    left_s: float


@dataclass(eq=False)
class _Window:
    """Steps that are counted together."""

    ends_at: float
    num_steps: int = 0
    seconds: float = 0.0
    load: StepLoad = StepLoad()  # sum over the steps

    def count(self, load: StepLoad, step_s: float) -> None:
        self.num_steps += 1
        self.seconds += step_s
        self.load = self.load.plus(load)
