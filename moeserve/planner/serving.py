"""The requests of a simulation: they arrive, run on the replicas of a simulated cluster, and finish.

Only common prefixes of prompts matter, not the values of tokens. A prompt token is therefore the id of its block in
the traffic. If the traffic records no blocks, it is the request's own negative number, as are all output tokens.
"""

from __future__ import annotations

import gc
import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from moeserve.config.validation import parse_bytes
from moeserve.errors import SettingsError
from moeserve.planner.pool import BLOCK_SIZE, Kept, Pool, PoolPlan, own_token
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
    prefill: tuple[PoolPlan, ...] = ()  # pools that only compute prompts; empty: the serving pools compute them
    resizes: tuple[tuple[float, PoolPlan], ...] = ()  # the time of each request to resize, and the new pool


def serve(traffic: Traffic, plan: ClusterPlan, settings: SimulationSettings, *, drives_all: bool = False) -> Outcome:
    """Serve all requests of the traffic, with the recorded arrival times and lengths.

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
    gc.disable()  # steps create no reference cycles, and garbage collection would double the time
    try:
        return _Run(traffic, plan, settings, max_model_len=longest + 1, drives_all=drives_all).run()
    finally:
        gc.enable()


class _Fleet:
    """Pools that serve the same requests. One router chooses the replica of each request."""

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
        """End the steps and transfers that end at `now`. Return the updates of the replicas."""
        updates: list[RequestUpdate] = []
        for first, pool in self._pools_due(now):
            for index, delivered in pool.finish(now):
                self._router.note_free_blocks(first + index, delivered.stats.num_free_blocks)
                updates += delivered.updates
        for update in updates:
            self._router.note_update(update.request_id, has_ended=update.finish_reason is not None)
        return updates

    def begin(self, now: float) -> None:
        """Begin a step in each pool that has work at `now`."""
        for first, pool in self._pools_due(now):
            for index, delivered in pool.begin(now):
                self._router.note_free_blocks(first + index, delivered.stats.num_free_blocks)

    def _pools_due(self, now: float) -> Iterator[tuple[int, Pool]]:
        """Yield the pools that have an event at `now`, each with the number of replicas in the pools before it."""
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
    is_prefill: bool  # a prefill pool is computing the prompt
    num_cached_tokens: int = 0  # prompt tokens found in the cache of the prefill pool
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    switch: int | None = None  # index of the last switch, until a token arrives after this switch


class _Ended(NamedTuple):
    """A request that has ended."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens found in a cache
    first_token_s: float  # time from the arrival
    token_s: float  # mean time per token after the first


