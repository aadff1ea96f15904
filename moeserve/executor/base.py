"""The interface of executors."""

from __future__ import annotations

import select
from concurrent.futures import Future
from typing import Protocol

from moeserve.protocol import Transfer, TransferResult
from moeserve.scheduling.lockstep import Round, RoundResult
from moeserve.worker.protocol import Loaded


class Executor(Protocol):
    """Runs the ranks of one replica. The constructor returns when the model is loaded and the KV cache is sized."""

    name: str  # the name of the ranks in error messages
    loaded: list[Loaded]  # the reports of the replica's ranks, in order

    def submit(self, work: Round) -> Future[RoundResult]:
        """Send a round to all ranks, and return at once. The ranks run rounds in order.

        `progress` completes the future, with the result from the rank that samples or with the error that ends this
        executor. With `EngineConfig.gathers_reports`, `progress` completes the future when all ranks have answered, and
        the result has the reports of all ranks.
        """
        ...

    def transfer(self, work: Transfer) -> Future[TransferResult]:
        """Send a transfer to all ranks, and return at once. The ranks run transfers concurrently with rounds.

        `progress` completes the future when the transfer has ended on all ranks. Its result has the number of blocks
        that all ranks have copied, and the time of the slowest rank.
        """
        ...

    def register(self, poll: select.poll) -> None:
        """Register file descriptors. One of them becomes ready when `progress` has work to do."""
        ...

    def progress(self) -> None:
        """Complete the futures of rounds that have ended. Never waits.

        Raises:
            EngineError: a rank has failed.
        """
        ...

    def shutdown(self) -> None:
        """End the ranks after a round in which all replicas agreed to end. May be called twice."""
        ...
