"""Continuous batching: decides which tokens of which requests run in each step, and which KV cache blocks they use.

Requests are served in order of arrival. The running ones are always the oldest: a request is admitted only after all
before it, and the newest running one is preempted first. So the oldest request advances in every step, and no request
waits forever.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from moeserve.errors import RequestError
from moeserve.protocol import Chunk, ChunkResult, Request, RequestUpdate, StepPlan, StepResult
from moeserve.scheduling.block_pool import BlockPool, num_blocks_for, root_digest
from moeserve.scheduling.request import LiveRequest


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The limits of one replica's scheduling."""

    num_blocks: int  # of KV cache, enough for one request of `max_model_len` tokens
    block_size: int  # tokens
    max_num_seqs: int  # requests that run at once
    max_num_batched_tokens: int  # of one step
    max_model_len: int  # tokens of a request, prompt and output together
    enable_prefix_caching: bool


class Scheduler:
    """Prompts in chunks and single decode tokens, within one token budget per step.

    `schedule` and `commit` alternate. If a planned step could not be run, call `abort_step` or `abort_all` instead of
    `commit`. All decisions follow from the calls made so far; there is no clock and no randomness.
    """

    def __init__(self, config: SchedulerConfig, cache_salt: bytes) -> None:
        """
        Args:
            cache_salt: secret of this engine, mixed into every digest of the prefix cache.
        """
        assert config.num_blocks * config.block_size >= config.max_model_len, config
        assert config.max_num_seqs >= 1, config
        assert config.max_num_batched_tokens >= 1, config
        self.config = config
        self.num_preemptions = 0
        self._cache_salt = cache_salt
        self._pool = BlockPool(config.num_blocks)
        # Both in order of arrival. All running requests came before all waiting ones.
        self._running: dict[str, LiveRequest] = {}
        self._waiting: OrderedDict[str, LiveRequest] = OrderedDict()
        self._num_arrived = 0
        self._step = 0
        self._in_flight: dict[LiveRequest, int] = {}  # tokens by request, in the plan not yet committed

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def live_request_ids(self) -> list[str]:
        """Requests that have not ended, in order of arrival."""
        return [*self._running, *self._waiting]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, including those kept for the prefix cache."""
        return self._pool.num_free

    def add(self, request: Request) -> None:
        """Queue a request behind all others. An accepted request can always finish.

        Raises:
            RequestError: the prompt is empty or too long, or the request id is in use. Nothing has changed.
        """
        name, num_tokens = f"request {request.request_id!r}", len(request.prompt_token_ids)
        if request.request_id in self._running or request.request_id in self._waiting:
            raise RequestError(f"{name} is still being served; give each request an id of its own")
        if num_tokens == 0:
            raise RequestError(f"{name}: the prompt has no tokens; it must have at least one")
        if num_tokens >= self.config.max_model_len:
            raise RequestError(
                f"{name}: the prompt has {num_tokens} tokens; with max_model_len={self.config.max_model_len} at most "
                f"{self.config.max_model_len - 1} fit, because one must be left for the output. Shorten the prompt"
            )
        root = root_digest(self._cache_salt, request.cache_salt)
        self._waiting[request.request_id] = LiveRequest(request, self._num_arrived, root)
        self._num_arrived += 1

    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request and free its blocks. Return None if there is no such request.

        This may be called between `schedule` and `commit`: the blocks are not allocated again before the next
        `schedule`, and the step's result for this request is dropped.
        """
        request = self._running.get(request_id) or self._waiting.get(request_id)
        if request is None:
            return None
        self._end(request)
        return RequestUpdate(
            request_id=request_id, finish_reason="abort", num_cached_tokens=request.num_cached_tokens or 0
        )

    def abort_all(self) -> list[RequestUpdate]:
        """End every request. Nothing of a step in flight is kept."""
        return [update for request_id in self.live_request_ids if (update := self.abort(request_id)) is not None]

    def abort_step(self) -> list[RequestUpdate]:
        """End the requests of the step in flight, and no others. Nothing of that step is kept."""
        in_flight, self._in_flight = self._in_flight, {}
        still_live = [request.request_id for request in in_flight if not request.ended]
        return [update for request_id in still_live if (update := self.abort(request_id)) is not None]

    def schedule(self) -> StepPlan | None:
        """Plan the next step and allocate the blocks it needs. Return None if there are no requests.

        The plan has one chunk for each of the oldest requests, in order of arrival.
        """
        assert all(request.ended for request in self._in_flight), f"step {self._step} is neither committed nor aborted"
        planned: dict[LiveRequest, int] = {}
        num_preemptions_before = self.num_preemptions
        budget = self._continue_running(planned, self.config.max_num_batched_tokens)
        if self.num_preemptions == num_preemptions_before:
            self._admit_waiting(planned, budget)
        if not planned:
            assert not self.has_work, "there are requests, but none of them can run"
            return None
        self._step += 1
        self._in_flight = planned
        return StepPlan(step=self._step, chunks=[request.next_chunk(num) for request, num in planned.items()])

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply the result of a step. Return the new tokens and ends; a partly computed prompt has no update."""
        assert plan.step == result.step == self._step, f"step {self._step}: got plan {plan.step}, result {result.step}"
        assert len(plan.chunks) == len(result.chunks) == len(self._in_flight), f"step {plan.step}: chunks are missing"
        in_flight, self._in_flight = self._in_flight, {}
        updates = []
        for request, chunk, chunk_result in zip(in_flight, plan.chunks, result.chunks, strict=True):
            if request.ended:  # aborted meanwhile
                continue
            update = self._commit_chunk(request, chunk, chunk_result)
            if update is not None:
                updates.append(update)
        return updates

    def check_invariants(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent. For tests and debugging: visits every block."""
        live = [*self._running.values(), *self._waiting.values()]
        arrivals = [request.arrival for request in live]
        assert arrivals == sorted(set(arrivals)), "requests are not in order of arrival"
        assert len(self._running) <= self.config.max_num_seqs, f"{len(self._running)} requests run"
        assert not any(request.ended for request in live), "a request that ended is still queued"
        for request in self._running.values():
            num_tokens = request.num_computed + self._in_flight.get(request, 0)
            assert num_tokens <= len(request.token_ids) < self.config.max_model_len, request
            assert len(request.block_ids) == num_blocks_for(num_tokens, self.config.block_size), request
        for request in self._waiting.values():
            assert request.num_computed == len(request.block_ids) == 0, request
        self._pool.check_invariants(block_id for request in live for block_id in request.block_ids)

    def _continue_running(self, planned: dict[LiveRequest, int], budget: int) -> int:
        """Plan the running requests, oldest first. Return the rest of the budget."""
        for request in list(self._running.values()):
            num_tokens = min(request.num_uncomputed, budget)
            if num_tokens == 0 or not self._make_room(request, num_tokens):
                break
            self._plan(request, num_tokens, planned)
            budget -= num_tokens
        return budget

    def _make_room(self, request: LiveRequest, num_tokens: int) -> bool:
        """Preempt the newest running requests until `request` can grow. Return False if it was preempted itself.

        Requests planned in this step are older than `request`, so none of them is preempted.
        """
        while request.request_id in self._running:
            if self._num_new_blocks(request, num_tokens) <= self._pool.num_free:
                return True
            self._preempt_newest()
        return False

    def _preempt_newest(self) -> None:
        """Return the newest running request to the head of the queue, to be computed again from its start."""
        request_id, request = self._running.popitem()
        self._waiting[request_id] = request
        self._waiting.move_to_end(request_id, last=False)
        self._pool.release(request.block_ids)
        request.reset_computed()
        self.num_preemptions += 1

    def _admit_waiting(self, planned: dict[LiveRequest, int], budget: int) -> None:
        """Admit waiting requests, oldest first, until one does not fit."""
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = next(iter(self._waiting.values()))
            prefix = self._cached_prefix(request)
            if not self._has_room(request, prefix):
                return
            self._running[request.request_id] = self._waiting.pop(request.request_id)
            self._pool.share(prefix)
            request.block_ids = prefix
            request.num_computed = len(prefix) * self.config.block_size
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed
            num_tokens = min(request.num_uncomputed, budget)
            self._plan(request, num_tokens, planned)
            budget -= num_tokens

    def _cached_prefix(self, request: LiveRequest) -> list[int]:
        """Return the longest run of cached blocks that a request begins with. Its last token is always computed."""
        prefix: list[int] = []
        if not self.config.enable_prefix_caching or request.needs_every_prompt_row:
            return prefix
        for index in range((len(request.token_ids) - 1) // self.config.block_size):
            block_id = self._pool.find(request.digest(index, self.config.block_size))
            if block_id is None:
                break
            prefix.append(block_id)
        return prefix

    def _has_room(self, request: LiveRequest, prefix: list[int]) -> bool:
        """True if all known tokens of a request fit, leaving one block for each running request to grow.

        Checking the first chunk alone would admit long prompts only to preempt them half computed. A request that
        would run alone may take all blocks, so every request is admitted eventually.
        """
        num_shared = sum(not self._pool.is_free(block_id) for block_id in prefix)
        num_taken = num_blocks_for(len(request.token_ids), self.config.block_size) - num_shared
        return num_taken + len(self._running) <= self._pool.num_free

    def _plan(self, request: LiveRequest, num_tokens: int, planned: dict[LiveRequest, int]) -> None:
        if num_new := self._num_new_blocks(request, num_tokens):
            request.block_ids = [*request.block_ids, *self._pool.allocate(num_new)]
        planned[request] = num_tokens

    def _num_new_blocks(self, request: LiveRequest, num_tokens: int) -> int:
        return num_blocks_for(request.num_computed + num_tokens, self.config.block_size) - len(request.block_ids)

    def _commit_chunk(self, request: LiveRequest, chunk: Chunk, result: ChunkResult) -> RequestUpdate | None:
        """Apply the result of one chunk. Only now do its keys and values exist, so only now can others share them."""
        assert (chunk.sample is None) == (result.token_id is None), f"{request.request_id}: token {result}"
        assert len(result.prompt_logprobs) == len(chunk.prompt_targets), f"{request.request_id}: rows are missing"
        first_block = request.num_computed // self.config.block_size
        request.num_computed += len(chunk.token_ids)
        if self.config.enable_prefix_caching:
            for index in range(first_block, request.num_computed // self.config.block_size):
                self._pool.register(request.block_ids[index], request.digest(index, self.config.block_size))
        request.collect_prompt_logprobs(result.prompt_logprobs)
        if result.token_id is None:
            return None
        update = request.append(result.token_id, result.logprobs, self.config.max_model_len)
        if update.finish_reason is not None:
            self._end(request)
        return update

    def _end(self, request: LiveRequest) -> None:
        queue = self._running if request.request_id in self._running else self._waiting
        del queue[request.request_id]
        self._pool.release(request.block_ids)
        request.ended = True
