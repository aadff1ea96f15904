"""Serves recorded traffic on a cluster that there may not be, in virtual time: `moeserve simulate`.

The scheduling is real: `Replica`, `Lockstep` and `Scheduler` for each replica, `choose_replica` in front of them,
placements and the balancer. The times of steps are those of costs.py. In between is this file: when requests come, how
long a step takes, and what there is to tell of it. All follows from its arguments: there is no other chance than what
the seed gives.

What a token is does not matter, but which prompts begin alike does. So a token of a prompt is the id of its block in
the traffic, and tokens of nobody else's where the traffic does not tell; what is generated is nobody else's either.
"""

from __future__ import annotations

import gc
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from moeserve.config.settings import DtypeName
from moeserve.errors import SettingsError
from moeserve.expert_placement.placement import read_loads
from moeserve.machine import shown_bytes
from moeserve.models.registry import describe
from moeserve.planner.costs import Assumptions, LayoutCosts, ReplicaLoad, StepLoad
from moeserve.planner.estimate import estimate_layouts, rank_shape
from moeserve.planner.expert_balance import ExpertBalance, Rebalance
from moeserve.planner.formula import shown_seconds
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import find_layouts
from moeserve.planner.lockstep_group import LockstepGroup
from moeserve.planner.simulation_settings import ExpertSettings, SimulationSettings
from moeserve.planner.traffic import RecordedRequest, Traffic
from moeserve.protocol import AddRequest, ChunkResult, Request, StepPlan, StepResult
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.dp_router import DPRouter
from moeserve.scheduling.scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Values of which this share lies at or below; 0 where there are none."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        ordered = sorted(values)

        def at(percent: int) -> float:
            return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0

        return cls(p50=at(50), p90=at(90), p99=at(99))


@dataclass(frozen=True, kw_only=True)
class RankBalance:
    """Rows of the fullest rank over the mean, as placements let expect; mean of the layers. Without chance."""

    at_start: float
    p50: float  # of the time in which steps ran
    worst: float
    at_end: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of the traffic. Times in virtual seconds."""

    num_finished: int
    prompt_tokens: int  # of finished requests
    cached_tokens: int  # of these, found in the prefix cache when the request was first admitted
    output_tokens: int
    seconds: float  # from the first arrival to the last end
    busy_s: float  # of these, in which steps ran
    output_tokens_per_s: float
    output_tokens_per_busy_s: float
    first_token_s: Percentiles  # after the arrival
    output_token_s: Percentiles  # from token to token after the first, mean of each request with several
    num_steps: int
    step_s: Percentiles
    fullest_rank: Percentiles  # of steps: rows over the mean, by the placement and by chance; mean of the layers
    tokens_per_step: float
    empty_turn_share: float  # a replica had nothing to run while another had; of all replicas' turns
    num_replicas_used: int
    num_preemptions: int
    cache_used: float  # share of all replicas' blocks, mean over the time in which steps ran
    cache_used_most: float  # of one replica, at its worst
    rank_balance: RankBalance
    placement_epoch: int  # layers that have got another placement, counted each time
    moving_s: float  # by which moving experts made steps longer
    rebalances: tuple[Rebalance, ...]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What was simulated, and what came of it."""

    hardware: str
    num_nodes: int
    ranks_per_node: int
    tp: int
    dp: int
    cache_tokens: int  # that a replica holds
    num_requests: int
    requests_per_s: float
    assumptions: Assumptions
    settings: SimulationSettings
    experts: ExpertSettings
    outcome: Outcome


