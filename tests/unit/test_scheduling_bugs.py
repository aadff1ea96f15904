"""Schedulers with one bug each, which the random histories of `test_scheduling_states.py` must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_scheduling_states import SchedulerMachine, run_histories

from moeserve.cache_kind import CacheKind
from moeserve.errors import RankStateError
from moeserve.kv.manager import CacheManager, ChunkItems, Prefix, ToStore
from moeserve.kv.requests import CachedRequest
from moeserve.kv.state_pool import StatePool
from moeserve.kv.transfers import BlockTransfers
from moeserve.protocol import (
    CacheStart,
    ChunkResult,
    KeepItems,
    Request,
    RequestUpdate,
    SavedState,
    StoreTransfer,
    Transfer,
    TransferResult,
)
from moeserve.scheduling.commit import PlansInFlight
from moeserve.scheduling.request import LiveRequest
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig


def at(request: CachedRequest, num_computed: int) -> Any:
    """Return a request as if this number of tokens were computed."""
    attributes = {name: getattr(request, name) for name in ("cache", "token_ids", "num_prompt_tokens")}
    return SimpleNamespace(**attributes, num_computed=num_computed)


class SchedulerWithParts(Scheduler):
    """A scheduler with other classes for its parts, which have the same attributes."""

    plans_class: type[PlansInFlight] = PlansInFlight
    caches_class: type[CacheManager] = CacheManager
    transfers_class: type[BlockTransfers] = BlockTransfers

    def __init__(self, config: SchedulerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self._plans.__class__ = self.plans_class
        self._caches.__class__ = self.caches_class
        if self.transfers is not None:
            self.transfers.__class__ = self.transfers_class


class FreesBlocksOfPlansInFlight(SchedulerWithParts):
    """It gives the blocks of a request that has ended to others while a plan in flight names them."""

    class plans_class(PlansInFlight):
        def stop(self, request: LiveRequest) -> None:
            del self.running[request.request_id]
            self._free_slots.append(request.slot)
            self._caches.pool.release(request.cache.tables[0])


class LosesBlocksOfPlansInFlight(SchedulerWithParts):
    """It never frees the blocks of a request that ends while a plan in flight names them."""

    class plans_class(PlansInFlight):
        def stop(self, request: LiveRequest) -> None:
            super().stop(request)
            self.ended.discard(request)


class PreemptsRequestsInFlight(Scheduler):
    """It preempts a request whose blocks a plan in flight writes."""

    def _make_room(self, request: LiveRequest, num_tokens: int) -> bool:
        while not self._caches.fits(request, num_tokens):
            newest = next(reversed(self._running.values()))
            self._plans.stop(newest)
            if newest in self._plans.ended:
                self._plans.ended.discard(newest)
                self._caches.pool.release(newest.cache.tables[0])
            newest.cache.clear()
            newest.reset_computed()
            self._queue.insert(newest)
            if newest is request:
                return False
        return True


class PlansBeyondTheEnd(Scheduler):
    """It plans tokens after the last one that a request may have."""

    def _may_continue(self, request: LiveRequest) -> bool:
        return request.num_unplanned > 0 and (request.is_registered or request.num_plans == 0)


class SharesBlocksBeforeTheyAreFull(SchedulerWithParts):
    """It shares the block of a request's last token, so that nothing is left to compute."""

    class caches_class(CacheManager):
        def find(self, request: CachedRequest, is_stored: Any = None) -> Prefix:
            prefix = super().find(request, is_stored)
            num_more = prefix.num_blocks + 1
            is_full = len(request.token_ids) == num_more * self.config.block_size
            if num_more > 1 and is_full and self.pool.find(self._digest(request, num_more - 1)) is not None:
                return prefix._replace(num_blocks=num_more)
            return prefix


class ReportsEndedRequests(Scheduler):
    """It returns results of requests that have ended meanwhile."""

    def commit(self, result: Any, reports: Any = ()) -> list[RequestUpdate]:
        ended = [chunk.request for chunk in self._plans._plans[0] if chunk.request.ended]
        late = [RequestUpdate(request_id=request.request_id, token_ids=[1]) for request in ended]
        return super().commit(result, reports) + late


class EndsAllAfterAFailedStep(Scheduler):
    """A failed step ends requests that were not in it."""

    def abort_step(self) -> list[RequestUpdate]:
        return super().abort_step() + self.abort_all()


class FailsTheNewestStep(Scheduler):
    """A failed step ends the requests of the newest plan instead of the oldest."""

    def abort_step(self) -> list[RequestUpdate]:
        self._plans._plans.rotate(1)
        updates = super().abort_step()
        return updates


class EndsAllForOneRow(Scheduler):
    """A row that cannot be sampled ends all requests."""

    def commit(self, result: Any, reports: Any = ()) -> list[RequestUpdate]:
        updates = super().commit(result, reports)
        return updates + (self.abort_all() if any(update.error for update in updates) else [])


