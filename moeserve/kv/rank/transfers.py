"""Asynchronous transfers of KV cache items on one rank."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import msgspec
import torch

from moeserve.kv.rank.receiver import BlockReceiver, Cancellation
from moeserve.kv.rank.sender import BlockSender
from moeserve.kv.rank.store import KVStore
from moeserve.kv.route_store import RouteStore
from moeserve.protocol import CancelReceive, KeepItems, ReceiveItems, StoreTransfer, Transfer, TransferResult

logger = logging.getLogger(__name__)

NUM_RECEIVING_THREADS = 8


class Transfers:
    """Background threads that run transfers. Results are sent in the order in which the transfers end."""

    def __init__(
        self,
        store: KVStore | None,
        sender: BlockSender | None,
        receiver: BlockReceiver | None,
        routes: RouteStore | None,
        send: Callable[[TransferResult], None],
    ) -> None:
        """
        Args:
            store: the store behind the KV cache. Its transfers run one after the other.
            sender, receiver: for items sent to and received from other engines.
            routes: experts of cached tokens, which are copied with blocks; its memory is one of the items' tensors.
            send: called with the result of each transfer, in any thread.
        """
        self._sender, self._receiver, self._routes, self._send = sender, receiver, routes, send
        self._receiving: dict[int, Cancellation] = {}  # by number of the transfer
        self._of_store: _Queue | None = None
        self._received: _Queue | None = None
        if store is not None:
            self._of_store = _Queue(lambda transfer, _: self._with_routes(transfer, store.run(transfer)), send, 1)
        if receiver is not None:
            self._received = _Queue(self._receive, send, NUM_RECEIVING_THREADS)

    def submit(self, transfer: Transfer) -> None:
        if self._routes is not None and isinstance(transfer, StoreTransfer | KeepItems) and transfer.routes:
            self._routes.write_blocks(transfer.places, transfer.routes)
        match transfer:
            case StoreTransfer():
                assert self._of_store is not None
                self._of_store.put(transfer)
            case KeepItems():
                assert self._sender is not None
                self._sender.keep(transfer, self._send)
            case ReceiveItems():
                assert self._received is not None
                self._receiving[transfer.number] = Cancellation()
                self._received.put(transfer)
            case CancelReceive():
                if (receiving := self._receiving.get(transfer.receive)) is not None:
                    receiving.set()
                self._send(TransferResult(number=transfer.number, num_copied=0, seconds=0.0))

    def close(self) -> None:
        """Stop listening, and let all threads end soon. May be called twice."""
        for receiving in list(self._receiving.values()):
            receiving.set()
        for queue in (self._of_store, self._received):
            if queue is not None:
                queue.close()
        if self._sender is not None:
            self._sender.close()

    def _receive(self, transfer: ReceiveItems, submitted: float) -> TransferResult:
        assert self._receiver is not None
        try:
            received = self._receiver.run(transfer, submitted, self._receiving[transfer.number])
            return self._with_routes(transfer, received)
        finally:
            del self._receiving[transfer.number]

    def _with_routes(self, transfer: StoreTransfer | ReceiveItems, result: TransferResult) -> TransferResult:
        """Return the result of a transfer with the routes of the blocks that it has written to the cache."""
        if self._routes is None or (isinstance(transfer, StoreTransfer) and not transfer.is_load):
            return result
        return msgspec.structs.replace(result, routes=self._routes.read_blocks(transfer.places[: result.num_copied]))


class _Queue:
    """A queue of transfers, and the threads that run them."""

    def __init__(
        self,
        run: Callable[[Any, float], TransferResult],
        send: Callable[[TransferResult], None],
        num_threads: int,
    ) -> None:
        """
        Args:
            run: runs a transfer, given the time by `time.monotonic` at which it was queued.
        """
        self._queue: SimpleQueue[tuple[Any, float] | None] = SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            threading.Thread(target=_run_all, args=(self._queue, run, send), name="kv transfers", daemon=True).start()

    def put(self, transfer: Any) -> None:
        self._queue.put((transfer, time.monotonic()))

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._queue.put(None)


def _run_all(
    queue: SimpleQueue[tuple[Any, float] | None],
    run: Callable[[Any, float], TransferResult],
    send: Callable[[TransferResult], None],
) -> None:
    torch.set_num_threads(1)  # only for this thread, so that it leaves the cores to steps
    while (queued := queue.get()) is not None:
        transfer, submitted = queued
        try:
            result = run(transfer, submitted)
        except Exception:
            logger.exception("KV cache blocks could not be copied")
            seconds = time.monotonic() - submitted
            result = TransferResult(number=transfer.number, num_copied=0, seconds=seconds)
        send(result)