def simulate(
    model: Path,
    hardware: Hardware,
    traffic: Traffic,
    *,
    num_ranks: int,
    ranks_per_node: int,
    tp: int = 1,
    dtype: DtypeName | None = None,
    loads: Path | None = None,
    assumptions: Assumptions,
    settings: SimulationSettings,
    experts: ExpertSettings,
) -> Simulation:
    """
    Args:
        model: folder with a config.json.
        traffic: before its rate and lengths are scaled.
        tp: ranks of each replica.
        loads: file of how many tokens each expert gets at the start; see `read_loads`. None: drawn.

    Raises:
        SettingsError: a layout that cannot be, traffic that does not fit into it, or loads of another model or twice.
        CheckpointError: see `describe`.
    """
    if loads is not None and experts.skew:
        raise SettingsError(f"skew={experts.skew:g} draws loads, and loads={loads} gives them; say one of them")
    num_redundant = experts.num_redundant_experts
    traffic = _asked(traffic, settings)
    found = find_layouts(
        model, num_ranks, dtype, tp, num_redundant=num_redundant, shared_as_routed=experts.shared_as_routed
    )
    (layout,) = found.layouts
    (estimate,) = estimate_layouts(found, hardware, traffic, assumptions, ranks_per_node=ranks_per_node).layouts
    if not estimate.cache_tokens:
        fault = f"{num_ranks} ranks of {hardware.name}, tp={tp}: {estimate.refusal}"
        raise SettingsError(f"{fault}; give more ranks or a larger tp")
    description = describe(model)
    config = description.model
    costs = LayoutCosts(rank_shape(description, found, layout, assumptions, ranks_per_node), hardware, assumptions)
    given: Sequence[Sequence[float]] = ()
    if loads is not None:
        given = read_loads(loads, num_layers=config.num_sparse_layers, num_experts=found.num_experts)
    moe = config.first_moe
    balance = ExpertBalance(
        costs,
        hardware,
        experts,
        given,
        num_experts=found.num_experts,
        num_shared=found.num_shared,
        top_k=moe.router.top_k if moe else 0,
        seed=settings.seed,
    )
    last_s = traffic.requests[-1].arrival_s
    return Simulation(
        hardware=hardware.name,
        num_nodes=num_ranks // ranks_per_node,
        ranks_per_node=ranks_per_node,
        tp=tp,
        dp=layout.dp,
        cache_tokens=estimate.cache_tokens,
        num_requests=len(traffic.requests),
        requests_per_s=len(traffic.requests) / last_s if last_s else 0.0,
        assumptions=assumptions,
        settings=settings,
        experts=experts,
        outcome=serve(traffic, costs, balance, settings, cache_tokens=estimate.cache_tokens),
    )


def serve(
    traffic: Traffic,
    costs: LayoutCosts,
    balance: ExpertBalance,
    settings: SimulationSettings,
    *,
    cache_tokens: int,
    drives_sleepers: bool = False,
) -> Outcome:
    """Runs the traffic, as it is, to its end.

    Args:
        cache_tokens: that the KV cache of a replica holds.
        drives_sleepers: see `LockstepGroup`.

    Raises:
        SettingsError: a request that does not fit into the cache.
    """
    with _without_collector():
        return _Run(traffic, costs, balance, settings, cache_tokens, drives_sleepers).to_the_end()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Nothing that a step leaves behind is part of a cycle, and to look for cycles among millions of blocks takes as
    long as all the rest.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(eq=False)
class _InFlight:
    """A request that has not ended."""

    recorded: RecordedRequest
    first_token_s: float = 0.0
    num_tokens: int = 0


