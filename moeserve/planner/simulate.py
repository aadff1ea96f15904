"""Serves recorded traffic on a simulated cluster in virtual time: `moeserve simulate`.

The scheduling is real: `Replica` and `Scheduler` for each replica, in a `LockstepGroup`, behind a `DPRouter`.
The times of steps come from the cost model, placements and rebalancing from expert_balance.py.
The result depends on the arguments alone.

Token values do not matter, but common prefixes of prompts do. A prompt token is therefore the id of its block in the
traffic, or the request's own negative number if the traffic records no blocks. Output tokens are the request's own.
"""

from __future__ import annotations

import gc
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moeserve.config.settings import DtypeName
from moeserve.errors import SettingsError
from moeserve.expert_placement.placement import read_loads
from moeserve.models.registry import describe
from moeserve.planner.clock import Clock
from moeserve.planner.costs import LayoutCosts, ReplicaLoad, StepLoad
from moeserve.planner.estimate import estimate_layouts
from moeserve.planner.expert_balance import ExpertBalance, draw_loads
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import find_layouts
from moeserve.planner.lockstep_group import LockstepGroup, Step
from moeserve.planner.settings import Assumptions, ExpertSettings, SimulationSettings
from moeserve.planner.simulation_report import Outcome, Percentiles, Simulation
from moeserve.planner.traffic import RecordedRequest, Traffic
from moeserve.protocol import AddRequest, ChunkResult, Request, RequestUpdate, StepPlan, StepResult
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.dp_router import DPRouter
from moeserve.scheduling.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 16  # tokens per block of the KV cache


def simulate(
    model: Path,
    hardware: Hardware,
    traffic: Traffic,
    *,
    num_ranks: int,
    ranks_per_node: int,
    tp: int = 1,
    pp: int = 1,
    pipeline_layers: Sequence[int] | None = None,
    dtype: DtypeName | None = None,
    loads: Path | None = None,
    assumptions: Assumptions,
    settings: SimulationSettings,
    experts: ExpertSettings,
) -> Simulation:
    """Simulate one layout.

    Args:
        model: folder with a config.json.
        traffic: before its rate and lengths are scaled.
        tp: ranks that share the heads of each replica.
        pp: pipeline stages of each replica.
        pipeline_layers: of each stage; None: even shares.
        loads: file of expert loads at the start; see `read_loads`. None: drawn.

    Raises:
        SettingsError: an impossible layout, traffic that does not fit into it, or loads of another model or twice.
        CheckpointError: see `describe`.
    """
    if loads is not None and experts.skew:
        raise SettingsError(f"skew={experts.skew:g} draws loads, and loads={loads} gives them; use one of them")
    traffic = _scaled(traffic, settings)
    found = find_layouts(
        model,
        num_ranks,
        dtype,
        tp,
        pp=pp,
        pipeline_layers=pipeline_layers,
        num_redundant=experts.num_redundant_experts,
    )
    (layout,) = found.layouts
    (estimate,) = estimate_layouts(found, hardware, traffic, assumptions, ranks_per_node=ranks_per_node).layouts
    if not estimate.cache_tokens:
        fault = f"{num_ranks} ranks of {hardware.name}, tp={tp}: {estimate.refusal}"
        raise SettingsError(f"{fault}; use more ranks or a larger tp")
    description = describe(model)
    config = description.model
    costs = LayoutCosts(description, found, layout, hardware, assumptions, ranks_per_node)
    sizes = {"num_layers": config.num_sparse_layers, "num_experts": config.num_experts}
    initial: Sequence[Sequence[float]]
    if loads is not None:
        initial = read_loads(loads, **sizes)
    else:
        initial = draw_loads(**sizes, skew=experts.skew, seed=settings.seed)
    balance = ExpertBalance(costs, experts, initial, settings.seed)
    last_s = traffic.requests[-1].arrival_s
    return Simulation(
        hardware=hardware.name,
        num_nodes=num_ranks // ranks_per_node,
        ranks_per_node=ranks_per_node,
        tp=tp,
        dp=layout.dp,
        pp=pp,
        cache_tokens=estimate.cache_tokens,
        num_requests=len(traffic.requests),
        requests_per_s=len(traffic.requests) / last_s if last_s else 0.0,
        outcome=serve(traffic, costs, balance, settings, cache_tokens=estimate.cache_tokens),
    )


