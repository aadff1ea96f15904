"""Passes the results of rounds and of transfers to the thread that runs the engine."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import msgspec

from moeserve.processes.wake_up import WakeUp
from moeserve.protocol import TransferResult
from moeserve.scheduling.lockstep import RoundResult


class TransferAnswers:
    """Completes the future of a transfer once it has ended on all ranks of the replica."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._futures: dict[int, Future[TransferResult]] = {}
        self._answers: dict[int, list[TransferResult]] = {}  # by number of the transfer

    def expect(self, number: int) -> Future[TransferResult]:
        """Return the future of a transfer that is sent to all ranks."""
        self._futures[number], self._answers[number] = Future(), []
        return self._futures[number]

    def add(self, answer: TransferResult) -> None:
        """Add one rank's answer to a transfer. The answer of the last rank completes the future."""
        answers = self._answers[answer.number]
        answers.append(answer)
        if len(answers) == self._num_ranks:
            del self._answers[answer.number]
            fewest = min(answers, key=lambda each: each.num_copied)
            slowest_s = max(each.seconds for each in answers)
            self._futures.pop(answer.number).set_result(msgspec.structs.replace(fewest, seconds=slowest_s))


class ResultQueue:
    """Completes the futures of rounds in order, in the thread that calls `complete`."""

    def __init__(self, num_ranks: int = 1) -> None:
        """
        Args:
            num_ranks: the number of ranks that answer each transfer.
        """
        self._pending: deque[Future[RoundResult]] = deque()
        self._ended: deque[RoundResult | BaseException] = deque()  # results of the oldest rounds, in order
        self._transfers = TransferAnswers(num_ranks)
        self._ended_transfers: deque[TransferResult] = deque()  # one answer of one rank each
        self._wake_up = WakeUp()

    @property
    def fd(self) -> int:
        """File descriptor that is readable when `complete` has work to do."""
        return self._wake_up.fd

    def expect(self) -> Future[RoundResult]:
        """Return the future of the next round."""
        self._pending.append(Future())
        return self._pending[-1]

    def add(self, ended: RoundResult | BaseException) -> None:
        """Add the result of the oldest round that has no result yet. Any thread may call this."""
        self._ended.append(ended)
        self._wake_up.wake()

    def expect_transfer(self, number: int) -> Future[TransferResult]:
        """Return the future of a transfer that is about to be sent to all ranks."""
        return self._transfers.expect(number)

    def add_transfer(self, ended: TransferResult) -> None:
        """Add one rank's answer to a transfer. Any thread may call this."""
        self._ended_transfers.append(ended)
        self._wake_up.wake()

    def complete(self) -> None:
        """Complete the futures of rounds with a result, and of transfers that have ended on all ranks."""
        self._wake_up.take()  # clear the signal first, so that a result added from now on signals again
        while self._ended:
            future, ended = self._pending.popleft(), self._ended.popleft()
            if isinstance(ended, RoundResult):
                future.set_result(ended)
            else:
                future.set_exception(ended)
        while self._ended_transfers:
            self._transfers.add(self._ended_transfers.popleft())
