"""Decides which tokens of which requests run in each step. Knows token counts and block ids, never tensors.

Requests are served in the order they came. The running ones are always the oldest: a request is admitted only after
all before it, and the newest running one is the first to make room. So the oldest request moves on in every step,
and none waits for ever.
"""

from __future__ import annotations

from collections import OrderedDict

from moeserve.errors import RequestError
from moeserve.protocol import Chunk, ChunkResult, Request, RequestUpdate, StepPlan, StepResult
from moeserve.scheduling.block_pool import BlockPool, num_blocks_for, root_digest
from moeserve.scheduling.request import LiveRequest


class Scheduler:
    """Continuous batching of prompts in pieces and of single tokens, over one budget of tokens per step.

    `schedule` and `commit` alternate. A plan that was scheduled and could not be run is given up with `abort_step`
    or `abort_all`.
    Everything it decides follows from the calls made so far: no clock, no randomness.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        cache_salt: bytes,
    ) -> None:
        """
        Args:
            num_blocks: blocks of KV cache, enough for one request of `max_model_len` tokens.
            cache_salt: secret of this engine, mixed into every digest of the prefix cache.
        """
        assert num_blocks * block_size >= max_model_len, f"{num_blocks} blocks cannot hold {max_model_len} tokens"
        assert max_num_seqs >= 1, max_num_seqs
        assert max_num_batched_tokens >= 1, max_num_batched_tokens
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.num_preemptions = 0
        self._cache_salt = cache_salt
        self._pool = BlockPool(num_blocks)
        # Both in order of arrival, and all that run came before all that wait.
        self._running: dict[str, LiveRequest] = {}
        self._waiting: OrderedDict[str, LiveRequest] = OrderedDict()
        self._num_arrived = 0
        self._step = 0
        self._in_flight: dict[LiveRequest, int] = {}  # requests of the plan not yet committed, and their tokens in it

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def live_request_ids(self) -> list[str]:
        """Requests that have not ended, in the order they came."""
        return [*self._running, *self._waiting]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds. They may still serve the prefix cache."""
        return self._pool.num_free

    def add(self, request: Request) -> None:
        """Queues a request behind all others. Once it is accepted it can finish, whatever else comes.

        Raises:
            RequestError: the prompt is empty or too long, or the request id is in use. Nothing has changed.
        """
        name, num_tokens = f"request {request.request_id!r}", len(request.prompt_token_ids)
        if request.request_id in self._running or request.request_id in self._waiting:
            raise RequestError(f"{name} is still being served; give each request an id of its own")
        if num_tokens == 0:
            raise RequestError(f"{name}: the prompt has no tokens; it must have at least one")
        if num_tokens >= self.max_model_len:
            raise RequestError(
                f"{name}: the prompt has {num_tokens} tokens; with max_model_len={self.max_model_len} at most "
                f"{self.max_model_len - 1} fit, because one must be left for the output. Shorten the prompt"
            )
        root = root_digest(self._cache_salt, request.cache_salt)
        self._waiting[request.request_id] = LiveRequest(request, self._num_arrived, root)
        self._num_arrived += 1

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Ends a request and frees its blocks at once. None if there is no such request, or no longer.

        May come between `schedule` and `commit`: its blocks are not handed out before the next `schedule`, and what
        the step gives for it is dropped.
        """
        request = self._running.get(request_id) or self._waiting.get(request_id)
        if request is None:
            return None
        self._end(request)
        return RequestUpdate(
            request_id=request_id, finish_reason="abort", num_cached_tokens=request.num_cached_tokens or 0
        )

    def abort_all(self) -> list[RequestUpdate]:
        """Ends every request. After a failed step this is all there is to do: nothing of that step is kept."""
        return [update for request_id in self.live_request_ids if (update := self.abort(request_id)) is not None]

    def abort_step(self) -> list[RequestUpdate]:
        """Ends the requests of the plan not yet committed, and only these. Nothing of that step is kept."""
        in_flight, self._in_flight = self._in_flight, {}
        still_live = [request.request_id for request in in_flight if not request.ended]
        return [update for request_id in still_live if (update := self.abort(request_id)) is not None]

    def schedule(self) -> StepPlan | None:
        """Plans the next step and takes the blocks it needs. None if there is no request.

        The chunks are those of the oldest requests, in order of arrival, one each.
        """
        assert all(request.ended for request in self._in_flight), f"step {self._step} is neither committed nor aborted"
        planned: dict[LiveRequest, int] = {}
        num_preemptions_before = self.num_preemptions
        budget = self._continue_running(planned, self.max_num_batched_tokens)
        if self.num_preemptions == num_preemptions_before:
            self._admit_waiting(planned, budget)
        if not planned:
            assert not self.has_work, "requests are there, but none of them can run"
            return None
        self._step += 1
        self._in_flight = planned
        return StepPlan(step=self._step, chunks=[request.next_chunk(num) for request, num in planned.items()])

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Takes in what a step gave. Returns the new tokens and the ends; a prompt half computed is no news."""
        assert plan.step == result.step == self._step, f"step {self._step}: got plan {plan.step}, result {result.step}"
        assert len(plan.chunks) == len(result.chunks) == len(self._in_flight), f"step {plan.step}: chunks are missing"
        in_flight, self._in_flight = self._in_flight, {}
        updates = []
        for request, chunk, given in zip(in_flight, plan.chunks, result.chunks, strict=True):
            if request.ended:  # aborted meanwhile
                continue
            update = self._take_in(request, chunk, given)
            if update is not None:
                updates.append(update)
        return updates

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance. For tests and debugging: visits every block."""
        live = [*self._running.values(), *self._waiting.values()]
        arrivals = [request.arrival for request in live]
        assert arrivals == sorted(set(arrivals)), "requests are not in order of arrival"
        assert len(self._running) <= self.max_num_seqs, f"{len(self._running)} requests run"
        assert not any(request.ended for request in live), "a request that ended is still there"
        for request in self._running.values():
            num_tokens = request.num_computed + self._in_flight.get(request, 0)
            assert num_tokens <= len(request.token_ids) < self.max_model_len, request
            assert len(request.block_ids) == num_blocks_for(num_tokens, self.block_size), request
        for request in self._waiting.values():
            assert request.num_computed == len(request.block_ids) == 0, request
        self._pool.check_invariants(block_id for request in live for block_id in request.block_ids)

    def _continue_running(self, planned: dict[LiveRequest, int], budget: int) -> int:
        """Plans the running requests, oldest first. Returns what is left of the budget."""
        for request in list(self._running.values()):
            num_tokens = min(request.num_uncomputed, budget)
            if num_tokens == 0 or not self._make_room(request, num_tokens):
                break
            self._plan(request, num_tokens, planned)
            budget -= num_tokens
        return budget

    def _make_room(self, request: LiveRequest, num_tokens: int) -> bool:
        """Preempts the newest running requests until `request` can grow. False if it had to go itself.

        Those planned in this step are older than `request`, so none of them is ever taken back.
        """
        while request.request_id in self._running:
            if self._num_new_blocks(request, num_tokens) <= self._pool.num_free:
                return True
            self._preempt_newest()
        return False

    def _preempt_newest(self) -> None:
        """Sends the newest running request back to the head of the queue, to be computed again from its start."""
        request_id, request = self._running.popitem()
        self._waiting[request_id] = request
        self._waiting.move_to_end(request_id, last=False)
        self._pool.release(request.block_ids)
        request.forget_computed()
        self.num_preemptions += 1

    def _admit_waiting(self, planned: dict[LiveRequest, int], budget: int) -> None:
        """Lets waiting requests run, oldest first, until the first that does not fit."""
        while self._waiting and budget > 0 and len(self._running) < self.max_num_seqs:
            request = next(iter(self._waiting.values()))
            prefix = self._cached_prefix(request)
            if not self._has_room(request, prefix):
                return
            self._running[request.request_id] = self._waiting.pop(request.request_id)
            self._pool.share(prefix)
            request.block_ids = prefix
            request.num_computed = len(prefix) * self.block_size
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed
            num_tokens = min(request.num_uncomputed, budget)
            self._plan(request, num_tokens, planned)
            budget -= num_tokens

    def _cached_prefix(self, request: LiveRequest) -> list[int]:
        """The longest run of cached blocks that a request begins with. Its last token is always left to compute."""
        prefix: list[int] = []
        if not self.enable_prefix_caching or request.needs_every_prompt_row:
            return prefix
        for index in range((len(request.token_ids) - 1) // self.block_size):
            block_id = self._pool.find(request.digest(index, self.block_size))
            if block_id is None:
                break
            prefix.append(block_id)
        return prefix

    def _has_room(self, request: LiveRequest, prefix: list[int]) -> bool:
        """Whether all known tokens of a request fit, with one more block left for each that runs already.

        Asking for the first chunk alone would admit long prompts only to preempt them half computed. Whoever runs
        alone may take everything, so no request is kept out for ever.
        """
        num_shared = sum(not self._pool.is_free(block_id) for block_id in prefix)
        num_taken = num_blocks_for(len(request.token_ids), self.block_size) - num_shared
        return num_taken + len(self._running) <= self._pool.num_free

    def _plan(self, request: LiveRequest, num_tokens: int, planned: dict[LiveRequest, int]) -> None:
        if num_new := self._num_new_blocks(request, num_tokens):
            request.block_ids = [*request.block_ids, *self._pool.allocate(num_new)]
        planned[request] = num_tokens

    def _num_new_blocks(self, request: LiveRequest, num_tokens: int) -> int:
        return num_blocks_for(request.num_computed + num_tokens, self.block_size) - len(request.block_ids)

    def _take_in(self, request: LiveRequest, chunk: Chunk, given: ChunkResult) -> RequestUpdate | None:
        """Applies what one chunk gave. Only now are its keys and values known to be there, for others to share."""
        assert (chunk.sample is None) == (given.token_id is None), f"{request.request_id}: token {given}"
        assert len(given.prompt_logprobs) == len(chunk.prompt_targets), f"{request.request_id}: rows are missing"
        first_block = request.num_computed // self.block_size
        request.num_computed += len(chunk.token_ids)
        if self.enable_prefix_caching:
            for index in range(first_block, request.num_computed // self.block_size):
                self._pool.register(request.block_ids[index], request.digest(index, self.block_size))
        request.collect_prompt_logprobs(given.prompt_logprobs)
        if given.token_id is None:
            return None
        update = request.append(given.token_id, given.logprobs, self.max_model_len)
        if update.finish_reason is not None:
            self._end(request)
        return update

    def _end(self, request: LiveRequest) -> None:
        queue = self._running if request.request_id in self._running else self._waiting
        del queue[request.request_id]
        self._pool.release(request.block_ids)
        request.ended = True
