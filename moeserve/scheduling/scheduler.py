"""Continuous batching: the choice of the tokens that run in each step, and of their KV cache blocks.

The newest running request is preempted first, and requests are admitted in order of arrival (`admission.py`). The
oldest request therefore always advances. `schedule` may be called again before the result of the last plan is committed
(`commit.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from moeserve.errors import RequestError
from moeserve.kv.connector import HostTier, KVConnector
from moeserve.kv.manager import CacheManager, NewBlocks
from moeserve.kv.pool import root_digest
from moeserve.kv.requests import RequestCache
from moeserve.kv.route_store import RouteStore
from moeserve.kv.transfers import BlockTransfers
from moeserve.protocol import (
    RankReport,
    Request,
    RequestUpdate,
    SpeculationTotals,
    StepPlan,
    StepResult,
    Transfer,
    TransferResult,
)
from moeserve.scheduling.admission import AdmissionQueue
from moeserve.scheduling.commit import PlansInFlight
from moeserve.scheduling.request import NO_SLOT, LiveRequest
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.scheduling.turns import Turns

# A prompt is long while its remaining tokens would take more than this number of steps if it ran alone.
STEPS_OF_LONG_PROMPT = 4


@dataclass
class _Step:
    """A step that is being planned, and the tokens that are left in it."""

    num_tokens: int  # tokens left
    num_prefill_tokens: int  # tokens left for chunks of several tokens
    num_wanted: int = 0  # tokens of prompts that have no chunk in the step yet
    chunks: dict[LiveRequest, int] = field(default_factory=dict)  # number of tokens, without drafts
    drafts: dict[LiveRequest, list[int]] = field(default_factory=dict)
    new_blocks: list[tuple[int, NewBlocks]] = field(default_factory=list)  # new blocks of registered requests, by slot

    @property
    def num_left_for_prompts(self) -> int:
        return min(self.num_tokens, self.num_prefill_tokens)

    def most_for(self, request: LiveRequest) -> int:
        """Return the maximum number of tokens that the request may compute in this step.

        A long prompt leaves up to half of the prefill tokens to the prompts after it, so that short prompts need not
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

    def add(self, request: LiveRequest, num_tokens: int) -> None:
        """Add a request's chunk."""
        self.chunks[request] = num_tokens
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
        # Transfers to and from the store behind the KV cache and other engines; None if there are neither.
        self.transfers: BlockTransfers[LiveRequest] | None = None
        self._cache_salt = cache_salt
        self._num_arrived = 0
        self._holds = False
        self._held: dict[str, LiveRequest] = {}  # requests that wait for `release`
        self._caches = CacheManager(config)
        routes: RouteStore | None = None
        if config.routes is not None:
            routes = RouteStore(config.routes, config.num_blocks, config.block_size)
        if connector is not None or peer_addresses:
            store = HostTier({}) if connector is None else connector
            self.transfers = BlockTransfers(store, self._caches.pools, config, peer_addresses, routes)
        self._queue = AdmissionQueue(config, self._caches, self.transfers)
        self._plans = PlansInFlight(config, self._caches, self.transfers, routes)
        self._running = self._plans.running
        self._turns = Turns(config.longest_turn_wait) if config.longest_turn_wait else None

    @property
    def has_work(self) -> bool:
        """True if there is a request that has not ended and is not held."""
        return bool(self._running or self._queue)

    @property
    def num_plans(self) -> int:
        """Number of plans in flight."""
        return len(self._plans)

    @property
    def live_request_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return [*self._running, *self._queue.waiting, *self._queue.loading, *self._held]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._held)

    @property
    def num_decoding(self) -> int:
        """Number of running requests that are not prefilling."""
        return len(self._running) - len(self._plans.prefilling)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of prompt tokens that are not in any plan yet. Some of them may be in the prefix cache."""
        return self._queue.num_tokens + sum(request.num_unplanned for request in self._plans.prefilling)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds, including those kept for the prefix cache."""
        return self._caches.num_free_blocks

    @property
    def speculation(self) -> SpeculationTotals:
        return self._plans.speculation

    def add(self, request: Request) -> None:
        """Append a request to the queue. An accepted request can always finish.

        Raises:
            RequestError: the prompt is empty or too long, or the request id is in use. Nothing has changed.
        """
        name, num_tokens = f"request {request.request_id!r}", len(request.prompt_token_ids)
        is_waiting = request.request_id in self._held or self._queue.find(request.request_id) is not None
        if is_waiting or request.request_id in self._running:
            raise RequestError(f"{name} is still being served; give each request an id of its own")
        if num_tokens == 0:
            raise RequestError(f"{name}: the prompt has no tokens; it must have at least one")
        if num_tokens + len(request.output_token_ids) >= self.config.max_model_len:
            raise RequestError(
                f"{name}: the prompt has {num_tokens} tokens; with max_model_len={self.config.max_model_len} at most "
                f"{self.config.max_model_len - 1} fit, because one must be left for the output. Shorten the prompt"
            )
        live = LiveRequest(request, self._num_arrived, self._new_cache(request))
        self._num_arrived += 1
        if self._holds:
            self._held[request.request_id] = live
        else:
            self._queue.insert(live)

    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request and free its blocks. Return None if there is no such request."""
        if (request := self._running.get(request_id)) is not None:
            self._plans.end(request)
        elif (request := self._held.pop(request_id, None)) is not None:
            request.ended = True
        elif (request := self._queue.find(request_id)) is not None:
            self._queue.end(request)
        return None if request is None else request.aborted()

    def abort_all(self) -> list[RequestUpdate]:
        """End every request. Results of plans in flight must still be committed, and are dropped."""
        return [update for request_id in self.live_request_ids if (update := self.abort(request_id)) is not None]

    def start_again(self) -> None:
        """Drop all requests and planned steps after a failure. Cached prefixes stay; counters start again from zero."""
        self.abort_all()
        while self._plans:
            self._plans.abort()
        self._holds = False
        self.num_preemptions, self._plans.speculation = 0, SpeculationTotals()

    def hold(self) -> None:
        """Let requests that are added from now on wait until `release`."""
        self._holds = True

    def release(self) -> None:
        """Queue the requests that wait because of `hold`."""
        self._holds = False
        for request in self._held.values():
            self._queue.insert(request)
        self._held.clear()

    def retract(self) -> None:
        """Return all running requests to the queue, to be computed again. No plan may be in flight."""
        assert not self._plans
        for request in reversed([*self._running.values()]):
            self._preempt(request)

    def use_new_weights(self, salt: bytes) -> None:
        """Forget prefixes. Later requests also find no block of running requests, which depend on old keys and values.

        Args:
            salt: as for `forget_prefixes`.
        """
        self.forget_prefixes(salt)
        for request in self._running.values():
            self._caches.make_private(request)

    def forget_prefixes(self, salt: bytes) -> None:
        """Let requests find no prefix that was cached so far. Running requests keep their blocks.

        Args:
            salt: replaces the salt of this engine.
        """
        self._cache_salt = salt
        for request in (*self._queue.waiting.values(), *self._queue.loading.values(), *self._held.values()):
            request.cache = self._new_cache(request.request)

    def schedule(self, prefill_budget: int | None = None) -> StepPlan | None:
        """Plan the next step and allocate the blocks it needs.

        Return None if no request can run now, because there are no requests or all wait for results of plans in flight.

        Args:
            prefill_budget: maximum number of tokens in chunks of several tokens, at least one and at most
                `max_prefill_tokens`. None: only `max_num_batched_tokens` limits prefills.
        """
        num_tokens = num_prefill_tokens = self.config.max_num_batched_tokens
        if prefill_budget is not None and self.config.max_prefill_tokens:
            num_prefill_tokens = min(prefill_budget, self.config.max_prefill_tokens)
        step = _Step(num_tokens, num_prefill_tokens)
        num_preemptions = self.num_preemptions
        has_room = self._continue_running(step)
        while (num_now := self.num_preemptions) > num_preemptions and not step.chunks:
            has_room = self._continue_running(step)  # the requests whose turn it was were preempted
            if self.num_preemptions == num_now:
                break
        if has_room and self.num_preemptions == num_preemptions:
            self._admit_waiting(step)
            self._extend_prompts(step)
            self._take_drafts(step)
        if step.chunks:
            return self._plans.begin(step.chunks, step.drafts, step.new_blocks)
        is_stuck = self.has_work and not self._plans and not (self.transfers and self.transfers.are_in_flight)
        assert not is_stuck, "there are requests, but none of them can run"
        return None

    def commit(self, result: StepResult, reports: Sequence[RankReport] = ()) -> list[RequestUpdate]:
        """Apply the result of the oldest plan, and return updates with new tokens or finish reasons.

        A partly computed prompt has no update.

        Args:
            reports: reports of the ranks after the step, to compare with the scheduler's state.

        Raises:
            RankStateError: a rank has another state of a request.
        """
        return self._plans.commit(result, reports)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Note how long the step of a committed plan took."""
        if self.transfers is not None:
            self.transfers.note_step(plan.num_tokens, seconds)
        if self._turns is not None:
            self._turns.note_step(plan.num_tokens, seconds, is_decode_only=plan.is_decode_only)

    def abort_step(self) -> list[RequestUpdate]:
        """End only the requests of the oldest plan, whose step has failed. Its results are discarded."""
        return self._plans.abort()

    def take_transfers(self) -> list[Transfer]:
        """Return the transfers to start now. Each must be ended by `end_transfer`, in any order."""
        return [] if self.transfers is None else self.transfers.take_new()

    def end_transfer(self, result: TransferResult) -> None:
        """End a transfer. The request that waited for it can be admitted, with the blocks that were copied."""
        self._queue.end_transfer(result)

    def check_invariants(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent. For tests and debugging: visits every block."""
        self._queue.check_invariants()
        in_flight = self._plans.check_invariants()
        holders = [*self._running.values(), *self._queue.waiting.values(), *self._plans.ended]
        of_transfers = [] if self.transfers is None else self.transfers.held_places()
        self._caches.check_invariants(holders, of_transfers, [chunk.items for chunk in in_flight])

    def _new_cache(self, request: Request) -> RequestCache:
        return self._caches.open(root_digest(self._cache_salt, request.cache_salt))

    def _continue_running(self, step: _Step) -> bool:
        """Plan the running requests, oldest first. Prompts leave one token for each decoding request.

        Return False if a request cannot grow now; newer requests may then not get blocks.
        """
        share = self._share_of_plan(len(self._running))
        ready = [request for request in self._in_turn() if self._may_continue(request)][:share]
        prompts = [request.num_unplanned for request in ready if request in self._plans.prefilling]
        most_for_prompts = max(step.num_tokens - (len(ready) - len(prompts)), 1)
        step.num_prefill_tokens = min(step.num_prefill_tokens, most_for_prompts)
        step.num_wanted = sum(prompts) + self._queue.num_tokens
        for request in ready:
            if request.slot == NO_SLOT:  # preempted in this call
                continue
            num_tokens = step.most_for(request)
            if num_tokens == 0:
                continue
            if not self._make_room(request, num_tokens):
                return False
            self._allocate(request, num_tokens, step)
            step.add(request, num_tokens)
        return True

    def _in_turn(self) -> Collection[LiveRequest]:
        """Return the running requests that may be planned, oldest first; all of them, unless decoding requests take
        turns.

        All requests decode in steps with prompts, because prompts read most experts anyway.
        """
        if self._turns is None or self._plans.prefilling:
            return self._running.values()
        in_turn = self._turns.choose([*self._running.values()])
        return [request for request in self._running.values() if request in in_turn]

    def _admit_waiting(self, step: _Step) -> None:
        """Start waiting requests until the step is full."""
        share = self._share_of_plan(min(len(self._running) + len(self._queue.waiting), self.config.max_num_seqs))
        admitted = self._queue.admit(self._running, self._plans.prefilling)
        while len(step.chunks) < share and step.num_left_for_prompts and (found := next(admitted, None)):
            request, prefix = found
            self._plans.start(request, prefix)
            num_tokens = step.most_for(request)
            self._allocate(request, num_tokens, step)
            step.add(request, num_tokens)

    def _extend_prompts(self, step: _Step) -> None:
        """Extend planned prompts, oldest first, by tokens that they left to other requests and that were not used."""
        for request, num_tokens in step.chunks.items():
            num_more = min(request.num_unplanned - num_tokens, step.num_left_for_prompts)
            if num_more <= 0 or not self._caches.fits(request, num_tokens + num_more):
                continue
            self._allocate(request, num_tokens + num_more, step)
            step.chunks[request] = num_tokens + num_more
            step.num_tokens -= num_more
            step.num_prefill_tokens -= num_more

    def _take_drafts(self, step: _Step) -> None:
        """Take the drafts of planned requests that fit into the remaining tokens and free blocks.

        Requests also get the blocks after the drafts in which ranks compute the next drafts, if enough are free.
        """
        num_ahead = self.config.num_lookahead_tokens
        for request, num_tokens in step.chunks.items():
            has_drafts = bool(request.draft_token_ids) or num_ahead > 0
            if not has_drafts or num_tokens < request.num_unplanned:  # the second: the chunk does not sample
                continue
            num_following = max(request.num_left(self.config.max_model_len) - 1, 0)
            drafts: list[int] = []
            if request.is_registered:
                drafts = request.draft_token_ids[: min(step.num_tokens, num_following)]
            if not self._caches.fits(request, num_tokens + len(drafts)):
                drafts = []
            num_computed = num_tokens + len(drafts)
            num_with_ahead = num_tokens + min(len(drafts) + num_ahead, num_following)
            if self._caches.fits(request, num_with_ahead):
                num_computed = num_with_ahead
            self._allocate(request, num_computed, step)
            if drafts:
                step.num_tokens -= len(drafts)
                step.drafts[request] = drafts

    def _allocate(self, request: LiveRequest, num_tokens: int, step: _Step) -> None:
        """Allocate the blocks that a running request needs for its next tokens. Enough blocks must be free."""
        added = self._caches.extend(request, num_tokens)
        if added and request.is_registered:  # else the request's registration has all blocks
            step.new_blocks.append((request.slot, added))

    def _share_of_plan(self, num_requests: int) -> int:
        """Return the number of requests in one plan: an equal share of `num_requests` for each of `num_batches`."""
        return -(-num_requests // self.config.num_batches)

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
            if self._plans.ended:  # the results of plans in flight will free their blocks
                return False
            if self.transfers and self.transfers.hold_blocks_alone:  # these blocks will be free soon
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
        self._plans.stop(request)
        self._caches.clear(request)
        if request.cache.is_private:
            request.cache = self._new_cache(request.request)
        request.reset_computed()
        self._queue.insert(request)
        self.num_preemptions += 1