def serve(
    traffic: Traffic,
    costs: LayoutCosts,
    balance: ExpertBalance,
    settings: SimulationSettings,
    *,
    cache_tokens: int,
    drives_all: bool = False,
) -> Outcome:
    """Run unscaled traffic to its end.

    Args:
        cache_tokens: capacity of a replica's KV cache.
        drives_all: see `LockstepGroup`.

    Raises:
        SettingsError: a request does not fit into the cache.
    """
    longest = max(each.prompt_tokens + each.output_tokens for each in traffic.requests)
    plans_ahead = settings.async_scheduling and costs.pp == 1
    config = SchedulerConfig(
        num_blocks=cache_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_prefill_tokens=settings.max_prefill_tokens,
        max_model_len=longest + 1,
        # Without recorded prefixes, looking for them only takes time.
        enable_prefix_caching=any(each.prefix_blocks for each in traffic.requests),
        plans_ahead=plans_ahead,
        num_batches=costs.pp,
    )
    if config.num_blocks * config.block_size < config.max_model_len:
        raise SettingsError(
            f"the traffic has a request of {longest} tokens, but the KV cache of a replica holds {cache_tokens}; "
            f"use more ranks, a larger tp, or shorter requests with length"
        )
    max_rounds = 2 if plans_ahead else costs.pp
    group = LockstepGroup(costs.dp, lambda: Scheduler(config, b""), max_rounds=max_rounds, drives_all=drives_all)
    clock = Clock(costs.pp, settings.host_time)
    gc.disable()  # steps leave no reference cycles, and searching for them doubles the time
    try:
        return _Run(traffic, costs, balance, config, group, clock).run()
    finally:
        gc.enable()


@dataclass(eq=False)
class _InFlight:
    """A request that has not ended."""

    recorded: RecordedRequest
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0


class _Run:
    """Virtual time, the requests in flight, and the statistics of a run."""

    def __init__(
        self,
        traffic: Traffic,
        costs: LayoutCosts,
        balance: ExpertBalance,
        config: SchedulerConfig,
        group: LockstepGroup,
        clock: Clock,
    ) -> None:
        self._traffic = traffic
        self._costs = costs
        self._balance = balance
        self._config = config
        self._group = group
        self._clock = clock
        self._num_replicas = costs.dp
        self._router = DPRouter(
            self._num_replicas,
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            salt=b"",
        )
        self._num_sent = 0
        self._in_flight: dict[str, _InFlight] = {}
        self._ranks = defaultdict[int, _Ranks](_Ranks)  # by replica
        # Statistics:
        self._prompt_tokens = self._cached_tokens = self._output_tokens = self._num_finished = 0
        self._first_token_s, self._output_token_s, self._gap_s = array("d"), array("d"), array("d")
        self._num_decode_only = 0
        self._step_s, self._fullest = array("d"), array("d")
        self._tokens_run = self._idle_steps = self._max_blocks_used = 0
        self._balance_at_start = balance.expected
        self._balance_s = 0.0  # expected balance times seconds of steps

    def run(self) -> Outcome:
        requests = self._traffic.requests
        while True:
            self._send_arrivals()
            this_round = self._group.begin()
            if not this_round.agreement.is_idle:
                self._execute(this_round)
                continue
            self._group.finish({})
            self._clock.skip()
            if self._in_flight:  # they came while this round, without any plan, was in flight
                continue
            if self._num_sent == len(requests):
                return self._outcome()
            # All replicas sleep until the next arrival.
            arrival_s = requests[self._num_sent].arrival_s
            self._balance.rest(arrival_s - self._clock.now)
            self._clock.rest_until(arrival_s)

    def _send_arrivals(self) -> None:
        """Route the requests that have arrived until now."""
        requests = self._traffic.requests
        while self._num_sent < len(requests) and requests[self._num_sent].arrival_s <= self._clock.now:
            self._send(self._num_sent, requests[self._num_sent])
            self._num_sent += 1

    def _send(self, number: int, recorded: RecordedRequest) -> None:
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt_of(recorded, self._traffic.tokens_per_block, own_token=_own_token(number)),
            params=RequestParams(max_tokens=recorded.output_tokens),
            seed=number,
        )
        self._in_flight[request.request_id] = _InFlight(recorded)
        self._group.send(self._router.choose(request), AddRequest(request))

    def _execute(self, step: Step) -> None:
        """Run a step of all replicas. Requests that arrive during it are routed before its updates."""
        plans = step.plans
        load = StepLoad.of([load_of(plan) for plan in plans.values()])
        expected = self._balance.expected
        fullest = self._costs.imbalance(load.num_tokens, expected).value
        of_stages = self._costs.stage_seconds(load, fullest)
        moving_s = self._balance.advance(load, max(of_stages))
        seconds = self._clock.run(of_stages, moving_s, step.planned_after)

        self._step_s.append(sum(of_stages) + moving_s)
        self._num_decode_only += not load.num_prefill
        self._fullest.append(fullest)
        self._balance_s += expected * seconds
        self._tokens_run += round(load.num_tokens)
        self._idle_steps += self._num_replicas - len(plans)
        used = [self._config.num_blocks - self._group.num_free_blocks(rank) for rank in plans]
        self._max_blocks_used = max(self._max_blocks_used, *used)

        self._send_arrivals()
        for rank, delivery in self._group.finish({rank: self._ranks[rank].run(plan) for rank, plan in plans.items()}):
            self._router.note_free_blocks(rank, delivery.stats.num_free_blocks)
            for update in delivery.updates:
                self._note_update(update)

    def _note_update(self, update: RequestUpdate) -> None:
        assert update.error is None, update
        has_ended = update.finish_reason is not None
        self._router.note_update(update.request_id, has_ended=has_ended)
        now = self._clock.now
        request = self._in_flight[update.request_id]
        recorded = request.recorded
        if not request.num_tokens:
            request.first_token_s = now
            self._first_token_s.append(now - recorded.arrival_s)
        elif update.token_ids:
            self._gap_s.append(now - request.last_token_s)
        request.last_token_s = now
        request.num_tokens += len(update.token_ids)
        if not has_ended:
            return
        assert request.num_tokens == recorded.output_tokens, request
        del self._in_flight[update.request_id]
        if request.num_tokens > 1:
            self._output_token_s.append((now - request.first_token_s) / (request.num_tokens - 1))
        self._num_finished += 1
        self._prompt_tokens += recorded.prompt_tokens
        self._cached_tokens += update.num_cached_tokens
        self._output_tokens += request.num_tokens

    def _outcome(self) -> Outcome:
        num_steps = len(self._step_s)
        return Outcome(
            num_finished=self._num_finished,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            seconds=self._clock.now,
            busy_s=self._clock.busy_s,
            output_tokens_per_s=self._output_tokens / self._clock.now,
            first_token_s=Percentiles.of(self._first_token_s),
            output_token_s=Percentiles.of(self._output_token_s),
            gap_s=Percentiles.of(self._gap_s),
            num_steps=num_steps,
            step_s=Percentiles.of(self._step_s),
            decode_only_share=self._num_decode_only / num_steps,
            host_s=self._clock.host_s,
            host_waited_s=self._clock.host_waited_s,
            fullest_rank=Percentiles.of(self._fullest),
            tokens_per_step=self._tokens_run / num_steps,
            idle_step_share=self._idle_steps / (num_steps * self._num_replicas),
            num_replicas_used=self._router.num_used,
            num_preemptions=self._group.num_preemptions,
            cache_used_most=self._max_blocks_used / self._config.num_blocks,
            balance_at_start=self._balance_at_start,
            balance_mean=self._balance_s / self._clock.busy_s,
            balance_at_end=self._balance.expected,
            rebalances=tuple(self._balance.rebalances),
        )


