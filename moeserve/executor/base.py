"""The interface of executors."""

from __future__ import annotations

import select
from concurrent.futures import Future
from typing import Protocol

from moeserve.protocol import Transfer, TransferOutcome
from moeserve.scheduling.lockstep import Outcome, Round
from moeserve.worker.protocol import Loaded


class Executor(Protocol):
    """Runs the ranks of one replica. Its constructor returns when they have loaded the model and sized the KV cache."""

    name: str  # of its ranks, for error messages
    loaded: list[Loaded]  # by each rank of the replica, in order

    def submit(self, work: Round) -> Future[Outcome]:
        """Send a round to all ranks, and return at once. They run rounds in order.

        The future is completed by `progress`, with the outcome from the rank that samples or with the error that ends
        this executor. With `EngineConfig.gathers_reports` it is completed when all ranks have answered, and the outcome
        has the reports of all.
        """
        ...

    def transfer(self, work: Transfer) -> Future[TransferOutcome]:
        """Send a transfer to all ranks, and return at once. They run transfers beside rounds.

        The future is completed by `progress` when all ranks have ended it: with the blocks that all have copied, and
        the time of the slowest.
        """
        ...

    def register(self, poll: select.poll) -> None:
        """Register file descriptors, one of which becomes ready when `progress` has something to do."""
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
