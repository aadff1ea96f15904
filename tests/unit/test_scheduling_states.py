"""Random histories of the block pool and of the scheduler, compared with simple models.

The scheduler's model executes each plan on a cache that records, slot by slot, which tokens its key and value were
computed from. Whatever is shared, evicted, preempted or aborted, an attended slot must hold exactly the prefix of the
request that attends to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moeserve.protocol import (
    Chunk,
    ChunkResult,
    Request,
    RequestUpdate,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.block_pool import BlockPool, num_blocks_for
from moeserve.scheduling.scheduler import Scheduler, SchedulerConfig

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
        self.freed_at = dict.fromkeys(range(num_blocks), 0)
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
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        holder = self.holders.pop(pick % len(self.holders))
        self.pool.release(holder)
        still_held = set(self.held())
        for block_id in reversed(holder):
            if block_id not in still_held:
                self.now += 1
                self.freed_at[block_id] = self.now

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
Contents = tuple[str, tuple[int, ...]]  # of a slot: the salt, and all tokens up to its own


@dataclass(eq=False)
class Expected:
    """The state of a request as it follows from plans and updates alone."""

    request: Request
    tokens: list[int]
    num_computed: int = 0
    num_cached: int = 0
    was_admitted: bool = False
    updates: list[RequestUpdate] = field(default_factory=list)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def needs_prompt_rows(self) -> bool:
        return self.request.params.prompt_logprobs is not None and self.num_output == 0

    @property
    def ended(self) -> bool:
        return bool(self.updates) and self.updates[-1].finish_reason is not None

    def contents(self, position: int) -> Contents:
        return self.request.cache_salt, tuple(self.tokens[: position + 1])


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


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that often share a prefix with others."""
    beginning = [draw(st.sampled_from([0, 1]))] * draw(st.sampled_from([2, 8, 0, 4, 6, 12, 16]))
    return beginning + draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size, max_model_len = draw(st.integers(1, 4)), draw(st.integers(4, 32))
    return SchedulerConfig(
        num_blocks=num_blocks_for(max_model_len, block_size) + draw(st.integers(0, 3)),
        block_size=block_size,
        max_num_seqs=draw(st.sampled_from([5, 4, 3, 2, 1])),
        max_num_batched_tokens=draw(st.sampled_from([8, 12, 32, 5, 3, 2, 1])),
        max_model_len=max_model_len,
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs())
    def start(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config, b"engine")
        self.live: list[Expected] = []  # in order of arrival
        self.past: list[Expected] = []
        self.cache: dict[tuple[int, int], Contents] = {}  # slot, as block id and offset
        self.plan: StepPlan | None = None
        self.in_flight: list[Expected] = []  # whose chunks the plan has
        self.last_step = 0

    @rule(
        prompt=prompts(),
        continues=st.none() | picks,
        params=params(),
        seed=st.integers(0, 40),
        eos=st.sampled_from([[EOS], []]),
        salt=st.sampled_from(["", "", "tenant"]),
        old_id=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        continues: int | None,
        params: RequestParams,
        seed: int,
        eos: list[int],
        salt: str,
        old_id: bool,
    ) -> None:
        """Add a request. Its prompt may begin with the tokens of another, and its id may be one of the past."""
        others = self.live + self.past
        if continues is not None and others:
            other = others[continues % len(others)]
            prompt, salt = other.tokens[: 1 + continues % 32], other.request.cache_salt
        live_ids = {known.request.request_id for known in self.live}
        free_ids = [known.request.request_id for known in self.past if known.request.request_id not in live_ids]
        request = Request(
            request_id=free_ids[-1] if old_id and free_ids else f"request {len(others)}",
            prompt_token_ids=prompt[: self.config.max_model_len - 1],
            params=params,
            seed=seed,
            eos_token_ids=eos,
            cache_salt=salt,
        )
        self.scheduler.add(request)
        self.live.append(Expected(request, list(request.prompt_token_ids)))

    @precondition(lambda self: self.live)
    @rule(pick=picks, happens=st.booleans())
    def abort(self, pick: int, happens: bool) -> None:
        if happens:
            known = self.live[pick % len(self.live)]
            self.take_aborts([known], [self.scheduler.abort(known.request.request_id)])

    @rule(happens=seldom)
    def abort_all(self, happens: bool) -> None:
        if happens:
            self.take_aborts(self.live, self.scheduler.abort_all())

    @precondition(lambda self: all(known.ended for known in self.in_flight))
    @rule()
    def schedule(self) -> None:
        num_preemptions = self.scheduler.num_preemptions
        self.plan = self.scheduler.schedule()
        assert (self.plan is None) == (not self.live), "the oldest request must move on in every step"
        num_running = self.scheduler.num_running
        preempted = [known for known in self.live[num_running:] if known.num_computed > 0]
        assert self.scheduler.num_preemptions - num_preemptions == len(preempted)
        for known in preempted:
            known.num_computed = 0
        if self.plan is None:
            self.in_flight = []
            return
        assert self.plan.step > self.last_step
        self.last_step = self.plan.step
        self.in_flight = self.live[: len(self.plan.chunks)]
        for known, chunk in zip(self.in_flight, self.plan.chunks, strict=True):
            self.check_chunk(known, chunk)
            if not known.was_admitted:
                known.was_admitted = True
                known.num_cached = chunk.start
        assert sum(len(chunk.token_ids) for chunk in self.plan.chunks) <= self.config.max_num_batched_tokens
        assert len(self.plan.chunks) <= num_running <= self.config.max_num_seqs

    @precondition(lambda self: self.plan is not None)
    @rule()
    def commit(self) -> None:
        assert self.plan is not None
        result = self.execute(self.plan)
        expected = [
            known
            for known, chunk in zip(self.in_flight, self.plan.chunks, strict=True)
            if chunk.sample and not known.ended
        ]
        updates = self.scheduler.commit(self.plan, result)
        for known, chunk in zip(self.in_flight, self.plan.chunks, strict=True):
            known.num_computed = chunk.start + len(chunk.token_ids)
        for known, update in zip(expected, updates, strict=True):
            self.take_update(known, update)
        self.plan, self.in_flight = None, []

    @precondition(lambda self: self.plan is not None)
    @rule(happens=seldom, ends_all=st.booleans())
    def fail(self, happens: bool, ends_all: bool) -> None:
        """The step fails after it wrote garbage into its slots."""
        if not happens:
            return
        assert self.plan is not None
        for chunk in self.plan.chunks:
            for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
                self.cache[self.slot(chunk, position)] = ("garbage", ())
        if ends_all:
            self.abort_all(happens=True)
        else:
            still_live = [known for known in self.in_flight if not known.ended]
            self.take_aborts(still_live, self.scheduler.abort_step())
        self.plan, self.in_flight = None, []

    @precondition(lambda self: all(known.ended for known in self.in_flight))
    @rule(num_steps=st.integers(2, 8))
    def run(self, num_steps: int) -> None:
        """Run several whole steps, so that few rules make a long history."""
        for _ in range(num_steps):
            self.schedule()
            self.check_bookkeeping()
            if self.plan is not None:
                self.commit()
                self.check_bookkeeping()

    @invariant()
    def check_bookkeeping(self) -> None:
        self.scheduler.check_invariants()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.has_work == bool(self.live)
        if not self.live:
            assert self.scheduler.num_free_blocks == self.config.num_blocks

    def teardown(self) -> None:
        """Every request that is not aborted finishes with the output it would have had alone."""
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.commit()
        for _ in range(len(self.live) * self.config.max_model_len):  # the oldest gains a token in each step
            if self.live:
                self.schedule()
                self.commit()
        assert not self.live, "requests did not finish"
        self.check_bookkeeping()
        for known in self.past:
            self.check_output(known)

    # Checks

    def slot(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.block_ids[position // self.config.block_size], position % self.config.block_size

    def check_chunk(self, known: Expected, chunk: Chunk) -> None:
        """Check that a chunk is what its request needs next."""
        request, end = known.request, chunk.start + len(chunk.token_ids)
        assert chunk.token_ids
        assert chunk.token_ids == known.tokens[chunk.start : end]
        if known.num_computed > 0:
            assert chunk.start == known.num_computed
        elif chunk.start > 0:
            assert chunk.start % self.config.block_size == 0
            assert self.config.enable_prefix_caching
            assert not known.needs_prompt_rows
        assert len(chunk.block_ids) == -(-end // self.config.block_size)
        assert len(set(chunk.block_ids)) == len(chunk.block_ids)
        assert chunk.prompt_targets == (known.tokens[chunk.start + 1 : end + 1] if known.needs_prompt_rows else [])
        assert chunk.num_prompt_logprobs == (request.params.prompt_logprobs if known.needs_prompt_rows else None)
        looks_back = request.params.has_penalties
        spec = SampleSpec(
            params=request.params,
            seed=request.seed,
            position=known.num_output,
            barred_token_ids=barred_at(request, known.num_output),
            prompt_token_ids=request.prompt_token_ids if looks_back else [],
            output_token_ids=known.tokens[len(request.prompt_token_ids) :] if looks_back else [],
        )
        assert chunk.sample == (spec if end == len(known.tokens) else None)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step on the model's cache, including requests that were aborted after it was planned.

        Sharing a block too early, or with another prefix, shows as a wrong slot before or after the step's writes.
        """
        pairs = list(zip(self.in_flight, plan.chunks, strict=True))
        for known, chunk in pairs:
            for position in range(chunk.start):
                assert self.cache.get(self.slot(chunk, position)) == known.contents(position), "attends before"
        for known, chunk in pairs:
            for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
                self.cache[self.slot(chunk, position)] = known.contents(position)
        for known, chunk in pairs:
            for position in range(chunk.start + len(chunk.token_ids)):
                assert self.cache[self.slot(chunk, position)] == known.contents(position), "overwritten in the step"
        return StepResult(step=plan.step, chunks=[self.result_of(chunk) for chunk in plan.chunks])

    def result_of(self, chunk: Chunk) -> ChunkResult:
        rows = [prompt_row(target, chunk.start + row) for row, target in enumerate(chunk.prompt_targets)]
        if chunk.sample is None:
            return ChunkResult(prompt_logprobs=rows)
        spec = chunk.sample
        token_id = choose(spec.seed, spec.position, spec.barred_token_ids)
        logprobs = None if spec.params.logprobs is None else prompt_row(token_id, spec.position)
        return ChunkResult(token_id=token_id, logprobs=logprobs, prompt_logprobs=rows)

    def take_update(self, known: Expected, update: RequestUpdate) -> None:
        assert not known.ended, "a request ended twice"
        assert update.request_id == known.request.request_id
        assert update.num_cached_tokens == known.num_cached
        known.updates.append(update)
        known.tokens += update.token_ids
        if known.ended:
            self.live.remove(known)
            self.past.append(known)

    def take_aborts(self, aborted: list[Expected], updates: Sequence[RequestUpdate | None]) -> None:
        for known, update in zip(list(aborted), updates, strict=True):
            assert update is not None
            assert update.finish_reason == "abort"
            self.take_update(known, update)

    def check_output(self, known: Expected) -> None:
        """Check all updates of a request together."""
        request, updates = known.request, known.updates
        assert [update.finish_reason is None for update in updates] == [True] * (len(updates) - 1) + [False]
        output = [token_id for update in updates for token_id in update.token_ids]
        tokens, finish_reason, stop_reason = whole_output(request, self.config.max_model_len)
        if updates[-1].finish_reason == "abort":
            assert output == tokens[: len(output)]
            assert len(output) < len(tokens)
        else:
            assert output == tokens
            assert (updates[-1].finish_reason, updates[-1].stop_reason) == (finish_reason, stop_reason)
        logprobs = [row for update in updates for row in update.logprobs]
        assert logprobs == ([] if request.params.logprobs is None else [prompt_row(t, p) for p, t in enumerate(output)])
        given = [update.prompt_logprobs for update in updates if update.token_ids]
        if given:
            targets = [] if request.params.prompt_logprobs is None else request.prompt_token_ids[1:]
            assert given[0] == [prompt_row(target, position) for position, target in enumerate(targets)]
            assert not any(given[1:])


BlockPoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
test_block_pool_histories = BlockPoolMachine.TestCase
test_scheduler_histories = SchedulerMachine.TestCase