class ForgetsResumedTokens(Scheduler):
    """A request that continues elsewhere starts again."""

    def add(self, request: Request) -> None:
        super().add(msgspec.structs.replace(request, output_token_ids=[]))


class IgnoresSalts(Scheduler):
    """Tenants share cached prefixes."""

    def add(self, request: Request) -> None:
        super().add(msgspec.structs.replace(request, cache_salt=""))


class PreemptsToTheEndOfTheQueue(Scheduler):
    """A preempted request waits behind requests that came later."""

    def _preempt(self, request: LiveRequest) -> None:
        super()._preempt(request)
        self._queue.waiting.move_to_end(request.request_id)


class TransfersWithoutHolders(BlockTransfers):
    """It gives the places of some items to others while they are copied."""

    def take_new(self) -> list[Transfer]:
        new = super().take_new()
        for transfer in new:
            if isinstance(transfer, KeepItems | StoreTransfer) and self.is_careless(transfer):
                in_flight = self._in_flight[transfer.number]
                freed = [place for place in in_flight.places if place.kind == self.careless_kind]
                for place in freed:
                    self._pools[place.kind].release([place.index])
                places = [place for place in in_flight.places if place.kind != self.careless_kind]
                self._in_flight[transfer.number] = dataclasses.replace(in_flight, places=places)
        return new

    careless_kind = CacheKind.BLOCK

    def is_careless(self, transfer: KeepItems | StoreTransfer) -> bool:
        return isinstance(transfer, StoreTransfer) and not transfer.is_load


class SavesBlocksOfOthers(SchedulerWithParts):
    """It gives blocks to others while they are saved."""

    class transfers_class(TransfersWithoutHolders):
        pass


class SavesStatesOfOthers(SchedulerWithParts):
    """It gives the rows of states to others while they are saved."""

    class transfers_class(TransfersWithoutHolders):
        careless_kind = CacheKind.STATE


class SharesKeptBlocks(SchedulerWithParts):
    """It gives blocks to others that it keeps for another engine."""

    class transfers_class(TransfersWithoutHolders):
        def is_careless(self, transfer: KeepItems | StoreTransfer) -> bool:
            return isinstance(transfer, KeepItems)


class LoadsIntoRowsThatAreRead(SchedulerWithParts):
    """It takes a saved state for unused while a plan in flight reads it."""

    class caches_class(CacheManager):
        def start(self, request: CachedRequest, prefix: Prefix) -> ToStore:
            to_store = super().start(request, prefix)
            if self._rows is not None and request.cache.row in self._rows.rows:
                self._rows.release(request.cache.row)
            return to_store

        def end_chunk(self, request: CachedRequest, items: ChunkItems, start: int, *, is_kept: bool) -> ToStore:
            return super().end_chunk(request, items._replace(read_row=None), start, is_kept=is_kept)


class LoadsIntoBlocksOfOthers(Scheduler):
    """It gives blocks to others when the request that waits for them is aborted."""

    def abort(self, request_id: str) -> RequestUpdate | None:
        for number, each in ({} if self.transfers is None else self.transfers._in_flight).copy().items():
            if each.request is not None and each.request.request_id == request_id:
                for place in [*each.places, *each.held]:
                    self._caches.pools[place.kind].release([place.index])
                self.transfers._in_flight[number] = dataclasses.replace(each, places=[], keys=[], held=[])
        return super().abort(request_id)


class SharesBlocksThatWereNotLoaded(SchedulerWithParts):
    """It takes a load for whole that has failed."""

    class transfers_class(BlockTransfers):
        def end(self, result: TransferResult) -> LiveRequest | None:
            num_items = len(self._in_flight[result.number].places)
            return super().end(msgspec.structs.replace(result, num_copied=num_items))


class LoadsForEver(Scheduler):
    """It loads the blocks of a request again and again, if they cannot be loaded."""

    def end_transfer(self, result: TransferResult) -> None:
        assert self.transfers is not None
        is_load = self.transfers._in_flight[result.number].request is not None
        super().end_transfer(msgspec.structs.replace(result, num_copied=0) if is_load else result)
        for request in self._queue.waiting.values():
            request.may_load = True


class ReceivesForNobody(SchedulerWithParts):
    """It does not cancel the transfer of blocks that no request needs any more."""

    class transfers_class(BlockTransfers):
        def cancel_receive(self, handle: str) -> None:
            pass


class CancelsWhatOthersNeed(Scheduler):
    """It cancels the transfer of blocks for which another output of the prompt waits."""

    def abort(self, request_id: str) -> RequestUpdate | None:
        request = self._queue.find(request_id)
        update = super().abort(request_id)
        if self.transfers is not None and request is not None and request.request.kv_source is not None:
            self.transfers.cancel_receive(request.request.kv_source.handle)
        return update


class EvictsStatesThatAreRead(SchedulerWithParts):
    """It reuses the row of a state in the plan that reads it."""

    class caches_class(LoadsIntoRowsThatAreRead.caches_class):
        pass


