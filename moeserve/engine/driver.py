"""Runs the loop of a `Replica` with an executor."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from moeserve.errors import DistributedError
from moeserve.executor.base import Executor
from moeserve.protocol import Delivery, ReplicaMessage, TransferResult
from moeserve.scheduling.lockstep import RoundResult
from moeserve.scheduling.replica import Events, Replica, Submit, Transfer, Wait


class StepTimeoutError(DistributedError):
    """The ranks have not finished a step within `step_timeout`."""


class Driver:
    """Performs the effects of a replica's loop, and enforces the timeout of its steps."""

    def __init__(
        self,
        replica: Replica,
        executor: Executor,
        deliver: Callable[[Delivery], object],
        step_timeout_s: float,
        load_timeout_s: float | None = None,
    ) -> None:
        """Run the generator `Replica.run` until it waits for the first time, and perform the effects that it yields.

        Args:
            load_timeout_s: limit of a round that may load weights, if this is longer than `step_timeout_s`.
            deliver: receives the deliveries (such as tokens) that the generator yields during this call. The function
                is not stored, because a reference to it would keep the owner of this object alive.
        """
        self._executor = executor
        self._step_timeout_s = step_timeout_s
        self._load_timeout_s = max(step_timeout_s, load_timeout_s or 0.0)
        self._runs_command = False  # the last round may run a command
        self._loop = replica.run()
        self._futures: deque[Future[RoundResult]] = deque()  # results of the rounds in flight
        self._transfers: list[Future[TransferResult]] = []  # transfers in flight
        self._last_result_s = time.monotonic()  # time of the last result, or of the first round in flight if later
        self.wait = self._perform(None, deliver)  # None: the loop has ended

    @property
    def has_rounds(self) -> bool:
        """True if rounds are in flight."""
        return bool(self._futures)

    @property
    def is_late(self) -> bool:
        """True if rounds are in flight, and none has ended within the timeout."""
        timeout_s = self._load_timeout_s if self._runs_command else self._step_timeout_s
        return bool(self._futures) and time.monotonic() - self._last_result_s > timeout_s

    def events(self, messages: list[ReplicaMessage]) -> Events:
        """Return messages with the rounds and transfers that have ended since the last call.

        Raises:
            Exception: the error of a failed round.
        """
        self._executor.progress()
        transfers = [future.result() for future in self._transfers if future.done()]
        self._transfers = [future for future in self._transfers if not future.done()]
        return Events(messages, completed(self._futures), transfers)

    def handle(self, events: Events, deliver: Callable[[Delivery], object]) -> None:
        """Pass events to the replica's loop, and perform its effects until it waits again.

        Raises:
            StepTimeoutError: rounds are in flight, and none has ended within the timeout.
        """
        if events.results or not self._futures:
            self._last_result_s = time.monotonic()
        elif self.is_late:
            raise StepTimeoutError(
                f"{self._executor.name}: no step was finished for {self._step_timeout_s} s (step_timeout)"
            )
        self.wait = self._perform(events, deliver)

    def _perform(self, events: Events | None, deliver: Callable[[Delivery], object]) -> Wait | None:
        answer = events
        while True:
            try:
                effect = self._loop.send(answer)
            except StopIteration:
                return None
            answer = None
            match effect:
                case Submit(work=work):
                    self._runs_command = work.command is not None
                    self._futures.append(self._executor.submit(work))
                case Transfer(work=transfer):
                    self._transfers.append(self._executor.transfer(transfer))
                case Delivery():
                    deliver(effect)
                case Wait():
                    return effect


def completed(futures: deque[Future[RoundResult]]) -> list[RoundResult]:
    """Remove the oldest rounds that have ended, and return their results.

    Raises the error of a failed round once the results of all earlier rounds have been returned.
    """
    results: list[RoundResult] = []
    while futures and futures[0].done() and not (results and futures[0].exception()):
        results.append(futures.popleft().result())
    return results
