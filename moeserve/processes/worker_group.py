"""The processes of all replicas of an engine, wherever they run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from moeserve.processes.failures import FailureReport
from moeserve.processes.supervision import SECONDS_TO_COLLECT, WatchedProcess, collect_failures, end_all


class WorkerGroup:
    """Processes that are started together and ended together. The code that starts a process appends it."""

    def __init__(
        self, seconds_to_collect: float = SECONDS_TO_COLLECT, release: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            seconds_to_collect: how long consequences of a failure may be noticed before its cause.
            release: frees what the processes have used, once they have ended.
        """
        self.engines: list[WatchedProcess[Any]] = []  # one for each replica, by dp rank
        self.ranks: list[WatchedProcess[Any]] = []  # those that no engine watches
        self._seconds_to_collect = seconds_to_collect
        self._release = release
        self._owner = os.getpid()

    @property
    def members(self) -> list[WatchedProcess[Any]]:
        return [*self.ranks, *self.engines]

    @property
    def has_failed(self) -> bool:
        return any(member.failures() for member in self.members)

    def collect_failures(self) -> list[FailureReport]:
        """Return all failures that are known soon after the first sign of one."""
        return collect_failures(self.members, seconds=self._seconds_to_collect)

    def end(self, patience_s: float = 0.0) -> None:
        """Wait for the processes to exit, then kill those that have not. None is left. May be called twice."""
        if os.getpid() == self._owner:  # a fork of the owner must leave them alone
            end_all(self.engines, patience_s=patience_s)
            end_all(self.ranks)
            self._release()