class _Run:
    def __init__(
        self,
        traffic: Traffic,
        costs: LayoutCosts,
        balance: ExpertBalance,
        settings: SimulationSettings,
        cache_tokens: int,
        drives_sleepers: bool,
    ) -> None:
        longest = max(each.prompt_tokens + each.output_tokens for each in traffic.requests)
        num_blocks = cache_tokens // settings.block_size
        if num_blocks * settings.block_size <= longest:
            raise SettingsError(
                f"the traffic has a request of {longest} tokens, but the KV cache of a replica holds {cache_tokens}; "
                f"give more ranks or a larger tp, or shorter requests with length"
            )
        has_prefixes = settings.enable_prefix_caching and any(each.prefix_blocks for each in traffic.requests)

        def make_scheduler() -> Scheduler:
            return Scheduler(
                SchedulerConfig(
                    num_blocks=num_blocks,
                    block_size=settings.block_size,
                    max_num_seqs=settings.max_num_seqs,
                    max_num_batched_tokens=settings.max_num_batched_tokens,
                    max_model_len=longest + 1,
                    enable_prefix_caching=has_prefixes,  # where none begin alike, none is found
                ),
                b"",
            )

        self._traffic = traffic
        self._costs = costs
        self._balance = balance
        self._num_blocks = num_blocks
        self._num_replicas = costs.shape.dp
        self._group = LockstepGroup(self._num_replicas, make_scheduler, drives_sleepers=drives_sleepers)
        self._params: dict[int, RequestParams] = {}  # by the length of the output
        self._chooser = DPRouter(
            self._num_replicas, num_blocks, settings.block_size, enable_prefix_caching=has_prefixes, salt=b""
        )
        self._next_request = 0
        self._in_flight: dict[str, _InFlight] = {}
        self._now = 0.0
        # What there will be to tell:
        self._prompt_tokens = self._cached_tokens = self._output_tokens = self._num_finished = 0
        self._first_token_s, self._output_token_s = array("d"), array("d")
        self._step_s, self._fullest = array("d"), array("d")
        self._tokens_run = self._empty_turns = self._blocks_used_most = 0
        self._block_s = self._moving_s = self._busy_s = 0.0  # blocks in use times seconds; seconds
        self._seconds_of_balance: defaultdict[float, float] = defaultdict(float)
        self._at_start = balance.expected
        self._worst = self._at_start

    def to_the_end(self) -> Outcome:
        requests = self._traffic.requests
        while True:
            self._take_arrivals()
            turn = self._group.begin()
            if not turn.agreement.is_idle:
                self._execute(turn.plans)
                continue
            self._group.finish({})
            assert not self._in_flight, f"{len(self._in_flight)} requests are left, and nobody runs them"
            if self._next_request == len(requests):
                return self._outcome()
            # All sleep until a message comes.
            arrival_s = requests[self._next_request].arrival_s
            self._balance.rest(arrival_s - self._now)
            self._now = arrival_s

    def _take_arrivals(self) -> None:
        """Sends on the requests that have come until now."""
        requests = self._traffic.requests
        while self._next_request < len(requests) and requests[self._next_request].arrival_s <= self._now:
            self._send(self._next_request, requests[self._next_request])
            self._next_request += 1

    def _send(self, number: int, recorded: RecordedRequest) -> None:
        output_tokens = recorded.output_tokens
        if output_tokens not in self._params:
            self._params[output_tokens] = RequestParams(max_tokens=output_tokens)
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt_of(recorded, self._traffic.tokens_per_block, own_token=_own_token(number)),
            params=self._params[output_tokens],
            seed=number,
        )
        self._in_flight[request.request_id] = _InFlight(recorded)
        self._group.send(self._chooser.choose(request), AddRequest(request))

    def _execute(self, plans: Mapping[int, StepPlan]) -> None:
        """A step of all replicas. Who comes while it runs is sent on before there is news of it."""
        load = StepLoad.of([load_of(plan) for plan in plans.values()])
        num_tokens = round(load.num_tokens)
        fullest = self._balance.of_step(num_tokens)
        expected = self._balance.expected
        step_s = self._costs.step_seconds(load, fullest).seconds
        moving_s = self._balance.advance(load, step_s)
        self._note_step(plans, num_tokens, fullest, expected, step_s, moving_s)
        self._now += step_s + moving_s
        self._take_arrivals()
        for rank, told in self._group.finish({rank: _result_of(plan) for rank, plan in plans.items()}):
            self._chooser.note_free_blocks(rank, told.stats.num_free_blocks)
            for update in told.updates:
                assert update.error is None, update
                self._hear(update.request_id, len(update.token_ids), update.finish_reason is not None)
                if update.finish_reason is not None:
                    self._cached_tokens += update.num_cached_tokens

    def _hear(self, request_id: str, num_tokens: int, has_ended: bool) -> None:
        self._chooser.note_update(request_id, has_ended=has_ended)
        request = self._in_flight[request_id]
        recorded = request.recorded
        if not request.num_tokens:
            request.first_token_s = self._now
            self._first_token_s.append(self._now - recorded.arrival_s)
        request.num_tokens += num_tokens
        if not has_ended:
            return
        assert request.num_tokens == recorded.output_tokens, request
        del self._in_flight[request_id]
        if request.num_tokens > 1:
            self._output_token_s.append((self._now - request.first_token_s) / (request.num_tokens - 1))
        self._num_finished += 1
        self._prompt_tokens += recorded.prompt_tokens
        self._output_tokens += request.num_tokens

    def _note_step(
        self,
        plans: Mapping[int, StepPlan],
        num_tokens: int,
        fullest: float,
        expected: float,
        step_s: float,
        moving_s: float,
    ) -> None:
        seconds = step_s + moving_s
        self._step_s.append(seconds)
        self._fullest.append(fullest)
        self._busy_s += seconds
        self._moving_s += moving_s
        self._tokens_run += num_tokens
        self._empty_turns += self._num_replicas - len(plans)
        used = [self._num_blocks - self._group.num_free_blocks(rank) for rank in plans]
        self._block_s += sum(used) * seconds
        self._blocks_used_most = max(self._blocks_used_most, max(used))
        self._seconds_of_balance[expected] += seconds
        self._worst = max(self._worst, expected)

    def _outcome(self) -> Outcome:
        num_steps = len(self._step_s)
        all_blocks = self._num_blocks * self._num_replicas
        return Outcome(
            num_finished=self._num_finished,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            seconds=self._now,
            busy_s=self._busy_s,
            output_tokens_per_s=self._output_tokens / self._now,
            output_tokens_per_busy_s=self._output_tokens / self._busy_s,
            first_token_s=Percentiles.of(self._first_token_s),
            output_token_s=Percentiles.of(self._output_token_s),
            num_steps=num_steps,
            step_s=Percentiles.of(self._step_s),
            fullest_rank=Percentiles.of(self._fullest),
            tokens_per_step=self._tokens_run / num_steps,
            empty_turn_share=self._empty_turns / (num_steps * self._num_replicas),
            num_replicas_used=self._chooser.num_used,
            num_preemptions=self._group.num_preemptions,
            cache_used=self._block_s / (all_blocks * self._busy_s),
            cache_used_most=self._blocks_used_most / self._num_blocks,
            rank_balance=RankBalance(
                at_start=self._at_start,
                p50=_weighted_median(self._seconds_of_balance),
                worst=self._worst,
                at_end=self._balance.expected,
            ),
            placement_epoch=self._balance.placement_epoch,
            moving_s=self._moving_s,
            rebalances=tuple(self._balance.rebalances),
        )


