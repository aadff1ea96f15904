"""Continuous batching: the choice of the tokens that run in each step, and of their KV cache blocks.

Requests are admitted in order of arrival, with one exception: if a request does not fit yet, a bounded number of later
requests may be admitted before it. The newest running request is preempted first. The oldest request therefore always
advances, and no request waits forever.

Several plans may be in flight: `schedule` may be called again before the result of the last plan is committed. Ranks
run plans in order, so a plan may continue a request after a token that an earlier plan will sample. A block is
allocated to another request only after all plans that use it for its previous owner have been committed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.errors import RequestError
from moeserve.kv.connector import HostTier, KVConnector
from moeserve.kv.manager import CacheManager, ChunkItems, NewBlocks, Prefix, ToStore
from moeserve.kv.pool import root_digest
from moeserve.kv.transfers import BlockTransfers
from moeserve.protocol import (
    ChunkResult,
    RankReport,
    Registration,
    Request,
    RequestUpdate,
    SpeculationTotals,
    StepPlan,
    StepResult,
    Transfer,
    TransferOutcome,
)
from moeserve.scheduling.rank_state import ExpectedState, check_reports
from moeserve.scheduling.request import NO_SLOT, LiveRequest
from moeserve.scheduling.scheduler_config import SchedulerConfig

# Maximum number of later requests that may be admitted before a request that does not fit into the KV cache yet.
MAX_PASSED = 64
# A prompt is long while its remaining tokens would take more than this number of steps if it ran alone.
STEPS_OF_LONG_PROMPT = 4


@dataclass(frozen=True)
class _PlannedChunk:
    """A chunk of a plan in flight."""

    request: LiveRequest
    num_tokens: int  # number of tokens without drafts
    num_drafts: int
    samples: bool
    num_prompt_rows: int  # number of prompt tokens whose log-probabilities it returns
    num_known: int  # number of the request's tokens that ranks have after this plan
    items: ChunkItems

    def expected_state(self) -> ExpectedState:
        """Return the state that ranks have after the plan, once its result is committed."""
        request = self.request
        token_ids = request.token_ids[: self.num_known]
        block_ids = [block_id for table in request.cache.tables for block_id in table[: self.items.num_blocks]]
        return ExpectedState(request.request_id, request.slot, token_ids, block_ids)


@dataclass
class _Budget:
    """The tokens that are left in a step."""

    num_tokens: int
    num_prefill_tokens: int  # tokens left for chunks of several tokens
    num_wanted: int = 0  # tokens of prompts that have no chunk in the step yet

    @property
    def num_left_for_prompts(self) -> int:
        return min(self.num_tokens, self.num_prefill_tokens)

    def most_for(self, request: LiveRequest) -> int:
        """Return the maximum number of tokens that the request may compute in this step.

        A long prompt leaves up to half of the prefill tokens to the prompts behind it, so that short prompts need not
        wait until it ends. Other prompts run one after the other, so that on average they end sooner than if they
        shared the step.
        """
        if not request.is_prefilling:
            return min(request.num_unplanned, self.num_tokens)
        num_left = self.num_left_for_prompts
        if request.num_unplanned <= STEPS_OF_LONG_PROMPT * num_left:
            return min(request.num_unplanned, num_left)
        wanted_behind = max(self.num_wanted - request.num_unplanned, 0)
        return num_left - min(num_left // 2, wanted_behind)

    def take(self, request: LiveRequest, num_tokens: int) -> None:
        """Subtract the tokens of a request's chunk from the budget."""
        self.num_tokens -= num_tokens
        if request.is_prefilling:
            self.num_prefill_tokens -= num_tokens
            self.num_wanted -= request.num_unplanned