class _Run:
    """The state of a simulation: virtual time, requests in flight, and statistics."""

    def __init__(
        self, traffic: Traffic, plan: ClusterPlan, settings: SimulationSettings, *, max_model_len: int, drives_all: bool
    ) -> None:
        self._traffic, self._settings = traffic, settings
        self._max_model_len, self._drives_all = max_model_len, drives_all
        has_store = parse_bytes("kv_host_memory", settings.kv_host_memory, least=0) > 0
        self._is_divided = bool(plan.prefill)
        # The prefix cache is off if it could never find anything, which saves time.
        has_prefixes = any(each.prefix_blocks for each in traffic.requests)
        self._finds_prefixes = has_prefixes or self._is_divided or has_store
        self._kept: Kept = {}
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
        self._ended: list[_Ended] = []
        self._gap_s = array("d")
        self._switches: list[_Switch] = []

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
        pools = [
            Pool(
                name if len(plans) == 1 else f"{name} {number}",
                plan,
                self._settings,
                self._kept,
                max_model_len=self._max_model_len,
                finds_prefixes=self._finds_prefixes,
                decodes=decodes,
                shares_blocks=self._is_divided,
                starts_at=starts_at,
                drives_all=self._drives_all,
            )
            for number, plan in enumerate(plans)
        ]
        return _Fleet(pools, finds_prefixes=self._finds_prefixes)

    def _next_arrival_s(self) -> float:
        requests = self._traffic.requests
        return requests[self._num_sent].arrival_s if self._num_sent < len(requests) else math.inf

    def _send_arrivals(self) -> None:
        """Route the requests that have arrived until the current time."""
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
        now = self._now
        if not request.num_tokens:
            request.first_token_s = now
        elif update.token_ids:
            self._gap_s.append(now - request.last_token_s)
            if request.switch is not None:
                switch = self._switches[request.switch]
                switch.gap_s.append(now - request.last_token_s)
                switch.pause_s = switch.pause_s or now - switch.at_s
                request.switch = None
        request.last_token_s = now
        request.num_tokens += len(update.token_ids)
        if update.finish_reason is not None:
            self._note_end(request, update)

    def _note_end(self, request: _InFlight, update: RequestUpdate) -> None:
        recorded = request.recorded
        assert request.num_tokens == recorded.output_tokens, request
        del self._in_flight[update.request_id]
        is_divided = self._is_divided and recorded.output_tokens > 1
        num_cached = request.num_cached_tokens if is_divided else update.num_cached_tokens
        first_token_s = request.first_token_s - recorded.arrival_s
        token_s = (self._now - request.first_token_s) / max(1, request.num_tokens - 1)
        self._ended.append(_Ended(recorded.prompt_tokens, recorded.output_tokens, num_cached, first_token_s, token_s))
        self._last_end_s = self._now

    def _next_switch_s(self) -> float:
        """Return when the next size takes over: its replicas have started, and no step is in flight. Else infinity."""
        (pool, *_) = self._serving.pools
        if not self._resizes or pool.is_running or (not self._in_flight and self._next_arrival_s() == math.inf):
            return math.inf
        at_s, _ = self._resizes[0]
        return max(self._now, at_s + self._settings.start_time)

    def _switch(self) -> None:
        """End the pool, and start the pool of the next size, which continues the requests with empty caches."""
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
        seconds, ended = self._last_end_s, self._ended
        first_token_limit = self._settings.first_token_limit or math.inf
        output_token_limit = self._settings.output_token_limit or math.inf
        good = [
            each for each in ended if each.first_token_s <= first_token_limit and each.token_s <= output_token_limit
        ]
        output_tokens = sum(each.output_tokens for each in ended)
        return Outcome(
            num_finished=len(ended),
            prompt_tokens=sum(each.prompt_tokens for each in ended),
            repeated_tokens=repeated_tokens(self._traffic, BLOCK_SIZE),
            cached_tokens=sum(each.cached_tokens for each in ended),
            output_tokens=output_tokens,
            seconds=seconds,
            output_tokens_per_s=output_tokens / seconds,
            first_token_s=Percentiles.of([each.first_token_s for each in ended]),
            output_token_s=Percentiles.of([each.token_s for each in ended if each.output_tokens > 1]),
            gap_s=Percentiles.of(self._gap_s),
            num_good=len(good),
            good_output_tokens_per_s=sum(each.output_tokens for each in good) / seconds,
            pools=(*pools, *(pool.outcome(seconds) for pool in running)),
            switches=tuple(Switch(**vars(each) | {"gap_s": Percentiles.of(each.gap_s)}) for each in self._switches),
        )


@dataclass(eq=False)
class _Switch:
    """A change of size, and its effects on requests; see `Switch`."""

    asked_s: float
    at_s: float
    nodes_before: int
    nodes_after: int
    num_resumed: int = 0
    pause_s: float = 0.0
    gap_s: list[float] = field(default_factory=list)


def prompt_of(recorded: RecordedRequest, tokens_per_block: int, *, own_token: int) -> list[int]:
    """Return the token ids of a prompt. A token is the id of its recorded block; without a block, it is `own_token`."""
    token_ids: list[int] = []
    for block in recorded.prefix_blocks:
        token_ids += [block] * tokens_per_block
    del token_ids[recorded.prompt_tokens :]
    return token_ids + [own_token] * (recorded.prompt_tokens - len(token_ids))
