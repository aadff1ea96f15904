"""Which experts are wanted, where they are, and how even that makes the ranks, while virtual time passes.

Owns the popularity of experts and its drift, the placement of each layer that has experts, and the moves by which the
balancer improves it. Knows steps as numbers of tokens and seconds: no requests, no replicas.

Time is told by `advance`. Popularity changes once in `DRIFT_PERIOD_S`, when pairs of experts exchange theirs; so the
skew of a layer stays what it is, and any profile can drift. What experts were given is drawn from their popularity when
a window ends, and the balancer sees nothing but these counts.
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
MAX_KEPT = 2**17  # figures that are computed once


@dataclass(frozen=True, kw_only=True)
class Rebalance:
    """What was decided at the end of a window, and moved in the steps after it."""

    at_s: float
    num_layers: int  # that changed
    num_moves: int  # experts that went to other ranks
    num_bytes: float  # of their weights
    transfer_s: float  # that the links of the busiest ranks take, layer after layer: steps get longer by so much
    gain_s: float  # that was forecast
    balance_before: float  # rows of the fullest rank over the mean, by the counts of the window; mean of all layers
    balance_after: float


class ExpertBalance:
    """The experts of all layers, from the start of a run to its end."""

    def __init__(
        self,
        costs: LayoutCosts,
        hardware: Hardware,
        settings: ExpertSettings,
        loads: Sequence[Sequence[float]],
        *,
        num_experts: int,
        num_shared: int = 0,
        top_k: int,
        seed: int,
    ) -> None:
        """
        Args:
            loads: by layer, by routed expert; empty: drawn, with the settings' skew.
            num_experts: routed ones of a layer.
            num_shared: further ones, which every token chooses.
            top_k: of them, that a token chooses.

        Raises:
            SettingsError: slots that cannot be.
        """
        shape = costs.shape
        self._costs = costs
        self._settings = settings
        self._top_k = top_k
        self._num_shared = num_shared
        # One for each use, so that drift is the same with and without rebalancing.
        self._drift_dice, self._count_dice = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
        self._num_layers = shape.num_sparse_layers
        # Of routed experts.
        self._loads = _even_if_zero(loads) or _drawn(self._num_layers, num_experts, settings.skew, seed)
        by_loads = self._loads if settings.placement == "loads" else ()
        if num_shared and not by_loads:  # not in their order: one copy of what every token chooses would not do
            by_loads = [[1.0] * num_experts] * self._num_layers
        self._placements = list(
            place_experts(
                [with_shared(of_layer, top_k, num_shared) for of_layer in by_loads],
                num_layers=self._num_layers,
                num_experts=num_experts + num_shared,
                num_ranks=shape.num_ranks,
                num_redundant=settings.num_redundant_experts,
            )
        )
        self._node_of_rank = [rank // shape.ranks_per_node for rank in range(shape.num_ranks)]
        self._expert_bytes = shape.expert_parameters * shape.weight_bytes
        efficiency = costs.assumptions.link_efficiency
        self._bandwidth = hardware.node_bandwidth * efficiency, hardware.network_bandwidth * efficiency
        self._seen = [[0.0] * (num_experts + num_shared)] * self._num_layers  # loads, as the windows' counts tell them
        self._of_layer = [1.0] * self._num_layers  # imbalance that is to be expected
        self._of_tokens: dict[int, float] = {}  # of a step with so many, by chance too; until anything changes
        self._of_both: dict[tuple[float, int], float] = {}
        self._now = 0.0
        self._next_drift_s = DRIFT_PERIOD_S
        self._window = _Window(ends_at=settings.rebalance_window)
        self._moving: deque[_LayerMove] = deque()
        self.placement_epoch = 0  # layers that have got another placement
        self.rebalances: list[Rebalance] = []
        self._refresh(range(self._num_layers))

    @property
    def expected(self) -> float:
        """Rows of the fullest rank over the mean, as the placement lets expect; mean of the layers."""
        return sum(self._of_layer) / self._num_layers if self._num_layers else 1.0

    def of_step(self, num_tokens: int) -> float:
        """The same for a step of so many tokens, by chance too: as `step_seconds` takes it."""
        known = self._of_tokens.get(num_tokens)
        if known is None:
            of_layers = [self._by_chance(placement, num_tokens) for placement in self._of_layer]
            known = self._of_tokens[num_tokens] = sum(of_layers) / len(of_layers) if of_layers else 1.0
        return known

    def advance(self, load: StepLoad, step_s: float) -> float:
        """A step has been run. Returns by how many seconds moving experts made it longer.

        Args:
            load: what was run.
            step_s: that it takes by itself.
        """
        moving_s = self._move(step_s * self._settings.rebalance_share) if self._moving else 0.0
        self._window.count(load, step_s)
        self._pass(step_s + moving_s)
        return moving_s

    def rest(self, seconds: float) -> None:
        """Time passes without steps. Nothing moves meanwhile: moves are agreed on in steps."""
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self._now += seconds
        while self._now >= self._next_drift_s:
            self._next_drift_s += DRIFT_PERIOD_S
            self._drift()
        if self._now >= self._window.ends_at:
            window = self._window
            self._window = _Window(ends_at=self._now + self._settings.rebalance_window)
            if self._settings.rebalance == "auto" and window.num_steps and self._num_layers:
                self._remember(window)
                if not self._moving:
                    self._rebalance(window)

    def _drift(self) -> None:
        if not self._settings.drift:
            return
        changed = []
        for layer, loads in enumerate(self._loads):
            # Each exchange changes two experts.
            mean = self._settings.drift * len(loads) / 2 * DRIFT_PERIOD_S / 3600
            num_exchanges = int(self._drift_dice.poisson(mean))
            for one, other in self._drift_dice.integers(len(loads), size=(num_exchanges, 2)).tolist():
                loads[one], loads[other] = loads[other], loads[one]
            if num_exchanges:
                changed.append(layer)
        self._refresh(changed)

    def _refresh(self, layers: Sequence[int]) -> None:
        """After the loads or the placement of these layers have changed."""
        for layer in layers:
            loads = with_shared(self._loads[layer], self._top_k, self._num_shared)
            self._of_layer[layer] = imbalance(loads, self._placements[layer])
        self._of_tokens.clear()

    def _by_chance(self, placement: float, num_tokens: int) -> float:
        known = self._of_both.get((placement, num_tokens))
        if known is None:
            parts = 2 if self._costs.assumptions.overlap else 1
            known = replace(self._costs.shape.balance, placement=placement).imbalance(num_tokens / parts)
            if len(self._of_both) >= MAX_KEPT:
                self._of_both.clear()
            self._of_both[placement, num_tokens] = known
        return known

    def _remember(self, window: _Window) -> None:
        """What tokens of the window would have counted, drawn from the loads; the balancer sees nothing else."""
        for layer in range(self._num_layers):
            loads = np.asarray(self._loads[layer])
            drawn = self._count_dice.multinomial(window.num_tokens * self._top_k, loads / loads.sum()).tolist()
            self._seen[layer] = add_window(self._seen[layer], [*drawn, *[window.num_tokens] * self._num_shared])

    def _rebalance(self, window: _Window) -> None:
        """Starts the moves of each layer that is forecast to gain more than they cost, as the engine does it."""
        load = window.mean_load()
        lasted_s = self._now - window.ends_at + self._settings.rebalance_window
        busy_s = self._settings.rebalance_horizon * window.seconds / lasted_s
        now_s = self._costs.step_seconds(load, self.of_step(max(1, round(load.num_tokens)))).seconds
        waited_s = busy_s * (1 - self._costs.step_seconds(load, 1.0).seconds / now_s)

        all_excess = sum(map(excess_rows, self._seen, self._placements))
        proposals = list(map(propose, self._seen, self._placements))
        before_all, after_all, gain_s = [], [], 0.0
        for layer, (placement, proposal) in enumerate(zip(self._placements, proposals, strict=True)):
            before_all.append(imbalance(self._seen[layer], placement))
            after_all.append(before_all[-1])
            if proposal is None:
                continue
            move = self._layer_move(layer, placement, proposal.placement)
            if is_worth_it(proposal, excess_of_model=all_excess, waited_s=waited_s, cost_s=move.seconds):
                self._moving.append(move)
                after_all[-1] = imbalance(self._seen[layer], proposal.placement)
                gain_s += waited_s * proposal.rows_saved / all_excess
        if self._moving:
            self.rebalances.append(
                Rebalance(
                    at_s=self._now,
                    num_layers=len(self._moving),
                    num_moves=sum(move.num_moves for move in self._moving),
                    num_bytes=sum(move.num_moves for move in self._moving) * self._expert_bytes,
                    transfer_s=sum(move.seconds for move in self._moving),
                    gain_s=gain_s,
                    balance_before=sum(before_all) / len(before_all),
                    balance_after=sum(after_all) / len(after_all),
                )
            )

    def _layer_move(self, layer: int, before: Placement, after: Placement) -> _LayerMove:
        """With its time: that of the busiest link of any rank, in either direction."""
        num_ranks = before.num_ranks
        # By kind of link (inside the node, network) and direction: experts that each rank passes on or gets.
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
        """Goes on with the moves, for so long at most. A layer takes its new placement when all of it is there."""
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
    """Where nothing was counted in a layer, its experts are taken to be alike."""
    return [list(of_layer) if any(of_layer) else [1.0] * len(of_layer) for of_layer in loads]


def _drawn(num_layers: int, num_experts: int, skew: float, seed: int) -> list[list[float]]:
    dice = np.random.default_rng([seed, 0])
    return [np.exp(dice.normal(0.0, skew, num_experts)).tolist() for _ in range(num_layers)]


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
    num_tokens: int = 0
    _most_tokens: float = 0.0
    _num_decoding: float = 0.0
    _decode_pairs: float = 0.0
    _num_prefill: float = 0.0
    _prefill_pairs: float = 0.0

    def count(self, load: StepLoad, step_s: float) -> None:
        self.num_steps += 1
        self.seconds += step_s
        self.num_tokens += int(load.num_tokens)
        self._most_tokens += load.most_tokens
        self._num_decoding += load.num_decoding
        self._decode_pairs += load.decode_pairs
        self._num_prefill += load.num_prefill
        self._prefill_pairs += load.prefill_pairs

    def mean_load(self) -> StepLoad:
        """The average step."""
        return StepLoad(
            num_tokens=self.num_tokens / self.num_steps,
            most_tokens=self._most_tokens / self.num_steps,
            num_decoding=self._num_decoding / self.num_steps,
            decode_pairs=self._decode_pairs / self.num_steps,
            num_prefill=self._num_prefill / self.num_steps,
            prefill_pairs=self._prefill_pairs / self.num_steps,
        )