class Scheduler:
    """The scheduler of one replica, which plans chunks of prompts and decode tokens within a token budget per step.

    Each plan that `schedule` returns must be ended by `commit` or `abort_step`, in the order of the plans. Decisions
    depend only on the calls so far, not on clocks or random numbers.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_salt: bytes,
        connector: KVConnector | None = None,
        peer_addresses: Sequence[str] = (),
    ) -> None:
        """
        Args:
            cache_salt: secret of this engine, mixed into every digest of the prefix cache.
            connector: connector of a store behind the KV cache; None: there is none.
            peer_addresses: address of each rank of this replica at which other engines can read blocks. Empty: blocks
                are not exchanged with other engines.
        """
        assert config.num_blocks * config.block_size >= config.max_model_len, config
        assert config.max_num_seqs >= 1, config
        assert config.max_num_batched_tokens >= 1, config
        self.config = config
        self.num_preemptions = 0
        self.speculation = SpeculationTotals()
        self._cache_salt = cache_salt
        self._caches = CacheManager(config)
        self._transfers: BlockTransfers | None = None
        if connector is not None or peer_addresses:
            store = HostTier({}) if connector is None else connector
            self._transfers = BlockTransfers(store, self._caches.pools, config.block_size, peer_addresses)
        self._running: dict[str, LiveRequest] = {}  # in order of admission
        self._waiting: OrderedDict[str, LiveRequest] = OrderedDict()  # in order of arrival
        self._loading: dict[str, LiveRequest] = {}  # requests that wait for blocks from the store or another engine
        self._num_waiting_tokens = 0  # known tokens of waiting and loading requests
        self._prefilling: set[LiveRequest] = set()  # running requests with more than one unplanned token
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_arrived = 0
        self._step = 0
        self._plans: deque[list[_PlannedChunk]] = deque()  # in flight
        self._owner_of_prompt: dict[int, LiveRequest] = {}  # running requests, by the identity of their prompts
        self._ended_in_flight: set[LiveRequest] = set()  # ended requests whose blocks a plan in flight uses

    @property
    def has_work(self) -> bool:
        """True if a request has not ended."""
        return bool(self._running or self._waiting or self._loading)

    @property
    def num_plans(self) -> int:
        """Number of plans in flight."""
        return len(self._plans)

    @property
    def live_request_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return [*self._running, *self._waiting, *self._loading]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._loading)

    @property
    def num_decoding(self) -> int:
        """Number of running requests that are not prefilling."""
        return len(self._running) - len(self._prefilling)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of prompt tokens that are not in any plan yet. Some of them may be in the prefix cache."""
        return self._num_waiting_tokens + sum(request.num_unplanned for request in self._prefilling)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds, including those kept for the prefix cache."""
        return self._caches.num_free_blocks

    @property
    def transfers(self) -> BlockTransfers | None:
        """Transfers to and from the store behind the KV cache and other engines; None if there are neither."""
        return self._transfers

    def add(self, request: Request) -> None:
        """Append a request to the queue. An accepted request can always finish.

        Raises:
            RequestError: the prompt is empty or too long, or the request id is in use. Nothing has changed.
        """
        name, num_tokens = f"request {request.request_id!r}", len(request.prompt_token_ids)
        if self._find(request.request_id) is not None:
            raise RequestError(f"{name} is still being served; give each request an id of its own")
        if num_tokens == 0:
            raise RequestError(f"{name}: the prompt has no tokens; it must have at least one")
        if num_tokens + len(request.output_token_ids) >= self.config.max_model_len:
            raise RequestError(
                f"{name}: the prompt has {num_tokens} tokens; with max_model_len={self.config.max_model_len} at most "
                f"{self.config.max_model_len - 1} fit, because one must be left for the output. Shorten the prompt"
            )
        root = root_digest(self._cache_salt, request.cache_salt)
        self._waiting[request.request_id] = LiveRequest(request, self._num_arrived, self._caches.open(root))
        self._num_waiting_tokens += num_tokens + len(request.output_token_ids)
        self._num_arrived += 1

    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request and free its blocks. Return None if there is no such request."""
        request = self._find(request_id)
        return None if request is None else self._abort(request)

    def abort_all(self) -> list[RequestUpdate]:
        """End every request. Results of plans in flight must still be committed, and are dropped."""
        return [update for request_id in self.live_request_ids if (update := self.abort(request_id)) is not None]

    def schedule(self, prefill_budget: int | None = None) -> StepPlan | None:
        """Plan the next step and allocate the blocks it needs.

        Return None if no request can run now, because there are none or all wait for results of plans in flight.

        Args:
            prefill_budget: maximum number of tokens in chunks of several tokens, at least one and at most
                `max_prefill_tokens`. None: only `max_num_batched_tokens` limits prefills.
        """
        num_tokens = num_prefill_tokens = self.config.max_num_batched_tokens
        if prefill_budget is not None and self.config.max_prefill_tokens:
            num_prefill_tokens = min(prefill_budget, self.config.max_prefill_tokens)
        budget = _Budget(num_tokens, num_prefill_tokens)
        new_blocks: list[tuple[int, NewBlocks]] = []
        planned: list[tuple[LiveRequest, int]] = []
        num_preemptions = self.num_preemptions
        has_room = self._continue_running(planned, new_blocks, budget)
        drafts: dict[LiveRequest, list[int]] = {}
        if has_room and self.num_preemptions == num_preemptions:
            self._admit_waiting(planned, budget)
            self._extend_prompts(planned, new_blocks, budget)
            drafts = self._take_drafts(planned, new_blocks, budget)
        if not planned:
            is_stuck = self.has_work and not self._plans and not (self._transfers and self._transfers.are_in_flight)
            assert not is_stuck, "there are requests, but none of them can run"
            return None
        self._step += 1
        registrations = [self._registration(request) for request, _ in planned if not request.is_registered]
        unsent = [] if self.config.plans_ahead else self._unsent_tokens(planned)
        items = [
            self._caches.plan_chunk(request, num_tokens, len(drafts.get(request, ())))
            for request, num_tokens in planned
        ]
        plan = StepPlan(
            step=self._step,
            slots=[request.slot for request, _ in planned],
            starts=[request.num_planned for request, _ in planned],
            lengths=[num_tokens + len(drafts.get(request, ())) for request, num_tokens in planned],
            num_sampling=sum(num_tokens == request.num_unplanned for request, num_tokens in planned),
            registrations=registrations,
            cache=self._caches.changes(
                new_blocks, [(request.slot, each) for (request, _), each in zip(planned, items, strict=True)]
            ),
            new_tokens=unsent,
            drafts=[(request.slot, some) for request, some in drafts.items()],
        )
        chunks = [
            self._start_chunk(request, num_tokens, len(drafts.get(request, ())), each)
            for (request, num_tokens), each in zip(planned, items, strict=True)
        ]
        self._plans.append(chunks)
        return plan

    def commit(self, result: StepResult, reports: Sequence[RankReport] = ()) -> list[RequestUpdate]:
        """Apply the result of the oldest plan, and return updates with new tokens or the ends of requests.

        A partly computed prompt has no update.

        Args:
            reports: reports of the ranks after the step, to compare with the scheduler's state.

        Raises:
            RankStateError: a rank has another state of a request.
        """
        chunks = self._plans.popleft()
        step = self._step - len(self._plans)
        assert result.step == step, f"step {step}: got the result of step {result.step}"
        assert len(chunks) == len(result.chunks), f"step {step}: chunks are missing"
        updates, expected = [], []
        for chunk, chunk_result in zip(chunks, result.chunks, strict=True):
            is_kept = not chunk.request.ended and chunk_result.error is None
            self._finish_chunk(chunk, is_kept=is_kept)
            if not chunk.request.ended and (update := self._commit_chunk(chunk, chunk_result)) is not None:
                updates.append(update)
            expected.append(chunk.expected_state() if reports and is_kept else None)
        check_reports(step, expected, reports)
        return updates

    def take_transfers(self) -> list[Transfer]:
        """Return the transfers to start now. Each must be ended by `end_transfer`, in any order."""
        return [] if self._transfers is None else self._transfers.take_new()

    def end_transfer(self, outcome: TransferOutcome) -> None:
        """End a transfer. The request that waited for it can be admitted, with the blocks that were copied."""
        assert self._transfers is not None
        request = self._transfers.end(outcome)  # admission finds the copied blocks in the prefix cache
        if request is None:
            return
        if request.kv_source is None:
            self._drop_source(request)  # other outputs of its prompt find the items in the prefix cache
        if not request.ended:
            del self._loading[request.request_id]
            self._requeue(request)

    def abort_step(self) -> list[RequestUpdate]:
        """End only the requests of the oldest plan, whose step has failed. Its results are discarded."""
        chunks = self._plans.popleft()
        for chunk in chunks:
            self._finish_chunk(chunk, is_kept=False)
        still_live = [chunk.request.request_id for chunk in chunks if not chunk.request.ended]
        return [update for request_id in still_live if (update := self.abort(request_id)) is not None]

    def check_invariants(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent. For tests and debugging: visits every block."""
        live = [*self._running.values(), *self._waiting.values(), *self._loading.values()]
        waiting_arrivals = [request.arrival for request in self._waiting.values()]
        assert waiting_arrivals == sorted(set(waiting_arrivals)), "requests do not wait in order of arrival"
        assert len(self._running) <= self.config.max_num_seqs, f"{len(self._running)} requests run"
        assert not any(request.ended for request in live), "a request that ended is still queued"
        slots = [*self._free_slots, *(request.slot for request in self._running.values())]
        assert sorted(slots) == list(range(self.config.max_num_seqs)), f"slots are lost: {slots}"
        in_flight = [chunk for chunks in self._plans for chunk in chunks]
        for request in [*live, *self._ended_in_flight]:
            own = [chunk for chunk in in_flight if chunk.request is request]
            assert request.num_plans == len(own), request
            assert request.num_planned == request.num_computed + sum(chunk.num_tokens for chunk in own), request
            assert request.num_unknown == sum(chunk.samples for chunk in own), request
        for request in self._running.values():
            assert request.num_planned <= len(request.token_ids) + request.num_unknown <= self.config.max_model_len
        prefilling = {request for request in self._running.values() if request.is_prefilling}
        assert self._prefilling == prefilling, f"prefills are lost: {self._prefilling ^ prefilling}"
        unplanned = [*self._waiting.values(), *self._loading.values()]
        waiting_tokens = sum(len(request.token_ids) for request in unplanned)
        assert self._num_waiting_tokens == waiting_tokens, f"{self._num_waiting_tokens} are not {waiting_tokens} tokens"
        for request in self._waiting.values():
            assert request.num_planned == request.cache.num_blocks == 0, request
            assert request.slot == NO_SLOT, request
        holders = [*self._running.values(), *self._waiting.values(), *self._ended_in_flight]
        of_transfers = [] if self._transfers is None else self._transfers.held_places()
        self._caches.check_invariants(holders, of_transfers, [chunk.items for chunk in in_flight])

    def _continue_running(
        self, planned: list[tuple[LiveRequest, int]], new_blocks: list[tuple[int, NewBlocks]], budget: _Budget
    ) -> bool:
        """Plan the running requests, oldest first. Prompts leave one token for each decoding request.

        Return False if a request cannot grow now; newer requests may then not get blocks.
        """
        share = self._share_of_plan(len(self._running))
        ready = [request for request in self._running.values() if self._may_continue(request)][:share]
        prompts = [request.num_unplanned for request in ready if request in self._prefilling]
        most_for_prompts = max(budget.num_tokens - (len(ready) - len(prompts)), 1)
        budget.num_prefill_tokens = min(budget.num_prefill_tokens, most_for_prompts)
        budget.num_wanted = sum(prompts) + self._num_waiting_tokens
        for request in ready:
            if request.slot == NO_SLOT:  # preempted in this call
                continue
            num_tokens = budget.most_for(request)
            if num_tokens == 0:
                continue
            if not self._make_room(request, num_tokens):
                return False
            self._allocate(request, num_tokens, new_blocks)
            planned.append((request, num_tokens))
            budget.take(request, num_tokens)
        return True

    def _extend_prompts(
        self, planned: list[tuple[LiveRequest, int]], new_blocks: list[tuple[int, NewBlocks]], budget: _Budget
    ) -> None:
        """Extend planned prompts, oldest first, by tokens that they left to other requests and that were not used."""
        for index, (request, num_tokens) in enumerate(planned):
            num_more = min(request.num_unplanned - num_tokens, budget.num_left_for_prompts)
            if num_more <= 0 or not self._caches.fits(request, num_tokens + num_more):
                continue
            self._allocate(request, num_tokens + num_more, new_blocks)
            planned[index] = request, num_tokens + num_more
            budget.num_tokens -= num_more
            budget.num_prefill_tokens -= num_more

    def _allocate(self, request: LiveRequest, num_tokens: int, new_blocks: list[tuple[int, NewBlocks]]) -> None:
        """Allocate the blocks that a running request needs for its next tokens. Enough must be free."""
        added = self._caches.extend(request, num_tokens)
        if added and request.is_registered:  # else its registration has all of them
            new_blocks.append((request.slot, added))

    def _take_drafts(
        self, planned: list[tuple[LiveRequest, int]], new_blocks: list[tuple[int, NewBlocks]], budget: _Budget
    ) -> dict[LiveRequest, list[int]]:
        """Return the drafts of planned requests that fit into the remaining tokens and free blocks.

        Requests also get the blocks behind the drafts in which ranks compute the next drafts, if enough are free.
        """
        taken: dict[LiveRequest, list[int]] = {}
        num_ahead = self.config.num_lookahead_tokens
        for request, num_tokens in planned:
            has_drafts = bool(request.draft_token_ids) or num_ahead > 0
            if not has_drafts or num_tokens < request.num_unplanned:  # the second: the chunk does not sample
                continue
            num_following = max(request.num_left(self.config.max_model_len) - 1, 0)
            drafts: list[int] = []
            if request.is_registered:
                drafts = request.draft_token_ids[: min(budget.num_tokens, num_following)]
            if not self._caches.fits(request, num_tokens + len(drafts)):
                drafts = []
            num_computed = num_tokens + len(drafts)
            num_with_ahead = num_tokens + min(len(drafts) + num_ahead, num_following)
            if self._caches.fits(request, num_with_ahead):
                num_computed = num_with_ahead
            self._allocate(request, num_computed, new_blocks)
            if drafts:
                budget.num_tokens -= len(drafts)
                taken[request] = drafts
        return taken

    def _share_of_plan(self, num_requests: int) -> int:
        """Return the number of requests in one plan: an equal share of `num_requests` for each of `num_batches`."""
        return -(-num_requests // self.config.num_batches)

    def _unsent_tokens(self, planned: Sequence[tuple[LiveRequest, int]]) -> list[tuple[int, list[int]]]:
        """Return the slots of registered requests with the tokens that the ranks do not have yet."""
        registered = (request for request, _ in planned if request.is_registered)
        unsent = ((each.slot, each.token_ids[each.num_sent :]) for each in registered)
        return [(slot, token_ids) for slot, token_ids in unsent if token_ids]

    def _may_continue(self, request: LiveRequest) -> bool:
        """True if another token of the request can be planned now."""
        if request.num_unknown and (not self.config.plans_ahead or request.num_left(self.config.max_model_len) == 0):
            return False
        # A request that is not registered was dropped by the ranks. All its tokens must be known to register it again.
        return request.num_unplanned > 0 and (request.is_registered or request.num_plans == 0)

    def _make_room(self, request: LiveRequest, num_tokens: int) -> bool:
        """Preempt the newest running requests until `request` can grow. Return False if it cannot grow now.

        A request with plans in flight is not preempted, because its blocks are in use. It is not planned further, so
        that it can be preempted soon.
        """
        while not self._caches.fits(request, num_tokens):
            if self._ended_in_flight:  # the results of plans in flight will free their blocks
                return False
            if self._transfers and self._transfers.hold_blocks_alone:  # these blocks will be free soon
                return False
            newest = next(reversed(self._running.values()))
            if newest.num_plans:
                return False
            self._preempt(newest)
            if newest is request:
                return False
        return True

    def _preempt(self, request: LiveRequest) -> None:
        """Return a running request to its position in the queue. It will be computed again from the start."""
        del self._running[request.request_id]
        self._release(request)
        self._caches.clear(request)
        request.reset_computed()
        self._num_waiting_tokens += len(request.token_ids)
        self._requeue(request)
        self.num_preemptions += 1

    def _requeue(self, request: LiveRequest) -> None:
        """Insert a request into the queue by its order of arrival."""
        later = [other for other in self._waiting.values() if other.arrival > request.arrival]
        self._waiting[request.request_id] = request
        for other in later:
            self._waiting.move_to_end(other.request_id)

    def _admit_waiting(self, planned: list[tuple[LiveRequest, int]], budget: _Budget) -> None:
        """Admit waiting requests, oldest first. A bounded number may pass requests that do not fit yet."""
        passed: list[LiveRequest] = []
        share = self._share_of_plan(min(len(self._running) + len(self._waiting), self.config.max_num_seqs))
        num_promised = sum(map(self._caches.num_missing_blocks, self._prefilling))
        for request in list(self._waiting.values()):
            is_full = len(planned) >= share or len(self._running) + len(self._loading) >= self.config.max_num_seqs
            if is_full or budget.num_left_for_prompts == 0:
                return
            prefix = self._caches.find(request)
            self._caches.note_branch(request, prefix)
            # Check the whole prompt: with a check of only its first chunk, long prompts would be admitted and preempted
            # later. A request that would run alone may take all blocks, so every request is admitted eventually.
            if not self._caches.has_room(request, prefix, num_promised, len(self._running)):
                passed.append(request)
                if request.num_passed == MAX_PASSED or len(passed) == MAX_PASSED:
                    return
                continue
            if self._start_receive_or_load(request, prefix):
                continue
            for other in passed:
                other.num_passed += 1
            del self._waiting[request.request_id]
            self._num_waiting_tokens -= len(request.token_ids)
            self._running[request.request_id] = request
            self._prefilling.add(request)
            self._note_computed(self._caches.start(request, prefix))
            request.num_computed = request.num_planned = prefix.num_blocks * self.config.block_size
            request.slot = self._free_slots.pop()
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed
            num_tokens = budget.most_for(request)
            self._caches.extend(request, num_tokens)
            num_promised += self._caches.num_missing_blocks(request)
            planned.append((request, num_tokens))
            budget.take(request, num_tokens)
            if any(other.num_passed == MAX_PASSED for other in passed):
                return

    def _note_computed(self, items: ToStore) -> None:
        """Report computed items, given with their places, to the store behind the cache, if there is one."""
        if self._transfers is not None:
            self._transfers.note_computed(items)

    def _start_receive_or_load(self, request: LiveRequest, prefix: Prefix) -> bool:
        """Start to copy items behind a request's cached prefix from another engine or from the store.

        Return False if the request need not wait.
        """
        transfers = self._transfers
        if transfers is None:
            return False
        source = request.kv_source
        if source is not None and transfers.has_peers:
            if transfers.is_receiving(source.handle):  # for another output of the same prompt
                return True
            num_blocks = min(source.num_blocks, self._caches.most_cached_blocks(request))
            if prefix.num_blocks < num_blocks:
                keys = self._caches.items_of(request, num_blocks)
                # The source has all blocks of layers that keep all tokens. Of other layers, it has only what a request
                # needs to continue after the source's last block.
                can_use = num_blocks == source.num_blocks or len(keys) == num_blocks
                if can_use and transfers.fit(keys):
                    transfers.receive(request, keys)
                    self._begin_to_wait(request)
                    return True
            self._drop_source(request)
        if not request.may_load:
            return False
        loadable = self._caches.find(request, transfers.connector.has)
        self._caches.note_branch(request, loadable)
        keys = self._caches.items_of(request, loadable.num_blocks)
        if loadable.num_blocks <= prefix.num_blocks or not transfers.fit(keys) or not transfers.pays_to_load:
            return False
        request.may_load = False
        transfers.load(request, keys)
        self._begin_to_wait(request)
        return True

    def _drop_source(self, request: LiveRequest) -> None:
        """Free the blocks of a request's source, which no output of its prompt needs any more."""
        assert self._transfers is not None
        for other in self._waiting_for_source(request):
            other.kv_source = None
        if request.kv_source is not None:
            self._transfers.receive(request, [])

    def _leave_source(self, request: LiveRequest) -> None:
        """Free the blocks of an ended request's source, or cancel their transfer, unless other requests need them."""
        source, transfers = request.request.kv_source, self._transfers
        if source is None or transfers is None or not transfers.has_peers or self._waiting_for_source(request):
            return
        if transfers.is_receiving(source.handle):
            transfers.cancel_receive(source.handle)
        elif request.kv_source is not None:
            self._drop_source(request)

    def _waiting_for_source(self, request: LiveRequest) -> list[LiveRequest]:
        """Return the other waiting requests that have this request's original source."""
        source = request.request.kv_source
        return [
            other
            for other in self._waiting.values()
            if source is not None and other.kv_source == source and other is not request
        ]

    def _begin_to_wait(self, request: LiveRequest) -> None:
        """Move a request from the queue to those that wait for a transfer."""
        del self._waiting[request.request_id]
        self._loading[request.request_id] = request

    def _registration(self, request: LiveRequest) -> Registration:
        """Return the registration of a request. The prompt is not sent again while another sample of it is running."""
        owner = self._owner_of_prompt.setdefault(id(request.request.prompt_token_ids), request)
        return request.registration(self._caches.register(request), None if owner is request else owner.slot)

    def _start_chunk(self, request: LiveRequest, num_tokens: int, num_drafts: int, items: ChunkItems) -> _PlannedChunk:
        end = request.num_planned + num_tokens
        samples = num_tokens == request.num_unplanned
        needs_rows = request.needs_every_prompt_row and request.num_unknown == 0
        num_prompt_rows = num_tokens - samples if needs_rows else 0  # the last row predicts the sampled token
        request.is_registered = True
        request.num_sent = len(request.token_ids)
        request.num_planned = end
        request.num_unknown += samples
        request.num_plans += 1
        if not request.is_prefilling:
            self._prefilling.discard(request)
        num_known = len(request.token_ids) + (request.num_unknown if self.config.plans_ahead else 0)
        return _PlannedChunk(request, num_tokens, num_drafts, samples, num_prompt_rows, num_known, items)

    def _finish_chunk(self, chunk: _PlannedChunk, *, is_kept: bool) -> None:
        """Update the chunk's request after its plan has ended.

        Args:
            is_kept: False if the chunk was not computed.
        """
        request = chunk.request
        request.num_plans -= 1
        request.num_unknown -= chunk.samples
        self._note_computed(self._caches.end_chunk(request, chunk.items, request.num_computed, is_kept=is_kept))
        request.num_computed += chunk.num_tokens
        if request in self._ended_in_flight and request.num_plans == 0:
            self._ended_in_flight.discard(request)
            self._note_computed(self._caches.release(request))

    def _commit_chunk(self, chunk: _PlannedChunk, result: ChunkResult) -> RequestUpdate | None:
        """Apply the result of one chunk, whose keys and values exist from now on and can be shared."""
        request = chunk.request
        if result.error is not None:
            return self._abort(request, error=result.error)
        most_tokens = 1 + chunk.num_drafts if chunk.samples else 0
        assert min(1, most_tokens) <= len(result.token_ids) <= most_tokens, f"{request.request_id}: tokens {result}"
        num_rows = sum(rows.num_rows for rows in result.prompt_logprobs)
        assert num_rows == chunk.num_prompt_rows, f"{request.request_id}: rows are missing"
        request.collect_prompt_logprobs(result.prompt_logprobs)
        start = request.num_computed - chunk.num_tokens
        update = self._append_tokens(chunk, result) if chunk.samples else None
        self._note_computed(self._caches.end_tokens(request, request.num_computed - start))
        if update is not None and update.finish_reason is not None:
            if self._transfers is not None and request.request.kv_handle:
                update = self._transfers.keep(request, self._caches.prefix_for_others(request), update)
            self._end(request)
        return update

    def _append_tokens(self, chunk: _PlannedChunk, result: ChunkResult) -> RequestUpdate:
        """Append the sampled tokens of a chunk to its request, and count its accepted drafts as computed."""
        request, num_accepted = chunk.request, len(result.token_ids) - 1
        update = request.append(result.token_ids, result.logprobs, self.config.max_model_len)
        request.draft_token_ids = result.draft_token_ids
        if not chunk.num_drafts:
            return update
        self.speculation = self.speculation.after(chunk.num_drafts, num_accepted)
        if self.config.recomputes_drafts or (num_accepted < chunk.num_drafts and self._caches.undo_drafts(request)):
            if request.is_prefilling:  # the accepted drafts are computed again
                self._prefilling.add(request)
            return update
        num_computed = min(num_accepted, len(update.token_ids))
        request.num_computed += num_computed
        request.num_planned += num_computed
        return update

    def _find(self, request_id: str) -> LiveRequest | None:
        return self._running.get(request_id) or self._waiting.get(request_id) or self._loading.get(request_id)

    def _abort(self, request: LiveRequest, error: str | None = None) -> RequestUpdate:
        self._end(request)
        return RequestUpdate(
            request_id=request.request_id,
            finish_reason="abort",
            num_cached_tokens=request.num_cached_tokens or 0,
            error=error,
        )

    def _end(self, request: LiveRequest) -> None:
        request.ended = True
        if request.request_id in self._waiting:
            del self._waiting[request.request_id]
            self._num_waiting_tokens -= len(request.token_ids)
            self._leave_source(request)
        elif request.request_id in self._loading:  # the end of the transfer will free its blocks
            del self._loading[request.request_id]
            self._num_waiting_tokens -= len(request.token_ids)
            self._leave_source(request)
        else:
            del self._running[request.request_id]
            self._release(request)

    def _release(self, request: LiveRequest) -> None:
        """Free the slot of a request that no longer runs, and its blocks unless a plan in flight uses them."""
        self._free_slots.append(request.slot)
        prompt = id(request.request.prompt_token_ids)
        if self._owner_of_prompt.get(prompt) is request:
            del self._owner_of_prompt[prompt]
        self._prefilling.discard(request)
        if request.num_plans:
            self._ended_in_flight.add(request)
        else:
            self._note_computed(self._caches.release(request))