def prompt_of(recorded: RecordedRequest, tokens_per_block: int, *, own_token: int) -> list[int]:
    """Token ids of a prompt: that of its block for each token, and the request's own where no block is known."""
    token_ids: list[int] = []
    for block in recorded.prefix_blocks:
        token_ids += [block] * tokens_per_block
    del token_ids[recorded.prompt_tokens :]
    return token_ids + [own_token] * (recorded.prompt_tokens - len(token_ids))


def load_of(plan: StepPlan) -> ReplicaLoad:
    """A single token of a request is decoded, whether it is the last of a prompt or not; more are of a prompt."""
    num_decoding = decode_pairs = num_prefill = prefill_pairs = 0
    for chunk in plan.chunks:
        num_tokens = len(chunk.token_ids)
        if num_tokens == 1:
            num_decoding += 1
            decode_pairs += chunk.start + 1
        else:
            num_prefill += num_tokens
            prefill_pairs += num_tokens * chunk.start + num_tokens * (num_tokens + 1) // 2
    return ReplicaLoad(
        num_decoding=num_decoding, decode_pairs=decode_pairs, num_prefill=num_prefill, prefill_pairs=prefill_pairs
    )


def as_text(found: Simulation) -> str:
    """Tables for people."""
    outcome, balance = found.outcome, found.outcome.rank_balance
    lines = [
        f"{found.num_nodes} x {found.ranks_per_node} {found.hardware}, tp {found.tp}, dp {found.dp}, "
        f"{found.cache_tokens} tokens in the KV cache of a replica",
        f"{found.num_requests} requests, {found.requests_per_s:.2f} in a second",
        "",
        f"{'finished requests':<28}{outcome.num_finished}, in {outcome.seconds:.2f} s, with steps in "
        f"{outcome.busy_s:.2f} s of them",
        f"{'prompt tokens':<28}{outcome.prompt_tokens}, of which {outcome.cached_tokens} were cached",
        f"{'output tokens':<28}{outcome.output_tokens}, {outcome.output_tokens_per_s:.0f} in a second, "
        f"{outcome.output_tokens_per_busy_s:.0f} in a second of steps",
        f"{'steps':<28}{outcome.num_steps}, of {outcome.tokens_per_step:.1f} tokens",
        f"{'empty turns':<28}{outcome.empty_turn_share:.1%}; {outcome.num_replicas_used} of {found.dp} replicas served",
        f"{'KV cache in use':<28}{outcome.cache_used:.2%}, at most {outcome.cache_used_most:.1%} of a replica's; "
        f"{outcome.num_preemptions} preemptions",
        "",
        f"{'':<28}{'p50':>12}{'p90':>12}{'p99':>12}",
        _percentiles_line("time to the first token", outcome.first_token_s),
        _percentiles_line("time per output token", outcome.output_token_s),
        _percentiles_line("step", outcome.step_s),
        f"{'fullest rank in a step':<28}" + "".join(f"{value:>12.2f}" for value in _values_of(outcome.fullest_rank)),
        "",
        f"{'fullest rank by placement':<28}{balance.at_start:.2f} at the start, {balance.p50:.2f} p50, "
        f"{balance.worst:.2f} at its worst, {balance.at_end:.2f} at the end",
    ]
    if found.experts.rebalance == "auto":
        num_bytes = sum(each.num_bytes for each in outcome.rebalances)
        lines += [
            f"{'rebalances':<28}{len(outcome.rebalances)}, {shown_bytes(round(num_bytes))} moved, "
            f"{outcome.placement_epoch} new placements of layers, {shown_seconds(outcome.moving_s)} added to steps",
        ]
    if outcome.rebalances:
        lines += ["", f"{'at':>10}{'layers':>8}{'moves':>8}{'moved':>12}{'takes':>12}{'forecast':>12}{'balance':>16}"]
        lines += [
            f"{each.at_s:>8.0f} s{each.num_layers:>8}{each.num_moves:>8}{shown_bytes(round(each.num_bytes)):>12}"
            f"{shown_seconds(each.transfer_s):>12}{shown_seconds(each.gain_s):>12}"
            f"{each.balance_before:>8.2f} ->{each.balance_after:>5.2f}"
            for each in outcome.rebalances[:MAX_LISTED]
        ]
        if len(outcome.rebalances) > MAX_LISTED:
            lines.append(f"{'':>10}and {len(outcome.rebalances) - MAX_LISTED} more, which --json shows")
    return "\n".join(lines)


