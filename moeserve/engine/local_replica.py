"""`LocalReplica`: a replica of one rank in this process; and `ThreadLauncher`, which starts it."""

from __future__ import annotations

import select
from typing import ClassVar

from moeserve.config.engine_config import EngineConfig
from moeserve.engine.base import new_replica, ready_of
from moeserve.engine.driver import Driver, StepTimeoutError
from moeserve.engine.launcher import WorkerGroup
from moeserve.engine.protocol import FromReplica, Recover, ToReplica
from moeserve.executor.uniproc import UniprocExecutor
from moeserve.interrupts import interrupts_allowed
from moeserve.processes.failures import FailureReport, report_of
from moeserve.protocol import ReplicaMessage


class LocalReplica:
    """A `ReplicaHandle` whose loop runs inside `receive`, while its rank computes in a thread."""

    name: ClassVar[str] = "rank 0"
    ends_silently: ClassVar[bool] = False
    unsent_fd: ClassVar[None] = None

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        """Load the model.

        Raises:
            CheckpointError, SettingsError: raised by the rank.
        """
        self.executor = UniprocExecutor(config, show_progress=show_progress)
        self.replica = new_replica(config, self.executor.loaded)
        self.fds = [self.executor.fd]
        self._step_timeout_s = config.failure.step_timeout
        self._inbox: list[ReplicaMessage] = []
        self._outbox: list[FromReplica] = [ready_of(self.executor.loaded)]
        self._reports: list[FailureReport] = []
        self._is_killed = False
        self._driver = Driver(
            self.replica, self.executor, self._outbox.append, self._step_timeout_s, config.failure.load_timeout
        )

    @property
    def has_messages(self) -> bool:
        return bool(self._inbox or self._outbox) or self._driver.is_late

    def send(self, message: ToReplica) -> None:
        assert not isinstance(message, Recover), "a thread cannot be replaced"
        self._inbox.append(message)

    def receive(self) -> list[FromReplica]:
        if self._is_running:
            self._advance()
        received, self._outbox = self._outbox, []
        return received

    def flush(self, timeout_s: float = 0.0) -> None:
        """Do nothing: the next `receive` handles what was sent."""

    def failures(self) -> list[FailureReport]:
        return self._reports

    def wait(self, timeout_s: float) -> bool:
        """Run the loop to its end, however long that takes, unless the timeout is 0: a busy thread cannot be killed."""
        while timeout_s > 0 and self._is_running:
            self._advance()
            if self._is_running:
                poll = select.poll()
                self.executor.register(poll)
                with interrupts_allowed():
                    poll.poll(self._step_timeout_s * 1000)
        return not self._is_running

    def kill(self) -> None:
        self._is_killed = True

    def close(self) -> None:
        self.executor.shutdown()

    @property
    def _is_running(self) -> bool:
        return self._driver.wait is not None and not self._reports and not self._is_killed

    def _advance(self) -> None:
        """Let the loop handle the messages that were sent, and the results of the rank since the last call."""
        try:
            events = self._driver.events(self._inbox)
            if events or self._driver.is_late or not self._driver.has_rounds:
                self._inbox = []
                self._driver.handle(events, self._outbox.append)
        except Exception as error:
            if isinstance(error, StepTimeoutError):
                self.executor.abandon()
            self._reports = [report_of(error, self.name)]


class ThreadLauncher:
    """A `Launcher` of a replica whose only rank is a thread of this process."""

    def __init__(self, *, show_progress: bool) -> None:
        self._show_progress = show_progress

    def start(self, config: EngineConfig) -> WorkerGroup:
        return WorkerGroup([LocalReplica(config, show_progress=self._show_progress)], reports_hangs=True)

    def close(self) -> None:
        pass
