"""`Controls`: runs the controls of an engine one after another, each on all replicas."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

import msgspec

from moeserve.controls import (
    MEMORY_TAGS,
    Command,
    Control,
    ControlResult,
    EndRequests,
    EndSleep,
    FinishUpdate,
    Pause,
    Resume,
    Sleep,
    StartUpdate,
    WeightState,
)
from moeserve.engine.base import require_sendable
from moeserve.engine.launcher import ReplicaHandle
from moeserve.errors import EngineError, RequestError, WeightUpdateError


class Controls:
    """The controls that have not ended, and the state after ended ones. Only the first control is sent to replicas."""

    def __init__(self) -> None:
        self.is_paused = False
        self.weights = WeightState()
        self._called_s = time.monotonic()  # time of the last command of an update
        self._updates_drafts = False  # the last update that has begun is only of modules for drafts
        self._num_finished = 0
        self._replicas: list[ReplicaHandle] = []  # replicas that serve
        self._missing: set[int] = set()  # replicas that have not run the first control
        self._waiting: deque[tuple[Command, Future[ControlResult]]] = deque()
        self._number = 0
        self._ended: list[tuple[Future[ControlResult], ControlResult]] = []  # for the next `finish`

    @property
    def is_running(self) -> bool:
        """True if a control has not ended."""
        return bool(self._waiting)

    @property
    def has_ended(self) -> bool:
        """True if `finish` must be called."""
        return bool(self._ended)

    def finish(self) -> bool:
        """Complete the futures of controls that have ended. Return True if there are any.

        Called after the updates of earlier steps were handled.
        """
        ended, self._ended = self._ended, []
        for future, result in ended:
            future.set_result(result)
        return bool(ended)

    @property
    def seconds_open(self) -> float:
        """Seconds since the last command of the update in progress; 0: no update is in progress."""
        return time.monotonic() - self._called_s if self.weights.is_updating and not self._waiting else 0.0

    def run(self, command: Command) -> Future[ControlResult]:
        """Run a command once all earlier commands have ended. The result is an EngineError if the engine fails first.

        Raises:
            RequestError, WeightUpdateError: the command needs memory that a sleep has freed.
            RequestError: a value of the command cannot be sent to ranks.
        """
        require_sendable(command)
        if isinstance(command, Resume) and self.weights.asleep:
            raise RequestError("the engine sleeps; call wake_up, which also resumes")
        if isinstance(command, StartUpdate) and "weights" in self.weights.asleep:
            raise WeightUpdateError("the memory of the weights was freed by sleep; call wake_up(['weights']) first")
        if isinstance(command, StartUpdate) and self.weights.is_stale:
            command = msgspec.structs.replace(command, needs_all=True)
        if isinstance(command, StartUpdate):
            self._updates_drafts = command.only_drafts
        if isinstance(command, FinishUpdate):
            self._num_finished += 1
            chosen = self.weights.version if self._updates_drafts else f"update-{self._num_finished}"
            command = msgspec.structs.replace(command, version=command.version or chosen)
        ended: Future[ControlResult] = Future()
        ended.set_running_or_notify_cancel()
        self._waiting.append((command, ended))
        if len(self._waiting) == 1:
            self._send_first()
        return ended

    def begin(self, replicas: Iterable[ReplicaHandle]) -> None:
        """Bring new replicas into the state of the previous replicas. Called before requests are sent to new replicas.

        New replicas have the checkpoint's weights. If the previous replicas had other weights, the weights are stale
        now.
        """
        self._replicas, self._missing = list(replicas), set()
        is_stale = self.weights.is_stale or self.weights.differs
        self.weights = msgspec.structs.replace(self.weights, is_updating=False, is_stale=is_stale)
        if self.is_paused:
            self._send(Pause(mode="keep"))

    def resend(self) -> None:
        """Send again the control that previous replicas did not end.

        Called after requests were sent to new replicas.
        """
        if self._waiting:
            self._send_first()

    def note(self, replica: int, results: Iterable[ControlResult]) -> None:
        """Note that a replica has run controls."""
        for result in results:
            if result.number != self._number or replica not in self._missing:
                continue  # the control brought a new replica into the state of the previous ones
            self._missing.discard(replica)
            if not self._missing:
                self._end_first(result)

    def fail(self, error: str, *, only_weights: bool = False) -> None:
        """End controls with an EngineError.

        Args:
            only_weights: end only controls that concern weights, which new replicas do not continue.
        """
        waiting, self._waiting = self._waiting, deque()
        self._missing.clear()
        for command, ended in waiting:
            if only_weights and isinstance(command, Pause | Resume | EndRequests | EndSleep):
                self._waiting.append((command, ended))
            else:
                ended.set_exception(EngineError(error))

    def _end_first(self, result: ControlResult) -> None:
        command, ended = self._waiting.popleft()
        outcome, asleep = result.outcome, self.weights.asleep
        match command:
            case Pause():
                self.is_paused = True
            case Resume():
                self.is_paused = False
            case Sleep(level=level):
                asleep = MEMORY_TAGS if level == 2 or "weights" in asleep else ("kv_cache",)
            case EndSleep(tags=tags):
                asleep = tuple(tag for tag in asleep if tag not in tags)
            case FinishUpdate() if outcome is not None and not outcome.error:
                differs = not command.is_checkpoint
                self.weights = msgspec.structs.replace(self.weights, version=command.version, differs=differs)
        if outcome is not None:
            is_stale = not outcome.is_whole and not outcome.is_open
            self.weights = msgspec.structs.replace(self.weights, is_updating=outcome.is_open, is_stale=is_stale)
            self._called_s = time.monotonic()
        self.weights = msgspec.structs.replace(self.weights, asleep=asleep)
        self._ended.append((ended, result))
        if self._waiting:
            self._send_first()

    def _send_first(self) -> None:
        self._send(self._waiting[0][0])
        self._missing = set(range(len(self._replicas)))

    def _send(self, command: Command) -> None:
        self._number += 1
        for replica in self._replicas:
            replica.send(Control(self._number, command))
