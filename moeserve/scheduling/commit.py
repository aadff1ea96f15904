"""Plans in flight: from the choice of their chunks to the commit of their results.

Ranks run plans in order, so a plan may continue a request after a token that an earlier plan will sample. A block is
allocated to another request only after all plans that use it for its previous owner have been committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from moeserve.kv.manager import CacheManager, ChunkItems, NewBlocks, Prefix, ToStore
from moeserve.kv.route_store import RouteStore
from moeserve.kv.transfers import BlockTransfers
from moeserve.protocol import (
    ChunkResult,
    RankReport,
    Registration,
    RequestUpdate,
    SpeculationTotals,
    StepPlan,
    StepResult,
)
from moeserve.scheduling.rank_state import ExpectedState, check_reports
from moeserve.scheduling.request import LiveRequest
from moeserve.scheduling.scheduler_config import SchedulerConfig


class PlannedChunk(NamedTuple):
    """A chunk of a plan in flight."""

    request: LiveRequest
    start: int  # position of the first token
    num_tokens: int  # number of tokens without drafts
    num_drafts: int
    samples: bool
    num_prompt_rows: int  # number of prompt tokens whose log-probabilities the chunk returns
    num_known: int  # number of the request's tokens that ranks have after this plan
    items: ChunkItems

    def place(self) -> tuple[list[int], int, int]:
        """Return the request's block table, the chunk's first position, and its number of tokens, drafts included."""
        return self.request.cache.tables[0], self.start, self.num_tokens + self.num_drafts

    def expected_state(self) -> ExpectedState:
        """Return the state that ranks have after the plan, once its result is committed."""
        request = self.request
        token_ids = request.token_ids[: self.num_known]
        block_ids = [block_id for table in request.cache.tables for block_id in table[: self.items.num_blocks]]
        return ExpectedState(request.request_id, request.slot, token_ids, block_ids)


class PlansInFlight:
    """The plans in flight, in order, and the running requests whose chunks they contain."""

    def __init__(
        self,
        config: SchedulerConfig,
        caches: CacheManager,
        transfers: BlockTransfers[LiveRequest] | None,
        routes: RouteStore | None,
    ) -> None:
        self.running: dict[str, LiveRequest] = {}  # in order of admission
        self.prefilling: set[LiveRequest] = set()  # running requests with more than one unplanned token
        self.ended: set[LiveRequest] = set()  # requests that no longer run, but whose blocks a plan in flight uses
        self.speculation = SpeculationTotals()
        self._config, self._caches, self._transfers, self._routes = config, caches, transfers, routes
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._owner_of_prompt: dict[int, LiveRequest] = {}  # running requests, by the identity of their prompts
        self._step = 0
        self._plans: deque[list[PlannedChunk]] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def start(self, request: LiveRequest, prefix: Prefix) -> None:
        """Start a request after its cached prefix."""
        self.running[request.request_id] = request
        self.prefilling.add(request)
        self._note_computed(self._caches.start(request, prefix))
        request.num_computed = request.num_planned = prefix.num_blocks * self._config.block_size
        request.slot = self._free_slots.pop()
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed

    def stop(self, request: LiveRequest) -> None:
        """Free the slot of a request that no longer runs, and its blocks once no plan in flight uses them."""
        del self.running[request.request_id]
        self._free_slots.append(request.slot)
        prompt = id(request.request.prompt_token_ids)
        if self._owner_of_prompt.get(prompt) is request:
            del self._owner_of_prompt[prompt]
        self.prefilling.discard(request)
        if request.num_plans:
            self.ended.add(request)
        else:
            self._note_computed(self._caches.release(request))

    def end(self, request: LiveRequest) -> None:
        """End a running request."""
        request.ended = True
        self.stop(request)

    def begin(
        self,
        chunks: Mapping[LiveRequest, int],
        drafts: Mapping[LiveRequest, list[int]],
        new_blocks: list[tuple[int, NewBlocks]],
    ) -> StepPlan:
        """Begin a plan.

        Args:
            chunks: numbers of tokens of running requests, without drafts.
            drafts: draft tokens of some of these requests.
            new_blocks: blocks that registered requests got for this plan, by slot.
        """
        self._step += 1
        planned: list[PlannedChunk] = []
        registrations: list[Registration] = []
        unsent: list[tuple[int, list[int]]] = []  # tokens of registered requests that ranks do not have yet
        for request, num_tokens in chunks.items():
            if not request.is_registered:
                registrations.append(self._registration(request))
            elif not self._config.plans_ahead and request.num_sent < len(request.token_ids):
                unsent.append((request.slot, request.token_ids[request.num_sent :]))
            planned.append(self._start_chunk(request, num_tokens, len(drafts.get(request, ()))))
        self._plans.append(planned)
        return StepPlan(
            step=self._step,
            slots=[chunk.request.slot for chunk in planned],
            starts=[chunk.request.num_planned - chunk.num_tokens for chunk in planned],
            lengths=[chunk.num_tokens + chunk.num_drafts for chunk in planned],
            num_sampling=sum(chunk.samples for chunk in planned),
            registrations=registrations,
            cache=self._caches.changes(new_blocks, [(chunk.request.slot, chunk.items) for chunk in planned]),
            new_tokens=unsent,
            drafts=[(request.slot, some) for request, some in drafts.items()],
        )

    def commit(self, result: StepResult, reports: Sequence[RankReport]) -> list[RequestUpdate]:
        """Apply the result of the oldest plan. See `Scheduler.commit`."""
        chunks = self._plans.popleft()
        step = self._step - len(self._plans)
        assert result.step == step, f"step {step}: got the result of step {result.step}"
        assert len(chunks) == len(result.chunks), f"step {step}: chunks are missing"
        if self._routes is not None:
            self._routes.store([chunk.place() for chunk in chunks], reports)
        reports = [report for report in reports if report.digests]
        updates, expected = [], []
        for chunk, chunk_result in zip(chunks, result.chunks, strict=True):
            is_kept = not chunk.request.ended and chunk_result.error is None
            self._finish_chunk(chunk, is_kept=is_kept)
            if not chunk.request.ended and (update := self._commit_chunk(chunk, chunk_result)) is not None:
                updates.append(update)
            expected.append(chunk.expected_state() if reports and is_kept else None)
        check_reports(step, expected, reports)
        return updates

    def abort(self) -> list[RequestUpdate]:
        """End the requests of the oldest plan, whose results are discarded."""
        chunks = self._plans.popleft()
        for chunk in chunks:
            self._finish_chunk(chunk, is_kept=False)
        still_live = [chunk.request for chunk in chunks if not chunk.request.ended]
        for request in still_live:
            self.end(request)
        return [request.aborted() for request in still_live]

    def check_invariants(self) -> list[PlannedChunk]:
        """Raise AssertionError if the bookkeeping is inconsistent. Return the chunks in flight."""
        running = [*self.running.values()]
        assert len(running) <= self._config.max_num_seqs, f"{len(running)} requests run"
        assert not any(request.ended for request in running), "a request that ended still runs"
        slots = [*self._free_slots, *(request.slot for request in running)]
        assert sorted(slots) == list(range(self._config.max_num_seqs)), f"slots are lost: {slots}"
        in_flight = [chunk for chunks in self._plans for chunk in chunks]
        holders = {*running, *self.ended}
        assert holders.issuperset(chunk.request for chunk in in_flight), "a request of a plan in flight is lost"
        for request in holders:
            own = [chunk for chunk in in_flight if chunk.request is request]
            assert request.num_plans == len(own), request
            assert request.num_planned == request.num_computed + sum(chunk.num_tokens for chunk in own), request
            assert request.num_unknown == sum(chunk.samples for chunk in own), request
        for request in running:
            assert request.num_planned <= len(request.token_ids) + request.num_unknown <= self._config.max_model_len
        prefilling = {request for request in running if request.is_prefilling}
        assert self.prefilling == prefilling, f"prefills are lost: {self.prefilling ^ prefilling}"
        return in_flight

    def _registration(self, request: LiveRequest) -> Registration:
        """Return the registration of a request. The prompt is not sent again while another sample of it is running."""
        owner = self._owner_of_prompt.setdefault(id(request.request.prompt_token_ids), request)
        return request.registration(self._caches.register(request), None if owner is request else owner.slot)

    def _start_chunk(self, request: LiveRequest, num_tokens: int, num_drafts: int) -> PlannedChunk:
        items = self._caches.plan_chunk(request, num_tokens, num_drafts)
        samples = num_tokens == request.num_unplanned
        needs_rows = request.needs_every_prompt_row and request.num_unknown == 0
        num_prompt_rows = num_tokens - samples if needs_rows else 0  # the last row predicts the sampled token
        request.is_registered = True
        request.num_sent = len(request.token_ids)
        request.num_planned += num_tokens
        request.num_unknown += samples
        request.num_plans += 1
        if not request.is_prefilling:
            self.prefilling.discard(request)
        num_known = len(request.token_ids) + (request.num_unknown if self._config.plans_ahead else 0)
        start = request.num_planned - num_tokens
        return PlannedChunk(request, start, num_tokens, num_drafts, samples, num_prompt_rows, num_known, items)

    def _finish_chunk(self, chunk: PlannedChunk, *, is_kept: bool) -> None:
        """Update the chunk's request after its plan has ended.

        Args:
            is_kept: False if the chunk was not computed.
        """
        request = chunk.request
        request.num_plans -= 1
        request.num_unknown -= chunk.samples
        self._note_computed(self._caches.end_chunk(request, chunk.items, request.num_computed, is_kept=is_kept))
        request.num_computed += chunk.num_tokens
        if request in self.ended and request.num_plans == 0:
            self.ended.discard(request)
            self._note_computed(self._caches.release(request))

    def _commit_chunk(self, chunk: PlannedChunk, result: ChunkResult) -> RequestUpdate | None:
        """Apply the result of one chunk, whose keys and values exist from now on and can be shared."""
        request = chunk.request
        if result.error is not None:
            self.end(request)
            return request.aborted(result.error)
        most_tokens = 1 + chunk.num_drafts if chunk.samples else 0
        assert min(1, most_tokens) <= len(result.token_ids) <= most_tokens, f"{request.request_id}: tokens {result}"
        num_rows = sum(rows.num_rows for rows in result.prompt_logprobs)
        assert num_rows == chunk.num_prompt_rows, f"{request.request_id}: rows are missing"
        request.collect_prompt_logprobs(result.prompt_logprobs)
        start = request.num_computed - chunk.num_tokens
        update = self._append_tokens(chunk, result) if chunk.samples else None
        if update is not None and self._routes is not None:
            update = self._with_routes(update, request, self._routes)
        self._note_computed(self._caches.end_tokens(request, request.num_computed - start))
        if update is not None and update.finish_reason is not None:
            if self._transfers is not None and request.request.kv_handle:
                update = self._transfers.keep(request, self._caches.prefix_for_others(request), update)
            self.end(request)
        return update

    def _append_tokens(self, chunk: PlannedChunk, result: ChunkResult) -> RequestUpdate:
        """Append the sampled tokens of a chunk to its request, and count its accepted drafts as computed."""
        request, num_accepted = chunk.request, len(result.token_ids) - 1
        update = request.append(result.token_ids, result.logprobs, self._config.max_model_len)
        request.draft_token_ids = result.draft_token_ids
        if not chunk.num_drafts:
            return update
        self.speculation = self.speculation.after(chunk.num_drafts, num_accepted)
        redoes_all = self._config.recomputes_drafts
        is_undone = (redoes_all or num_accepted < chunk.num_drafts) and self._caches.undo_drafts(request)
        if redoes_all or is_undone:
            if request.is_prefilling:  # the accepted drafts are computed again
                self.prefilling.add(request)
            return update
        num_computed = min(num_accepted, len(update.token_ids))
        request.num_computed += num_computed
        request.num_planned += num_computed
        return update

    def _with_routes(self, update: RequestUpdate, request: LiveRequest, routes: RouteStore) -> RequestUpdate:
        """Return an update with the experts of the tokens, except the last token, which is not computed yet."""
        end = len(request.token_ids) - 1
        start = end - len(update.token_ids)
        if start < request.num_prompt_tokens:
            start = request.request.params.routed_experts_prompt_start
        return msgspec.structs.replace(update, routes=routes.read(request.cache.tables[0], start, end))

    def _note_computed(self, items: ToStore) -> None:
        """Report computed items to the store behind the cache, if there is one."""
        if self._transfers is not None:
            self._transfers.note_computed(items)