MAX_LISTED = 12  # rebalances


def _percentiles_line(name: str, values: Percentiles) -> str:
    return f"{name:<28}" + "".join(f"{shown_seconds(value):>12}" for value in _values_of(values))


def _values_of(values: Percentiles) -> tuple[float, float, float]:
    return values.p50, values.p90, values.p99


def _asked(traffic: Traffic, settings: SimulationSettings) -> Traffic:
    scaled = traffic.scaled(rate=settings.rate, length=settings.length)
    if settings.seconds is None:
        return scaled
    within = settings.seconds
    return replace(scaled, requests=tuple(each for each in scaled.requests if each.arrival_s < within))


def _own_token(number: int) -> int:
    """Of a request; no block has such an id."""
    return -1 - number


def _result_of(plan: StepPlan) -> StepResult:
    return StepResult(
        step=plan.step,
        chunks=[
            _NOTHING if chunk.sample is None else ChunkResult(token_id=_own_token(chunk.sample.seed))
            for chunk in plan.chunks
        ],
    )


_NOTHING = ChunkResult()


def _weighted_median(weights: Mapping[float, float]) -> float:
    """The value up to which half of the weight lies."""
    left = sum(weights.values()) / 2
    for value in sorted(weights):
        left -= weights[value]
        if left <= 0:
            return value
    return max(weights)
