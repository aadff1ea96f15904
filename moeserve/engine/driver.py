"""Runs the loop of a `Replica` with an executor. Engines differ in where they wait and in who receives updates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from moeserve.errors import DistributedError
from moeserve.executor.base import Executor
from moeserve.protocol import ReplicaMessage, TransferOutcome
from moeserve.scheduling.lockstep import Outcome
from moeserve.scheduling.replica import Deliver, Events, Replica, Submit, Transfer, Wait


class StepTimeoutError(DistributedError):
    """The ranks have not finished a step within `step_timeout`."""


@dataclass(frozen=True)
class Ended:
    """Outcomes of rounds in order, and of transfers, that have ended."""

    outcomes: list[Outcome]
    transfers: list[TransferOutcome]

    def __bool__(self) -> bool:
        return bool(self.outcomes or self.transfers)


class Driver:
    """Performs the effects of a replica's loop, and enforces the timeout of its steps."""

    def __init__(
        self, replica: Replica, executor: Executor, deliver: Callable[[Deliver], None], step_timeout_s: float
    ) -> None:
        """Run the loop, and perform its effects, until it waits for the first time.

        Args:
            deliver: receives what the loop delivers during this call. It is not stored, because that would keep the
                engine which owns this object alive.
        """
        self._executor = executor
        self._step_timeout_s = step_timeout_s
        self._loop = replica.run()
        self._futures: deque[Future[Outcome]] = deque()  # outcomes of the rounds in flight
        self._transfers: list[Future[TransferOutcome]] = []  # in flight
        self._last_outcome_s = time.monotonic()  # time of the last outcome, or of the first round in flight if later
        self.wait = self._perform(None, deliver)  # None: the loop has ended

    @property
    def has_rounds(self) -> bool:
        """True if rounds are in flight."""
        return bool(self._futures)

    def ended(self) -> Ended:
        """Return the rounds and transfers that have ended since the last call. Raises the error of a failed round."""
        self._executor.progress()
        transfers = [future.result() for future in self._transfers if future.done()]
        self._transfers = [future for future in self._transfers if not future.done()]
        return Ended(completed(self._futures), transfers)

    def handle(self, messages: list[ReplicaMessage], ended: Ended, deliver: Callable[[Deliver], None]) -> None:
        """Pass events to the replica's loop, and perform its effects until it waits again.

        Raises:
            StepTimeoutError: rounds are in flight, and none has ended within the timeout.
        """
        if ended.outcomes or not self._futures:
            self._last_outcome_s = time.monotonic()
        elif time.monotonic() - self._last_outcome_s > self._step_timeout_s:
            raise StepTimeoutError(
                f"{self._executor.name}: no step was finished for {self._step_timeout_s} s (step_timeout)"
            )
        self.wait = self._perform(Events(messages, ended.outcomes, ended.transfers), deliver)

    def _perform(self, events: Events | None, deliver: Callable[[Deliver], None]) -> Wait | None:
        answer = events
        while True:
            try:
                effect = self._loop.send(answer)
            except StopIteration:
                return None
            answer = None
            match effect:
                case Submit(work=work):
                    self._futures.append(self._executor.submit(work))
                case Transfer(work=transfer):
                    self._transfers.append(self._executor.transfer(transfer))
                case Deliver():
                    deliver(effect)
                case Wait():
                    return effect


def completed(futures: deque[Future[Outcome]]) -> list[Outcome]:
    """Remove the oldest rounds that have ended, and return their outcomes.

    Raises the error of a failed round once the outcomes of all earlier rounds have been returned.
    """
    outcomes: list[Outcome] = []
    while futures and futures[0].done() and not (outcomes and futures[0].exception()):
        outcomes.append(futures.popleft().result())
    return outcomes
