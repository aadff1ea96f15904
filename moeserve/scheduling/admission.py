"""Admission: the requests of a replica that do not run, their order, and the copies that they wait for.

Requests are admitted in order of arrival, with one exception: if a request does not fit yet, a bounded number of later
requests may be admitted before it. No request therefore waits forever.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sized

from moeserve.kv.manager import CacheManager, Prefix
from moeserve.kv.transfers import BlockTransfers
from moeserve.protocol import PeerBlocks, TransferResult
from moeserve.scheduling.request import NO_SLOT, LiveRequest
from moeserve.scheduling.scheduler_config import SchedulerConfig

# Maximum number of later requests that may be admitted before a request that does not fit into the KV cache yet.
MAX_PASSED = 64


class AdmissionQueue:
    """The requests that wait for admission, or for blocks from the store or another engine."""

    def __init__(
        self, config: SchedulerConfig, caches: CacheManager, transfers: BlockTransfers[LiveRequest] | None
    ) -> None:
        self.waiting: OrderedDict[str, LiveRequest] = OrderedDict()  # in order of arrival
        self.loading: dict[str, LiveRequest] = {}  # requests that wait for a transfer
        self.num_tokens = 0  # number of known tokens of all requests in the queue
        self._config, self._caches, self._transfers = config, caches, transfers

    def __len__(self) -> int:
        return len(self.waiting) + len(self.loading)

    def find(self, request_id: str) -> LiveRequest | None:
        return self.waiting.get(request_id) or self.loading.get(request_id)

    def insert(self, request: LiveRequest) -> None:
        """Insert a request by its order of arrival."""
        from_last = reversed(self.waiting.values())
        later = list(itertools.takewhile(lambda other: other.arrival > request.arrival, from_last))
        self.waiting[request.request_id] = request
        for other in reversed(later):
            self.waiting.move_to_end(other.request_id)
        self.num_tokens += len(request.token_ids)

    def admit(self, running: Sized, prefilling: Collection[LiveRequest]) -> Iterator[tuple[LiveRequest, Prefix]]:
        """Yield requests that fit, oldest first, with cached prefixes. The caller starts each request before the next.

        A bounded number of requests may pass requests that do not fit yet.

        Args:
            running: all running requests.
            prefilling: running requests with more than one unplanned token.
        """
        passed: list[LiveRequest] = []
        num_promised = sum(map(self._caches.num_missing_blocks, prefilling))
        for request in list(self.waiting.values()):
            if len(running) + len(self.loading) >= self._config.max_num_seqs:
                return
            prefix = self._caches.find(request)
            self._caches.note_branch(request, prefix)
            # Check the whole prompt: with a check of only its first chunk, long prompts would be admitted and preempted
            # later. A request that would run alone may take all blocks, so every request is admitted eventually.
            if not self._caches.has_room(request, prefix, num_promised, len(running)):
                passed.append(request)
                if request.num_passed == MAX_PASSED or len(passed) == MAX_PASSED:
                    return
            elif not self._receives_or_loads(request, prefix):
                for other in passed:
                    other.num_passed += 1
                self._remove(request)
                yield request, prefix
                num_promised += self._caches.num_missing_blocks(request)
                if any(other.num_passed == MAX_PASSED for other in passed):
                    return

    def end(self, request: LiveRequest) -> None:
        """End a request. If it waits for a transfer, the end of the transfer will free its blocks."""
        request.ended = True
        self._remove(request)
        self._leave_source(request)

    def end_transfer(self, result: TransferResult) -> None:
        """End a transfer. The request that waited for it can be admitted, with the blocks that were copied."""
        assert self._transfers is not None
        request = self._transfers.end(result)  # admission finds the copied blocks in the prefix cache
        if request is None:
            return
        if request.kv_source is None:
            self._drop_source(request)  # other outputs of its prompt find the items in the prefix cache
        if not request.ended:
            self._remove(request)
            self.insert(request)

    def check_invariants(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        arrivals = [request.arrival for request in self.waiting.values()]
        assert arrivals == sorted(set(arrivals)), "requests do not wait in order of arrival"
        requests = [*self.waiting.values(), *self.loading.values()]
        assert not any(request.ended for request in requests), "a request that ended is still queued"
        num_tokens = sum(len(request.token_ids) for request in requests)
        assert self.num_tokens == num_tokens, f"{self.num_tokens} are not {num_tokens} tokens"
        for request in requests:
            assert request.num_planned == request.cache.num_blocks == request.num_plans == 0, request
            assert request.slot == NO_SLOT, request

    def _remove(self, request: LiveRequest) -> None:
        del (self.waiting if request.request_id in self.waiting else self.loading)[request.request_id]
        self.num_tokens -= len(request.token_ids)

    def _receives_or_loads(self, request: LiveRequest, prefix: Prefix) -> bool:
        """Start to copy items after a request's cached prefix from another engine or from the store, if this helps.

        Return True if the request waits for the items.
        """
        transfers = self._transfers
        if transfers is None:
            return False
        source = request.kv_source
        if source is not None and transfers.has_peers:
            if transfers.is_receiving(source.handle):  # for another output of the same prompt
                return True
            if self._receives(request, source, prefix, transfers):
                return True
            self._drop_source(request)
        return request.may_load and self._loads(request, prefix, transfers)

    def _receives(
        self, request: LiveRequest, source: PeerBlocks, prefix: Prefix, transfers: BlockTransfers[LiveRequest]
    ) -> bool:
        num_blocks = min(source.num_blocks, self._caches.most_cached_blocks(request))
        if prefix.num_blocks >= num_blocks:
            return False
        keys = self._caches.items_of(request, num_blocks)
        # The source has all blocks of layers that keep all tokens. For other layers, the source has only the items with
        # which a request continues after the last block.
        can_use = num_blocks == source.num_blocks or len(keys) == num_blocks
        if not can_use or not transfers.fit(keys):
            return False
        transfers.receive(request, keys)
        self._wait_for_transfer(request)
        return True

    def _loads(self, request: LiveRequest, prefix: Prefix, transfers: BlockTransfers[LiveRequest]) -> bool:
        loadable = self._caches.find(request, transfers.connector.has)
        self._caches.note_branch(request, loadable)
        keys = self._caches.items_of(request, loadable.num_blocks)
        if loadable.num_blocks <= prefix.num_blocks or not transfers.fit(keys) or not transfers.pays_to_load:
            return False
        request.may_load = False
        transfers.load(request, keys)
        self._wait_for_transfer(request)
        return True

    def _wait_for_transfer(self, request: LiveRequest) -> None:
        self.loading[request.request_id] = self.waiting.pop(request.request_id)

    def _drop_source(self, request: LiveRequest) -> None:
        """Free the blocks that another engine holds for a request. No request of this prompt will read them."""
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
            for other in self.waiting.values()
            if source is not None and other.kv_source == source and other is not request
        ]
