"""Transfers of KV cache blocks on one rank, beside its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from moeserve.protocol import BlockTransfer, KeepBlocks, ReceiveBlocks, Transfer, TransferOutcome
from moeserve.worker.kv_receiver import BlockReceiver
from moeserve.worker.kv_sender import BlockSender
from moeserve.worker.kv_store import KVStore

NUM_RECEIVING_THREADS = 4  # so that an engine that hangs does not hold up the blocks of others


class Transfers:
    """Starts transfers, and sends their ends in any order."""

    def __init__(
        self,
        store: KVStore | None,
        sender: BlockSender | None,
        receiver: BlockReceiver | None,
        send: Callable[[TransferOutcome], None],
    ) -> None:
        """
        Args:
            store: behind the KV cache. Its transfers run one after the other.
            sender, receiver: to and from other engines.
            send: takes the end of each transfer, in any thread.
        """
        self._sender, self._send = sender, send
        self._of_store = _queue(store.run, send, 1) if store is not None else None
        self._received = _queue(receiver.run, send, NUM_RECEIVING_THREADS) if receiver is not None else None

    def submit(self, transfer: Transfer) -> None:
        match transfer:
            case BlockTransfer():
                assert self._of_store is not None
                self._of_store.put(transfer)
            case KeepBlocks():
                assert self._sender is not None
                self._sender.keep(transfer, self._send)
            case ReceiveBlocks():
                assert self._received is not None
                self._received.put(transfer)


def _queue(
    run: Callable[[Any], TransferOutcome], send: Callable[[TransferOutcome], None], num_threads: int
) -> SimpleQueue[Any]:
    """Return a queue of transfers that threads run."""
    queue: SimpleQueue[Any] = SimpleQueue()

    def work() -> None:
        torch.set_num_threads(1)  # of this thread: the others compute
        while True:
            send(run(queue.get()))

    for _ in range(num_threads):
        threading.Thread(target=work, name="kv transfers", daemon=True).start()
    return queue
