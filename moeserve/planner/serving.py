"""The requests of a simulation: they arrive, run on the replicas of a simulated cluster, and finish.

Only common prefixes of prompts matter, not the values of tokens. A prompt token is therefore the id of its block in
the traffic, or the request's own negative number if the traffic records no blocks. So are all output tokens.
"""

from __future__ import annotations

import gc
import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from moeserve.config.validation import parse_bytes
from moeserve.errors import SettingsError
from moeserve.planner.pool import BLOCK_SIZE, KeptBlocks, Pool, PoolPlan, own_token
from moeserve.planner.settings import SimulationSettings
from moeserve.planner.simulation_report import Outcome, Percentiles, Switch
from moeserve.planner.traffic import RecordedRequest, Traffic, repeated_tokens
from moeserve.protocol import Request, RequestUpdate
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.replica_choice import DPRouter


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The pools of a simulated cluster."""

    serving: tuple[PoolPlan, ...]  # pools that generate tokens
    prefill: tuple[PoolPlan, ...] = ()  # pools that only compute prompts; empty: the serving pools do
    resizes: tuple[tuple[float, PoolPlan], ...] = ()  # the time of each request to resize, and the new pool


def serve(traffic: Traffic, plan: ClusterPlan, settings: SimulationSettings, *, drives_all: bool = False) -> Outcome:
    """Serve all requests, at the recorded rate and lengths.

    Args:
        drives_all: see `LockstepGroup`.

    Raises:
        SettingsError: a request does not fit into the cache.
    """
    longest = max(each.prompt_tokens + each.output_tokens for each in traffic.requests)
    for pool in (*plan.serving, *plan.prefill, *(pool for _, pool in plan.resizes)):
        if pool.cache_tokens // BLOCK_SIZE * BLOCK_SIZE <= longest:
            raise SettingsError(
                f"the traffic has a request of {longest} tokens, but the KV cache of a replica holds "
                f"{pool.cache_tokens}; use more ranks, a larger tp, or shorter requests with length"
            )
    gc.disable()  # steps create no reference cycles, and collection would double the time
    try:
        return _Run(traffic, plan, settings, max_model_len=longest + 1, drives_all=drives_all).run()
    finally:
        gc.enable()


class _Fleet:
    """Pools that serve the same requests, behind one router."""

    def __init__(self, pools: Sequence[Pool], *, finds_prefixes: bool) -> None:
        self.pools = pools
        self._places = [(pool, index) for pool in pools for index in range(pool.num_replicas)]
        num_blocks = min(pool.plan.cache_tokens for pool in pools) // BLOCK_SIZE
        self._router = DPRouter(
            len(self._places), num_blocks, BLOCK_SIZE, enable_prefix_caching=finds_prefixes, salt=b""
        )

    @property
    def next_s(self) -> float:
        return min(pool.next_s for pool in self.pools)

    def send(self, request: Request, now: float) -> None:
        """Route a request to a replica."""
        pool, index = self._places[self._router.choose(request)]
        pool.send(index, request, now)

    def finish(self, now: float) -> list[RequestUpdate]:
        """End the steps and transfers that end now, and return the updates of the replicas."""
        updates: list[RequestUpdate] = []
        for first, pool in self._pools_due(now):
            for report in pool.finish(now):
                self._router.note_free_blocks(first + report.replica, report.num_free_blocks)
                updates += report.updates
        for update in updates:
            self._router.note_update(update.request_id, has_ended=update.finish_reason is not None)
        return updates

    def begin(self, now: float) -> None:
        """Begin a step in each pool that has work."""
        for first, pool in self._pools_due(now):
            for report in pool.begin(now):
                self._router.note_free_blocks(first + report.replica, report.num_free_blocks)

    def _pools_due(self, now: float) -> Iterator[tuple[int, Pool]]:
        """Yield the pools that have an event now, with the number of replicas before each."""
        first = 0
        for pool in self.pools:
            if pool.next_s <= now:
                yield first, pool
            first += pool.num_replicas


@dataclass(eq=False)
class _InFlight:
    """A request that has not ended."""

    recorded: RecordedRequest
    request: Request
    is_prefill: bool  # a prefill pool computes its prompt now
    num_cached_tokens: int = 0  # prompt tokens found in the cache of the prefill pool
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    switch: int | None = None  # index of the last switch, until the first token after it


class _Run:
    """Virtual time, the requests in flight, and their statistics."""

    def __init__(
        self, traffic: Traffic, plan: ClusterPlan, settings: SimulationSettings, *, max_model_len: int, drives_all: bool
    ) -> None:
        self._traffic, self._settings = traffic, settings
        self._max_model_len, self._drives_all = max_model_len, drives_all
        self._host_memory = parse_bytes("kv_host_memory", settings.kv_host_memory, least=0)
        self._is_divided = bool(plan.prefill)
        # The prefix cache is off if nothing could be found in it, which saves time.
        has_prefixes = any(each.prefix_blocks for each in traffic.requests)
        self._finds_prefixes = has_prefixes or self._is_divided or self._host_memory > 0
        self._kept: dict[str, KeptBlocks] = {}
        names = ("prefill", "decode") if self._is_divided else ("", "")
        self._prefill = self._fleet(names[0], plan.prefill, decodes=False) if self._is_divided else None
        self._serving = self._fleet(names[1], plan.serving)
        self._resizes = list(plan.resizes)
        self._ended_pools: list[tuple[Pool, float]] = []
        self._now = 0.0
        self._last_end_s = 0.0
        self._num_sent = 0
        self._in_flight: dict[str, _InFlight] = {}
        # Statistics:
        self._prompt_tokens = self._cached_tokens = self._output_tokens = self._num_finished = 0
        self._num_good = self._good_output_tokens = 0
        self._first_token_s, self._output_token_s, self._gap_s = array("d"), array("d"), array("d")
        self._switches: list[_Switch] = []
        self._repeated_tokens = repeated_tokens(traffic, BLOCK_SIZE)

    def run(self) -> Outcome:
        fleets = [fleet for fleet in (self._prefill, self._serving) if fleet is not None]
        while True:
            moment = min(self._next_arrival_s(), self._next_switch_s(), *(fleet.next_s for fleet in fleets))
            if moment == math.inf:
                return self._outcome()
            self._now = moment
            self._send_arrivals()
            for fleet in fleets:
                for update in fleet.finish(moment):
                    self._note_update(update)
            if self._next_switch_s() <= moment:
                self._switch()
                fleets = [self._serving]
            for fleet in fleets:
                fleet.begin(moment)

    def _fleet(self, name: str, plans: Sequence[PoolPlan], *, starts_at: float = 0.0, decodes: bool = True) -> _Fleet:
        pools = []
        for number, plan in enumerate(plans):
            config = plan.config(
                self._settings,
                max_model_len=self._max_model_len,
                finds_prefixes=self._finds_prefixes,
                decodes=decodes,
            )
            pool = Pool(
                name if len(plans) == 1 else f"{name} {number}",
                plan,
                config,
                self._settings,
                self._kept,
                host_blocks=self._host_memory // (plan.cache_bytes_per_token * BLOCK_SIZE),
                shares_blocks=self._is_divided,
                starts_at=starts_at,
                drives_all=self._drives_all,
            )
            pools.append(pool)
        return _Fleet(pools, finds_prefixes=self._finds_prefixes)

    def _next_arrival_s(self) -> float:
        requests = self._traffic.requests
        return requests[self._num_sent].arrival_s if self._num_sent < len(requests) else math.inf

    def _send_arrivals(self) -> None:
        """Route the requests that have arrived by now."""
        while self._next_arrival_s() <= self._now:
            number, recorded = self._num_sent, self._traffic.requests[self._num_sent]
            self._num_sent += 1
            request = Request(
                request_id=str(number),
                prompt_token_ids=prompt_of(recorded, self._traffic.tokens_per_block, own_token=own_token(number)),
                params=RequestParams(max_tokens=recorded.output_tokens),
                seed=number,
            )
            is_prefill = self._prefill is not None and recorded.output_tokens > 1
            self._in_flight[request.request_id] = _InFlight(recorded, request, is_prefill)
            if self._prefill is None:
                self._serving.send(request, self._now)
            elif is_prefill:
                first = RequestParams(max_tokens=1)
                self._prefill.send(msgspec.structs.replace(request, params=first, kv_handle=str(number)), self._now)
            else:
                self._prefill.send(request, self._now)

    def _note_update(self, update: RequestUpdate) -> None:
        assert update.error is None, update
        request = self._in_flight[update.request_id]
        if request.is_prefill:  # the decode pool samples the first token again, as the engine does
            request.is_prefill = False
            request.num_cached_tokens = update.num_cached_tokens
            self._serving.send(msgspec.structs.replace(request.request, kv_source=update.kv_blocks), self._now)
            return
        now, recorded = self._now, request.recorded
        if not request.num_tokens:
            request.first_token_s = now
            self._first_token_s.append(now - recorded.arrival_s)
        elif update.token_ids:
            self._gap_s.append(now - request.last_token_s)
            if request.switch is not None:
                self._switches[request.switch].note_token(now - request.last_token_s, now)
                request.switch = None
        request.last_token_s = now
        request.num_tokens += len(update.token_ids)
        if update.finish_reason is not None:
            self._note_end(request, update)

    def _note_end(self, request: _InFlight, update: RequestUpdate) -> None:
        recorded = request.recorded
        assert request.num_tokens == recorded.output_tokens, request
        del self._in_flight[update.request_id]
        self._last_end_s = self._now
        seconds = 0.0
        if request.num_tokens > 1:
            seconds = (self._now - request.first_token_s) / (request.num_tokens - 1)
            self._output_token_s.append(seconds)
        self._num_finished += 1
        self._prompt_tokens += recorded.prompt_tokens
        is_divided = self._is_divided and recorded.output_tokens > 1
        self._cached_tokens += request.num_cached_tokens if is_divided else update.num_cached_tokens
        self._output_tokens += request.num_tokens
        limits = self._settings.first_token_limit, self._settings.output_token_limit
        measured = request.first_token_s - recorded.arrival_s, seconds
        if all(limit is None or value <= limit for limit, value in zip(limits, measured, strict=True)):
            self._num_good += 1
            self._good_output_tokens += request.num_tokens

    def _next_switch_s(self) -> float:
        """Return when the next size may take over: once it has started and no step is in flight, else infinity."""
        (pool, *_) = self._serving.pools
        if not self._resizes or pool.is_running or (not self._in_flight and self._next_arrival_s() == math.inf):
            return math.inf
        at_s, _ = self._resizes[0]
        return max(self._now, at_s + self._settings.start_time)

    def _switch(self) -> None:
        """End the pool, and start its successor, which continues the requests with empty caches, as the engine does."""
        (asked_s, plan), *self._resizes = self._resizes
        (pool,) = self._serving.pools
        self._ended_pools.append((pool, self._now))
        starts_at = self._now + self._settings.switch_time
        self._serving = self._fleet("", [plan], starts_at=starts_at)
        switch = _Switch(asked_s, self._now, pool.plan.num_nodes, plan.num_nodes)
        self._switches.append(switch)
        for number, request in self._in_flight.items():
            switch.num_resumed += 1
            if request.num_tokens:
                request.switch = len(self._switches) - 1
            output = [own_token(int(number))] * request.num_tokens
            self._serving.send(msgspec.structs.replace(request.request, output_token_ids=output), self._now)

    def _outcome(self) -> Outcome:
        fleets = [self._prefill, self._serving]
        running = itertools.chain.from_iterable(fleet.pools for fleet in fleets if fleet is not None)
        pools = [pool.outcome(ended_at) for pool, ended_at in self._ended_pools]
        seconds = self._last_end_s
        return Outcome(
            num_finished=self._num_finished,
            prompt_tokens=self._prompt_tokens,
            repeated_tokens=self._repeated_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            seconds=seconds,
            output_tokens_per_s=self._output_tokens / seconds,
            first_token_s=Percentiles.of(self._first_token_s),
            output_token_s=Percentiles.of(self._output_token_s),
            gap_s=Percentiles.of(self._gap_s),
            num_good=self._num_good,
            good_output_tokens_per_s=self._good_output_tokens / seconds,
            pools=(*pools, *(pool.outcome(seconds) for pool in running)),
            switches=tuple(each.outcome() for each in self._switches),
        )


class _Switch:
    """The effects of a resize on requests."""

    def __init__(self, asked_s: float, at_s: float, nodes_before: int, nodes_after: int) -> None:
        self._asked_s, self._at_s = asked_s, at_s
        self._nodes = nodes_before, nodes_after
        self.num_resumed = 0
        self._first_token_s: float | None = None  # after the switch
        self._gap_s = array("d")

    def note_token(self, gap_s: float, now: float) -> None:
        """Record the first token of a request after the switch.

        Args:
            gap_s: seconds since the request's previous token.
            now: virtual time.
        """
        self._gap_s.append(gap_s)
        if self._first_token_s is None:
            self._first_token_s = now - self._at_s

    def outcome(self) -> Switch:
        return Switch(
            asked_s=self._asked_s,
            at_s=self._at_s,
            nodes_before=self._nodes[0],
            nodes_after=self._nodes[1],
            num_resumed=self.num_resumed,
            pause_s=self._first_token_s or 0.0,
            gap_s=Percentiles.of(self._gap_s),
        )


def prompt_of(recorded: RecordedRequest, tokens_per_block: int, *, own_token: int) -> list[int]:
    """Return token ids of a prompt: each token is the id of its recorded block, or `own_token` without a block."""
    token_ids: list[int] = []
    for block in recorded.prefix_blocks:
        token_ids += [block] * tokens_per_block
    del token_ids[recorded.prompt_tokens :]
    return token_ids + [own_token] * (recorded.prompt_tokens - len(token_ids))