class SavesStatesAtTheWrongToken(SchedulerWithParts):
    """It saves a state one token late."""

    class caches_class(CacheManager):
        def _save_for_others(self, request: CachedRequest, num_tokens: int, rows: StatePool) -> SavedState | None:
            saved = super()._save_for_others(request, num_tokens, rows)
            if saved is None or saved.num_tokens == num_tokens:
                return saved
            return SavedState(saved.slot, saved.row, saved.num_tokens + 1)


class StartsWithoutTheState(SchedulerWithParts):
    """It admits a request behind a cached prefix as if its state were zeros."""

    class caches_class(CacheManager):
        def register(self, request: CachedRequest) -> CacheStart:
            return msgspec.structs.replace(super().register(request), row=None)


class CountsRejectedDrafts(SchedulerWithParts):
    """It takes the keys and values of drafts for computed that were rejected."""

    class plans_class(PlansInFlight):
        def _append_tokens(self, chunk: Any, result: ChunkResult) -> RequestUpdate:
            update = super()._append_tokens(chunk, result)
            is_rejected = chunk.num_drafts > len(result.token_ids) - 1
            if self._caches._rows is None and is_rejected and update.finish_reason is None:
                chunk.request.num_computed += 1
                chunk.request.num_planned += 1
                chunk.request.token_ids.append(0)
            return update


class KeepsTheStateOfRejectedDrafts(SchedulerWithParts):
    """It goes on from a state that has seen drafts that were rejected."""

    class caches_class(CacheManager):
        def undo_drafts(self, request: CachedRequest) -> bool:
            own_row = request.cache.own_row
            is_undone = super().undo_drafts(request)
            if is_undone:
                request.cache.row = request.cache.own_row = own_row
            return is_undone


class DropsBlocksInTheWindow(SchedulerWithParts):
    """It frees blocks that the next token reads."""

    class caches_class(CacheManager):
        def _drop_unneeded(self, request: CachedRequest) -> None:
            super()._drop_unneeded(at(request, request.num_computed + 1))


class DropsBlocksOfPlansInFlight(SchedulerWithParts):
    """It frees blocks that a plan in flight reads, because a later one does not."""

    class caches_class(CacheManager):
        def _drop_unneeded(self, request: CachedRequest) -> None:
            super()._drop_unneeded(at(request, request.num_planned))


class KeepsBlocksBehindTheWindow(SchedulerWithParts):
    """It frees no blocks before a request ends."""

    class caches_class(CacheManager):
        def _drop_unneeded(self, request: CachedRequest) -> None:
            pass


class StartsWithoutTheWindow(SchedulerWithParts):
    """It shares a prefix of whose window a block is missing."""

    class caches_class(CacheManager):
        def _blocks_of(self, request: CachedRequest, prefix: Prefix) -> Any:
            first, *others = super()._blocks_of(request, prefix)
            return [first, *((group, shared[1:]) for group, shared in others)]


BUGS: Sequence[type[Scheduler]] = [
    CountsRejectedDrafts,
    KeepsTheStateOfRejectedDrafts,
    FreesBlocksOfPlansInFlight,
    LosesBlocksOfPlansInFlight,
    PreemptsRequestsInFlight,
    PlansBeyondTheEnd,
    SharesBlocksBeforeTheyAreFull,
    ReportsEndedRequests,
    EndsAllAfterAFailedStep,
    FailsTheNewestStep,
    EndsAllForOneRow,
    ForgetsResumedTokens,
    IgnoresSalts,
    PreemptsToTheEndOfTheQueue,
    EvictsStatesThatAreRead,
    StartsWithoutTheState,
    SavesStatesAtTheWrongToken,
    DropsBlocksInTheWindow,
    DropsBlocksOfPlansInFlight,
    KeepsBlocksBehindTheWindow,
    StartsWithoutTheWindow,
]
BUGS_OF_TRANSFERS: Sequence[type[Scheduler]] = [
    LoadsIntoBlocksOfOthers,
    SharesBlocksThatWereNotLoaded,
    LoadsForEver,
    SavesBlocksOfOthers,
    SavesStatesOfOthers,
    SharesKeptBlocks,
    LoadsIntoRowsThatAreRead,
    ReceivesForNobody,
    CancelsWhatOthersNeed,
]
FOUND = (AssertionError, LookupError, StopIteration, RankStateError)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=[bug.__name__ for bug in BUGS])
def test_planted_bug_is_found(bug: type[Scheduler]) -> None:
    machine = type("Machine", (SchedulerMachine,), {"scheduler_class": bug})
    generated = settings(max_examples=2000, stateful_step_count=50, phases=[Phase.generate])
    with pytest.raises(FOUND):
        run_state_machine_as_test(machine, settings=generated)


@pytest.mark.parametrize("bug", BUGS_OF_TRANSFERS, ids=[bug.__name__ for bug in BUGS_OF_TRANSFERS])
def test_planted_bug_of_transfers_is_found(bug: type[Scheduler]) -> None:
    machine = type("Machine", (SchedulerMachine,), {"scheduler_class": bug})
    with pytest.raises(FOUND):
        run_histories(machine)