def prompt_of(recorded: RecordedRequest, tokens_per_block: int, *, own_token: int) -> list[int]:
    """Return token ids of a prompt: that of its block for each token, and `own_token` if no block is recorded."""
    token_ids: list[int] = []
    for block in recorded.prefix_blocks:
        token_ids += [block] * tokens_per_block
    del token_ids[recorded.prompt_tokens :]
    return token_ids + [own_token] * (recorded.prompt_tokens - len(token_ids))


def load_of(plan: StepPlan) -> ReplicaLoad:
    """Return the load of a plan. A chunk of a single token counts as decoding, longer ones as prompts."""
    num_decoding = decode_pairs = num_prefill = prefill_pairs = 0
    for start, num_tokens in zip(plan.starts, plan.lengths, strict=True):
        if num_tokens == 1:
            num_decoding += 1
            decode_pairs += start + 1
        else:
            num_prefill += num_tokens
            prefill_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return ReplicaLoad(
        num_decoding=num_decoding, decode_pairs=decode_pairs, num_prefill=num_prefill, prefill_pairs=prefill_pairs
    )


def _scaled(traffic: Traffic, settings: SimulationSettings) -> Traffic:
    scaled = traffic.scaled(rate=settings.rate, length=settings.length)
    if settings.seconds is None:
        return scaled
    within = settings.seconds
    return replace(scaled, requests=tuple(each for each in scaled.requests if each.arrival_s < within))


def _own_token(number: int) -> int:
    """Return a token id of a request that no block has."""
    return -1 - number


class _Ranks:
    """The ranks of a replica, as far as its scheduler needs them: they sample a request's own token."""

    def __init__(self) -> None:
        self._request_of_slot: dict[int, tuple[int, int]] = {}  # its number, and how many tokens are known

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.registrations:
            self._request_of_slot[new.slot] = new.seed, len(new.token_ids)
        chunks = []
        for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True):
            number, num_known = self._request_of_slot[slot]
            if start + length < num_known:
                chunks.append(_NO_TOKEN)
            else:
                self._request_of_slot[slot] = number, num_known + 1
                chunks.append(ChunkResult(token_id=_own_token(number)))
        return StepResult(step=plan.step, chunks=chunks)


_NO_TOKEN = ChunkResult()
