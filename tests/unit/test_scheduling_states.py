"""Random histories of the block pool and of the scheduler, compared with simple models.

The scheduler's model executes plans in their order, some time after they were made, with a rank's request table and a
cache that records for each position which tokens its key and value were computed from. Whatever is shared, evicted,
preempted or aborted, an attended position must hold exactly the prefix of the request that attends to it.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from logprob_rows import packed, unpacked

from moeserve.cache_kind import CacheKind
from moeserve.errors import RequestError
from moeserve.kv.connector import HostTier
from moeserve.kv.pool import BlockPool, num_blocks_of_windows
from moeserve.kv.rules import CacheGroup, KeepState, KeepWindow
from moeserve.protocol import (
    CachePlace,
    CancelReceive,
    ChunkResult,
    KeepItems,
    PeerBlocks,
    RankReport,
    ReceiveItems,
    Request,
    RequestUpdate,
    StepPlan,
    StepResult,
    StoreKey,
    StoreTransfer,
    TokenLogprobs,
    Transfer,
    TransferResult,
)
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.worker.request_table import Chunk, RequestTable

picks = st.integers(min_value=0, max_value=1000)  # an index, modulo the length of the list
seldom = st.integers(0, 5).map(lambda number: number == 5)  # for rules that end most requests

DIGESTS = [bytes([letter]) for letter in b"abcdefgh"]


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: the holders of blocks, the registered digests, and the time at which each block became free."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.holders: list[list[int]] = []
        self.registered: dict[bytes, int] = {}
        self.freed_at = dict.fromkeys(range(num_blocks), (False, 0))  # the lowest is evicted first
        self.now = 0

    def held(self) -> list[int]:
        return [block_id for holder in self.holders for block_id in holder]

    @rule(wanted=st.integers(0, 4))
    def allocate(self, wanted: int) -> None:
        wanted = min(wanted, len(self.freed_at))
        cached = set(self.registered.values())
        taken = self.pool.allocate(wanted)
        assert len(set(taken)) == wanted
        assert set(taken) <= set(self.freed_at), "a block was allocated that was not free"
        cached_free = sorted(cached & set(self.freed_at), key=self.freed_at.__getitem__)
        num_evicted = max(0, wanted - (len(self.freed_at) - len(cached_free)))
        evicted = set(cached_free[:num_evicted])  # no more than needed, and the least recently used
        assert set(taken) & cached == evicted
        self.registered = {digest: block for digest, block in self.registered.items() if block not in evicted}
        for block_id in taken:
            del self.freed_at[block_id]
        self.holders.append(taken)

    @precondition(lambda self: self.registered)
    @rule(pick=picks, num_blocks=st.integers(1, 3))
    def share(self, pick: int, num_blocks: int) -> None:
        digests = sorted(self.registered)
        found = [self.pool.find(digest) for digest in digests]
        assert found == [self.registered[digest] for digest in digests]
        shared = [block_id for block_id in found if block_id is not None][pick % len(digests) :][:num_blocks]
        self.pool.share(shared)
        for block_id in shared:
            self.freed_at.pop(block_id, None)
        self.holders.append(shared)

    @precondition(lambda self: self.holders)
    @rule(pick=picks, is_unlikely=st.booleans())
    def release(self, pick: int, is_unlikely: bool) -> None:
        holder = self.holders.pop(pick % len(self.holders))
        self.pool.release(holder, is_unlikely=is_unlikely)
        still_held = set(self.held())
        for block_id in reversed(holder):
            if block_id not in still_held:
                self.now += 1
                self.freed_at[block_id] = not is_unlikely, self.now

    @precondition(lambda self: self.holders)
    @rule(pick=picks, first_digest=picks, num_blocks=st.integers(1, 4))
    def register(self, pick: int, first_digest: int, num_blocks: int) -> None:
        """Register blocks of one holder, under digests that may be in use."""
        holder = self.holders[pick % len(self.holders)]
        new = [block_id for block_id in holder if block_id not in self.registered.values()][:num_blocks]
        for place, block_id in enumerate(new, start=first_digest):
            digest = DIGESTS[place % len(DIGESTS)]
            self.pool.register(block_id, digest)
            self.registered.setdefault(digest, block_id)

    @invariant()
    def check_bookkeeping(self) -> None:
        assert self.pool.num_free == len(self.freed_at) == self.num_blocks - len(set(self.held()))
        assert all(self.pool.is_free(block_id) == (block_id in self.freed_at) for block_id in range(self.num_blocks))
        for digest in DIGESTS:
            assert self.pool.find(digest) == self.registered.get(digest)
        self.pool.check_invariants(self.held())


NUM_TOKEN_IDS = 12
EOS, STOP = 10, 11
Contents = tuple[str, tuple[int, ...]]  # of a cache position: the salt, and all tokens up to its own
Item = list[Contents]  # of a block, or the tokens that a state has seen
GARBAGE: Contents = ("garbage", ())


@dataclass(eq=False)
class Expected:
    """The state of a request as it follows from updates alone."""

    request: Request
    was_admitted: bool = False
    num_cached: int = 0
    num_output: int = 0
    is_garbage: bool = False  # a step of it has failed, so plans that were made before that compute garbage
    updates: list[RequestUpdate] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return bool(self.updates) and self.updates[-1].finish_reason is not None

    def tokens(self, end: int) -> tuple[int, ...]:
        """Return the first tokens of the request, as if it never ended."""
        prompt = self.request.prompt_token_ids
        output = [
            choose(self.request.seed, position, barred_at(self.request, position))
            for position in range(end - len(prompt))
        ]
        return tuple(prompt + output)[:end]

    def contents(self, position: int) -> Contents:
        return self.request.cache_salt, self.tokens(position + 1)


@dataclass(eq=False)
class PlanInFlight:
    """A plan, the requests of its chunks, the blocks that it may touch, and its result once it was executed."""

    plan: StepPlan
    requests: list[Expected]
    blocks: dict[int, int]  # to the slot that holds it
    window_blocks: set[int]
    result: StepResult | None = None
    report: RankReport | None = None  # of the rank's table after the step
    failed: bool = False


def barred_at(request: Request, position: int) -> list[int]:
    return request.eos_token_ids + request.params.stop_token_ids if position < request.params.min_tokens else []


def choose(seed: int, position: int, barred: list[int]) -> int:
    """Return a token that depends on the seed and the position alone, as a sampler does."""
    token_id = zlib.crc32(b"%d at %d" % (seed, position)) % NUM_TOKEN_IDS
    while token_id in barred:
        token_id = (token_id + 1) % NUM_TOKEN_IDS
    return token_id


def whole_output(request: Request, max_model_len: int) -> tuple[list[int], str, int | None]:
    """Return tokens, finish reason and stop reason of a request that is not aborted, without any scheduler."""
    output: list[int] = []
    while True:
        barred = barred_at(request, len(output))
        token_id = choose(request.seed, len(output), barred)
        output.append(token_id)
        if token_id in request.eos_token_ids and not barred:
            return output, "stop", None
        if token_id in request.params.stop_token_ids and not barred:
            return output, "stop", token_id
        if len(output) == request.params.max_tokens or len(request.prompt_token_ids) + len(output) == max_model_len:
            return output, "length", None


def prompt_row(token_id: int, position: int) -> TokenLogprobs:
    return TokenLogprobs([token_id], [-float(position)], [1])


@st.composite
def params(draw: st.DrawFn) -> RequestParams:
    max_tokens = draw(st.sampled_from([20, None, 16, 12, 8, 3, 1]))
    return RequestParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, 3])) if max_tokens is None or max_tokens >= 3 else 0,
        stop_token_ids=draw(st.sampled_from([[], [], [STOP]])),
        logprobs=draw(st.sampled_from([None, None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_class = Scheduler

    @initialize(
        block_size=st.integers(1, 4),
        max_model_len=st.integers(4, 32),
        num_spare_blocks=st.integers(0, 3),
        max_num_seqs=st.sampled_from([5, 4, 3, 2, 1]),
        max_num_batched_tokens=st.sampled_from([8, 12, 32, 5, 3, 2, 1]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        max_plans=st.sampled_from([2, 2, 1, 3]),
        plans_ahead=st.sampled_from([True, True, False]),
        num_host_blocks=st.sampled_from([0, 0, 30, 6, 1]),
        has_peers=st.booleans(),
        num_saved_states=st.sampled_from([None, None, 3, 1, 0]),
        num_drafts=st.sampled_from([0, 3, 1]),
        window=st.sampled_from([0, 0, 3, 1, 6]),
        num_spare_window_blocks=st.integers(0, 8),
        takes_turns=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        max_model_len: int,
        num_spare_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        max_plans: int,
        plans_ahead: bool,
        num_host_blocks: int,
        has_peers: bool = False,
        num_saved_states: int | None = None,
        num_drafts: int = 0,
        window: int = 0,
        num_spare_window_blocks: int = 0,
        takes_turns: bool = False,
    ) -> None:
        self.num_drafts = 0 if plans_ahead else num_drafts
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_plans = max_plans
        max_blocks = -(-max_model_len // block_size)
        groups = []
        self.window, self.has_states, self.state_step = window, num_saved_states is not None, -(-2 // block_size)
        self.num_window_blocks = num_spare_window_blocks + num_blocks_of_windows(
            window, block_size, max_num_seqs=1, num_tokens_in_flight=min(max_num_batched_tokens, max_model_len)
        )
        if window:
            groups.append(CacheGroup(KeepWindow(window, block_size), self.num_window_blocks))
        if num_saved_states is not None:
            groups.append(CacheGroup(KeepState(self.state_step), num_saved_states))
        self.config = SchedulerConfig(
            num_blocks=max_blocks + num_spare_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            plans_ahead=plans_ahead,
            num_batches=1 if plans_ahead else max_plans,
            other_groups=tuple(groups),
            longest_turn_wait=float(takes_turns),
        )
        self.tier = HostTier(dict.fromkeys(CacheKind, num_host_blocks)) if num_host_blocks else None
        self.peer_addresses = ["127.0.0.1:1"] if has_peers else []
        self.scheduler = self.scheduler_class(self.config, b"engine", self.tier, self.peer_addresses)
        self.table = RequestTable(max_num_seqs, max_blocks, 1 + (window > 0))
        self.live: list[Expected] = []  # in order of arrival
        self.past: list[Expected] = []
        self.of_slot: dict[int, Expected] = {}
        self.blocks_of_slot: dict[int, list[int]] = {}
        self.window_blocks_of_slot: dict[int, list[int]] = {}
        self.cache: dict[tuple[int, int], Contents] = {}  # by block id and offset
        self.window_cache: dict[tuple[int, int], Contents] = {}  # the same of layers with windows
        self.states: dict[int, list[Contents]] = {}  # by row: the tokens that a recurrent state has seen
        self.plans: deque[PlanInFlight] = deque()
        self.last_step = 0
        self.store: dict[tuple[CacheKind, StoreKey], Item] = {}  # behind the cache
        self.transfers: list[tuple[Transfer, list[Item]]] = []  # in flight, with what they read
        self.computed_elsewhere: dict[str, Expected] = {}  # requests whose blocks another engine has, by handle
        self.cancelled: set[int] = set()  # transfers
        self.num_loaded = self.num_received = self.num_kept = 0  # items

    @rule(
        base=st.sampled_from([0, 1]),
        length=st.sampled_from([2, 8, 0, 4, 6, 12, 16]),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=2),
        params=params(),
        has_eos=st.booleans(),
        salt=st.sampled_from(["", "", "tenant"]),
        old_id=st.booleans(),
        num_resumed=st.sampled_from([0, 0, 0, 1, 3]),
        kept=st.booleans(),
        computed_elsewhere=st.booleans(),
        num_outputs=st.sampled_from([1, 1, 2]),
    )
    def add(
        self,
        base: int,
        length: int,
        tail: list[int],
        params: RequestParams,
        has_eos: bool,
        salt: str,
        old_id: bool,
        num_resumed: int,
        kept: bool,
        computed_elsewhere: bool,
        num_outputs: int,
    ) -> None:
        prompt = [base] * length + tail
        self.add_prompt(prompt, params, has_eos, salt, old_id, num_resumed, kept, computed_elsewhere, num_outputs)

    @precondition(lambda self: self.live or self.past)
    @rule(pick=picks, length=st.integers(1, 32), params=params())
    def add_continuation(self, pick: int, length: int, params: RequestParams) -> None:
        others = self.live + self.past
        other = others[pick % len(others)]
        self.add_prompt(list(other.tokens(length)), params, True, other.request.cache_salt, False, 0)

    @precondition(lambda self: self.live)
    @rule(pick=picks, params=params())
    def add_sample(self, pick: int, params: RequestParams) -> None:
        """Another output of a prompt, which it shares in memory."""
        other = self.live[pick % len(self.live)].request
        self.add_prompt(other.prompt_token_ids, params, True, other.cache_salt, False, 0)

    def add_prompt(
        self,
        prompt: list[int],
        params: RequestParams,
        has_eos: bool,
        salt: str,
        old_id: bool,
        num_resumed: int,
        kept: bool = False,
        computed_elsewhere: bool = False,
        num_outputs: int = 1,
    ) -> None:
        """Add requests, all of which continue the same blocks if these were computed elsewhere."""
        number = len(self.live) + len(self.past)
        prompt = prompt if len(prompt) < self.max_model_len else prompt[: self.max_model_len - 1]
        source = PeerBlocks(
            handle=f"of others {number}", addresses=["127.0.0.1:2"], num_blocks=self.most_kept_blocks(prompt)
        )
        for _ in range(num_outputs):
            self.add_output(prompt, params, has_eos, salt, old_id, num_resumed, kept, source, computed_elsewhere)

    def add_output(
        self,
        prompt: list[int],
        params: RequestParams,
        has_eos: bool,
        salt: str,
        old_id: bool,
        num_resumed: int,
        kept: bool,
        source: PeerBlocks,
        computed_elsewhere: bool,
    ) -> None:
        live_ids = {known.request.request_id for known in self.live}
        free_ids = [o.request.request_id for o in self.past if o.request.request_id not in live_ids]
        number = len(self.live) + len(self.past)
        request = Request(
            request_id=free_ids[-1] if old_id and free_ids else f"request {number}",
            prompt_token_ids=prompt,
            params=params,
            seed=number,  # tells requests apart
            eos_token_ids=[EOS] if has_eos else [],
            cache_salt=salt,
            kv_handle=f"kept {number}" if kept else "",
            kv_source=source if computed_elsewhere else None,
        )
        whole, _, _ = whole_output(request, self.max_model_len)
        given = whole[: min(num_resumed, len(whole) - 1)]
        self.scheduler.add(msgspec.structs.replace(request, output_token_ids=given))
        self.live.append(Expected(request, num_output=len(given)))
        self.computed_elsewhere[source.handle] = self.live[-1]

    @rule(length=st.integers(0, 3), uses_live_id=st.booleans())
    def add_refused(self, length: int, uses_live_id: bool) -> None:
        request_id = "refused"
        length = 0 if length == 0 else self.max_model_len + length - 1
        if uses_live_id and self.live:
            request_id, length = self.live[0].request.request_id, 1
        try:
            self.scheduler.add(
                Request(request_id=request_id, prompt_token_ids=[0] * length, params=RequestParams(), seed=0)
            )
        except RequestError:
            return
        raise AssertionError("a request was accepted that cannot run")

    @precondition(lambda self: self.live)
    @rule(pick=picks, happens=st.booleans())
    def abort(self, pick: int, happens: bool) -> None:
        if not happens:
            return
        known = self.live[pick % len(self.live)]
        update = self.scheduler.abort(known.request.request_id)
        assert update is not None
        self.take_update(update)
        assert known.updates[-1].finish_reason == "abort"

    @rule(pick=picks)
    def abort_unknown(self, pick: int) -> None:
        live_ids = {known.request.request_id for known in self.live}
        gone = [o.request.request_id for o in self.past if o.request.request_id not in live_ids]
        assert self.scheduler.abort(gone[pick % len(gone)] if gone else "unknown") is None

    @rule(happens=seldom)
    def abort_all(self, happens: bool) -> None:
        if not happens:
            return
        updates = self.scheduler.abort_all()
        assert sorted(update.request_id for update in updates) == sorted(o.request.request_id for o in self.live)
        for update in updates:
            self.take_update(update)
            assert update.finish_reason == "abort"

    @precondition(lambda self: len(self.plans) < self.max_plans)
    @rule()
    def schedule(self) -> None:
        plan = self.scheduler.schedule()
        self.begin_transfers()
        if plan is None:
            assert self.plans or self.transfers or not self.live, "the oldest request must move on"
            return
        assert plan.step == self.last_step + 1
        self.last_step = plan.step
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.slots) <= self.scheduler.num_running <= self.config.max_num_seqs
        assert self.num_drafts or not plan.drafts
        assert len(plan.slots) <= math.ceil(min(len(self.live), self.config.max_num_seqs) / self.config.num_batches)
        blocks_in_flight = {block for other in self.plans for block in other.blocks}
        window_blocks_in_flight = {block for other in self.plans for block in other.window_blocks}
        for registration in plan.registrations:
            known = next(known for known in self.live if known.request.seed == registration.seed)
            self.of_slot[registration.slot] = known
            block_ids, *of_windows = registration.cache.tables
            shared = block_ids[: plan.starts[plan.slots.index(registration.slot)] // self.block_size]
            assert blocks_in_flight.isdisjoint(set(block_ids) - set(shared)), "reused too early"
            self.blocks_of_slot[registration.slot] = list(block_ids)
            self.window_blocks_of_slot[registration.slot] = [block_id for each in of_windows for block_id in each]
            first = len(shared) * bool(self.window)
            new_in_window = self.window_blocks_of_slot[registration.slot][first:]
            assert window_blocks_in_flight.isdisjoint(new_in_window), "reused too early"
            if not known.was_admitted:
                known.was_admitted, known.num_cached = True, plan.starts[plan.slots.index(registration.slot)]
        for slot, (block_ids, *of_windows) in plan.cache.new_blocks:
            assert blocks_in_flight.isdisjoint(block_ids), "reused too early"
            self.blocks_of_slot[slot] += block_ids
            for each in of_windows:
                assert window_blocks_in_flight.isdisjoint(each), "reused too early"
                self.window_blocks_of_slot[slot] += each
        requests = [self.of_slot[slot] for slot in plan.slots]
        assert len(set(requests)) == len(requests)
        assert not any(known.ended for known in requests)
        blocks = {block: slot for slot in plan.slots for block in self.blocks_of_slot[slot]}
        window_blocks = {
            block
            for slot, start in zip(plan.slots, plan.starts, strict=True)
            for block in self.window_blocks_of_slot[slot][self.first_in_window(start) // self.block_size :]
        }
        self.plans.append(PlanInFlight(plan, requests, blocks, window_blocks))

    @precondition(lambda self: any(each.result is None for each in self.plans))
    @rule(fails=seldom, failing_row=picks, row_fails=seldom)
    def execute(self, fails: bool = False, failing_row: int = 0, row_fails: bool = False) -> None:
        """Run the oldest plan that has not run, on the rank's table and cache."""
        each = next(each for each in self.plans if each.result is None)
        chunks = self.table.apply(each.plan)
        for known, chunk in zip(each.requests, chunks, strict=True):
            self.check_chunk(known, chunk)
            known.is_garbage |= fails
            for position in range(0 if known.is_garbage else chunk.start):
                assert self.cache.get(self.place(chunk, position)) == known.contents(position), "attends before"
        self.check_windows(each.requests, chunks, written=False)
        if self.has_states:
            self.update_states(each.requests, chunks)
        for known, chunk in zip(each.requests, chunks, strict=True):
            for position in range(chunk.start, chunk.end):
                contents = GARBAGE if known.is_garbage else self.contents_with_drafts(known, chunk, position)
                self.cache[self.place(chunk, position)] = contents
                if self.window:
                    self.window_cache[self.place(chunk, position, in_window=True)] = contents
        self.check_windows(each.requests, chunks, written=True)
        for known, chunk in zip(each.requests, chunks, strict=True):
            for position in range(0 if known.is_garbage else chunk.end):
                contents = self.contents_with_drafts(known, chunk, position)
                assert self.cache[self.place(chunk, position)] == contents, "overwritten in the step"
        results = [self.result_of(chunk) for chunk in chunks]
        if self.config.plans_ahead:
            self.table.append_tokens(chunks, [token_id for each in results for token_id in each.token_ids])
        if row_fails:
            results[failing_row % len(results)] = ChunkResult(error="NaN")
        each.failed = fails
        each.result = StepResult(step=each.plan.step, chunks=results)
        each.report = RankReport(0, self.table.digests(each.plan.slots))

    def first_in_window(self, start: int) -> int:
        """Return the first position that the token at `start` reads."""
        return max(0, start - self.window + 1)

    def check_windows(self, requests: Sequence[Expected], chunks: Sequence[Chunk], *, written: bool) -> None:
        """Check what layers with windows read, before or after the chunks are written."""
        for known, chunk in zip(requests, chunks, strict=True) if self.window else ():
            end = chunk.end if written else chunk.start
            for position in range(self.first_in_window(chunk.start), 0 if known.is_garbage else end):
                found = self.window_cache.get(self.place(chunk, position, in_window=True))
                assert found == self.contents_with_drafts(known, chunk, position), "a window reads another prefix"

    def update_states(self, requests: Sequence[Expected], chunks: Sequence[Chunk]) -> None:
        """Load, store and save the states of chunks, which run in any order."""
        written = [row for chunk in chunks for row in (chunk.states.store, chunk.states.save) if row >= 0]
        assert len(set(written)) == len(written), "two states in one row"
        for known, chunk in zip(requests, chunks, strict=True):
            others = [row for row in written if row != chunk.states.store]
            assert chunk.states.load not in others, "overwritten in the step"
            before = [] if chunk.states.load < 0 else self.states[chunk.states.load]
            after = [self.contents_with_drafts(known, chunk, position) for position in range(chunk.end)]
            assert known.is_garbage or before == after[: chunk.start], "the state of another prefix"
            if known.is_garbage:
                after = [GARBAGE] * chunk.end
            self.states[chunk.states.store] = after
            if chunk.states.save >= 0:
                assert 1 <= chunk.states.num_before_save <= chunk.end - chunk.start
                self.states[chunk.states.save] = after[: chunk.start + chunk.states.num_before_save]

    @precondition(lambda self: self.plans and self.plans[0].result is not None)
    @rule()
    def commit(self) -> None:
        each = self.plans.popleft()
        assert each.result is not None
        assert each.report is not None
        if each.failed:
            still_live = [known for known in each.requests if not known.ended]
            updates = self.scheduler.abort_step()
            assert [update.request_id for update in updates] == [known.request.request_id for known in still_live]
        else:
            results = zip(each.requests, each.result.chunks, strict=True)
            expected = [known for known, result in results if not known.ended and (result.error or result.token_ids)]
            updates = self.scheduler.commit(each.result, [each.report])
            self.scheduler.note_step(each.plan, 0.01 * each.plan.num_tokens**2)  # few at once are faster
            assert [update.request_id for update in updates] == [known.request.request_id for known in expected]
        for update in updates:
            self.take_update(update)

    def begin_transfers(self) -> None:
        for transfer in self.scheduler.take_transfers():
            items: list[Item] = []
            match transfer:
                case CancelReceive(number=number, receive=receive):
                    self.cancelled.add(receive)
                    self.scheduler.end_transfer(TransferResult(number=number, num_copied=0, seconds=0.0))
                    continue
                case StoreTransfer(is_load=True):
                    items = [self.store[key] for key in self.keys_in_store(transfer)]
                    self.num_loaded += len(items)
                    self.destroy(transfer.places)
                case StoreTransfer(is_load=False):
                    items = [self.read_item(place) for place in transfer.places]
                    self.store.update({key: [GARBAGE] for key in self.keys_in_store(transfer)})
                case KeepItems():
                    kept = [each for each, _ in self.transfers if isinstance(each, KeepItems)]
                    num_places = {
                        CacheKind.BLOCK: self.config.num_blocks,
                        CacheKind.WINDOW_BLOCK: self.num_window_blocks if self.window else 0,
                    }
                    for kind, most in num_places.items():
                        num_kept = sum(place.kind == kind for each in (*kept, transfer) for place in each.places)
                        assert num_kept <= most // 2
                    items = [self.read_item(place) for place in transfer.places]
                    (known,) = (o for o in self.live + self.past if o.request.kv_handle == transfer.handle)
                    num_blocks = sum(place.kind == CacheKind.BLOCK for place in transfer.places)
                    assert items == self.items_at(known, num_blocks)
                    self.num_kept += len(items)
                case ReceiveItems(source=source):
                    known = self.computed_elsewhere.pop(source.handle)  # which gives items only once
                    of_source = self.items_at(known, source.num_blocks)
                    items = [of_source[index] for index in transfer.wanted]
                    self.destroy(transfer.places)
                    self.num_received += len(items)
            assert len(transfer.places) == len(items)
            self.transfers.append((transfer, items))
        needed = [known.request.kv_source for known in self.live]
        for transfer, items in self.transfers:
            if isinstance(transfer, ReceiveItems) and items:
                assert (transfer.number in self.cancelled) == (transfer.source not in needed)

    @precondition(lambda self: self.transfers)
    @rule(pick=picks, num_failed=st.sampled_from([0, 0, 0, 1, 2]))
    def end_transfer(self, pick: int = 0, num_failed: int = 0) -> None:
        """End any transfer. What it reads must not have changed, and nobody may have written where it writes."""
        transfer, items = self.transfers.pop(pick % len(self.transfers))
        num_copied = max(0, len(items) - num_failed)
        is_of_store = isinstance(transfer, StoreTransfer)
        is_save = is_of_store and not transfer.is_load
        for index, (place, item) in enumerate(zip(transfer.places, items, strict=True)):
            cached = self.read_item(place)
            if is_of_store:
                key = self.keys_in_store(transfer)[index]
                assert self.store[key] == ([GARBAGE] if is_save else item), "overwritten"
                if index < num_copied and is_save:
                    self.store[key] = item
            if is_save or isinstance(transfer, KeepItems):
                assert cached == item, "changed while it was read"
            else:
                assert cached == self.garbage(place), "written meanwhile"
                if index < num_copied:
                    self.write_item(place, item)
        self.scheduler.end_transfer(TransferResult(number=transfer.number, num_copied=num_copied, seconds=0.0))

    def keys_in_store(self, transfer: StoreTransfer) -> list[tuple[CacheKind, StoreKey]]:
        return [(place.kind, key) for place, key in zip(transfer.places, transfer.store_keys, strict=True)]

    def most_kept_blocks(self, prompt: list[int]) -> int:
        """Return the blocks of a prompt that another engine can use."""
        num_blocks = (len(prompt) - 1) // self.block_size
        return num_blocks - num_blocks % (self.state_step if self.has_states else 1)

    def items_at(self, known: Expected, num_blocks: int) -> list[Item]:
        """Return all that a request needs to begin behind its first blocks: blocks, those in the window, the state."""
        size, end = self.block_size, num_blocks * self.block_size
        contents = [known.contents(position) for position in range(end)]
        blocks = [contents[start : start + size] for start in range(0, end, size)]
        in_window = blocks[self.first_in_window(end) // size :] if self.window else []
        return blocks + in_window + ([contents] if self.has_states else [])

    def garbage(self, place: CachePlace) -> Item:
        return [GARBAGE] * (1 if place.kind == CacheKind.STATE else self.block_size)

    def destroy(self, places: Sequence[CachePlace]) -> None:
        for place in places:
            self.write_item(place, self.garbage(place))

    def cache_of(self, kind: CacheKind) -> dict[tuple[int, int], Contents]:
        return self.cache if kind == CacheKind.BLOCK else self.window_cache

    def read_item(self, place: CachePlace) -> Item:
        if place.kind == CacheKind.STATE:
            return self.states[self.config.max_num_seqs + place.index]
        return [self.cache_of(place.kind)[place.index, offset] for offset in range(self.block_size)]

    def write_item(self, place: CachePlace, item: Item) -> None:
        if place.kind == CacheKind.STATE:
            self.states[self.config.max_num_seqs + place.index] = item
        else:
            contents = {(place.index, offset): each for offset, each in enumerate(item)}
            self.cache_of(place.kind).update(contents)

    @rule(num_steps=st.integers(2, 8))
    def run(self, num_steps: int) -> None:
        """Run several whole steps, so that few rules make a long history."""
        for _ in range(num_steps):
            if len(self.plans) < self.max_plans:
                self.schedule()
                self.check_bookkeeping()
            if self.plans:
                self.finish_oldest()
                self.check_bookkeeping()
            if self.transfers:
                self.end_transfer()
                self.check_bookkeeping()

    def finish_oldest(self) -> None:
        if self.plans[0].result is None:
            self.execute()
        self.commit()

    @invariant()
    def check_bookkeeping(self) -> None:
        self.scheduler.check_invariants()
        assert self.scheduler.num_plans == len(self.plans)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.has_work == bool(self.live)
        if self.tier is not None:
            self.tier.check_invariants()
        transfers = self.scheduler.transfers
        if not self.live and not self.plans and not (transfers and transfers.are_in_flight):
            assert self.scheduler.num_free_blocks == self.config.num_blocks

    def teardown(self) -> None:
        """Every request that is not aborted finishes with the output it would have had alone."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2 * len(self.live) * self.max_model_len + self.max_plans):  # the oldest gains a token each time
            if len(self.plans) < self.max_plans:
                self.schedule()
            if self.plans:
                self.finish_oldest()
            while self.transfers:
                self.end_transfer()
        assert not self.live, "requests did not finish"
        self.check_bookkeeping()
        for known in self.past:
            self.check_output(known)

    # Checks

    def place(self, chunk: Chunk, position: int, *, in_window: bool = False) -> tuple[int, int]:
        block = self.table.tables[int(in_window), chunk.slot, position // self.block_size]
        return int(block), position % self.block_size

    def contents_with_drafts(self, known: Expected, chunk: Chunk, position: int) -> Contents:
        """Return what a position holds after a chunk, whose drafts may be wrong."""
        num_known = chunk.end - len(chunk.drafts)
        tokens = known.tokens(num_known) + tuple(chunk.drafts)
        return known.request.cache_salt, tokens[: position + 1]

    def check_chunk(self, known: Expected, chunk: Chunk) -> None:
        """Check that a chunk is what its request needs next."""
        request, num_prompt = known.request, len(known.request.prompt_token_ids)
        num_known = chunk.end - len(chunk.drafts)
        assert tuple(chunk.token_ids) == known.tokens(num_known)[chunk.start :] + tuple(chunk.drafts)
        assert chunk.start < num_known
        assert chunk.request.num_prompt_tokens == num_prompt
        assert (chunk.request.params, chunk.request.seed) == (request.params, request.seed)
        assert chunk.request.end_token_ids == [*request.eos_token_ids, *request.params.stop_token_ids]
        assert chunk.samples == (num_known == len(chunk.request.token_ids))
        assert chunk.end >= num_prompt or not chunk.samples
        assert chunk.samples or not chunk.drafts
        assert chunk.end < self.max_model_len
        needs_rows = request.params.prompt_logprobs is not None and chunk.request.num_output_tokens == 0
        assert tuple(chunk.prompt_targets) == (
            known.tokens(min(chunk.end + 1, num_prompt))[chunk.start + 1 :] if needs_rows else ()
        )

    def result_of(self, chunk: Chunk) -> ChunkResult:
        rows = [prompt_row(target, chunk.start + row) for row, target in enumerate(chunk.prompt_targets)]
        if not chunk.samples:
            return ChunkResult(prompt_logprobs=packed(rows))
        request, first = chunk.request, chunk.request.num_output_tokens

        def token_at(position: int) -> int:
            barred = request.end_token_ids if position < request.params.min_tokens else []
            return choose(request.seed, position, barred)

        token_ids = [token_at(first)]
        for position, draft in enumerate(chunk.drafts, first + 1):
            if draft != token_ids[-1]:
                break
            token_ids.append(token_at(position))
        end = first + len(token_ids)
        drafts = [token_at(position) for position in range(end, end + self.num_drafts)]
        return ChunkResult(
            token_ids=token_ids,
            logprobs=[]
            if request.params.logprobs is None
            else [prompt_row(token_id, position) for position, token_id in enumerate(token_ids, first)],
            prompt_logprobs=packed(rows),
            # Every third draft is wrong.
            draft_token_ids=[
                (draft + (request.seed + position) % 3 // 2) % NUM_TOKEN_IDS
                for position, draft in enumerate(drafts, end)
            ],
        )

    def take_update(self, update: RequestUpdate) -> None:
        (known,) = (known for known in self.live if known.request.request_id == update.request_id)
        assert update.num_cached_tokens == known.num_cached
        known.updates.append(update)
        if update.kv_blocks is not None:
            assert self.peer_addresses
            assert update.finish_reason in ("stop", "length")
            assert update.kv_blocks.handle == known.request.kv_handle
            most = self.most_kept_blocks(known.request.prompt_token_ids)
            assert 0 < update.kv_blocks.num_blocks <= most
            assert update.kv_blocks.num_blocks == most or self.window or self.has_states
        if known.ended:
            self.live.remove(known)
            self.past.append(known)

    def check_output(self, known: Expected) -> None:
        """Check all updates of a request together."""
        request, updates, first = known.request, known.updates, known.num_output
        assert [update.finish_reason is None for update in updates] == [True] * (len(updates) - 1) + [False]
        output = [token_id for update in updates for token_id in update.token_ids]
        tokens, finish_reason, stop_reason = whole_output(request, self.max_model_len)
        if updates[-1].finish_reason == "abort":
            assert output == tokens[first : first + len(output)]
            assert first + len(output) < len(tokens)
        else:
            assert output == tokens[first:]
            assert (updates[-1].finish_reason, updates[-1].stop_reason) == (finish_reason, stop_reason)
        logprobs = [row for update in updates for row in update.logprobs]
        shown = [prompt_row(token_id, position) for position, token_id in enumerate(output, first)]
        assert logprobs == ([] if request.params.logprobs is None else shown)
        given = [unpacked(update.prompt_logprobs) for update in updates if update.token_ids]
        if given:
            has_rows = request.params.prompt_logprobs is not None and not first
            targets = request.prompt_token_ids[1:] if has_rows else []
            assert given[0] == [prompt_row(target, position) for position, target in enumerate(targets)]
            assert not any(given[1:])


class ManyHistories(SchedulerMachine):
    """`SchedulerMachine` with more examples."""


def run_with_transfers(machine: SchedulerMachine, seed: int) -> tuple[int, int, int]:
    """Run a history in which few prompts return often, and some were computed elsewhere or are continued elsewhere.

    Returns:
        The number of blocks that were loaded, received and kept.
    """
    chance = random.Random(seed)
    machine.start(
        block_size=2,
        max_model_len=32,
        num_spare_blocks=chance.choice([0, 8]),
        max_num_seqs=4,
        max_num_batched_tokens=chance.choice([8, 32]),
        enable_prefix_caching=True,
        max_plans=2,
        plans_ahead=chance.choice([True, False]),
        num_host_blocks=chance.choice([100, 6]),
        has_peers=chance.choice([True, False]),
        num_saved_states=chance.choice([None, 6, 2]),
        window=chance.choice([0, 3]),
        num_spare_window_blocks=8,
    )
    bases = [[chance.randrange(NUM_TOKEN_IDS) for _ in range(12)] for _ in range(4)]
    for _ in range(400):
        action = chance.random()
        if action < 0.1 and len(machine.live) < 6:
            prompt = [*chance.choice(bases)[: chance.randint(5, 12)], chance.randrange(3)]
            params, kept, elsewhere, num_outputs = (
                RequestParams(max_tokens=chance.randint(1, 8)),
                *chance.choices([True, False], k=2),
                chance.choice([1, 1, 2]),
            )
            machine.add_prompt(prompt, params, False, "", False, 0, kept, elsewhere, num_outputs)
        elif action < 0.14 and machine.live:
            machine.abort(chance.randrange(6), True)
        elif action < 0.5 and len(machine.plans) < machine.max_plans:
            machine.schedule()
        elif action < 0.8 and machine.plans:
            machine.finish_oldest()
        elif machine.transfers:
            machine.end_transfer(chance.randrange(6), chance.choice([0, 0, 1, 3]))
        machine.check_bookkeeping()
    machine.teardown()
    return machine.num_loaded, machine.num_received, machine.num_kept


def run_histories(machine: Callable[[], SchedulerMachine]) -> list[tuple[int, int, int]]:
    return [run_with_transfers(machine(), seed) for seed in range(40)]


def test_blocks_come_back_from_the_store_and_from_other_engines() -> None:
    histories = run_histories(SchedulerMachine)
    assert sum(num_loaded > 0 for num_loaded, _, _ in histories) > 20, histories
    assert sum(num_received > 0 and num_kept > 0 for _, num_received, num_kept in histories) > 10, histories


BlockPoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
ManyHistories.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
test_block_pool_histories = BlockPoolMachine.TestCase
test_scheduler_histories = SchedulerMachine.TestCase
test_many_scheduler_histories = pytest.mark.slow(ManyHistories.TestCase)
