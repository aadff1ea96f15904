"""The interfaces between an engine and its replicas, wherever they run, and `WorkerGroup`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from moeserve.config.engine_config import EngineConfig
from moeserve.engine.hang_watch import RecordWatch
from moeserve.engine.protocol import FromReplica, ToReplica
from moeserve.processes.failures import FailureReport
from moeserve.processes.supervision import SECONDS_TO_COLLECT, Watched, WatchedProcess, collect_failures, end_all
from moeserve.worker.protocol import RankStart


class ReplicaHandle(Watched, Protocol):
    """One replica as the engine sees it: `LocalReplica` in this process, or a `WatchedProcess` on any host."""

    def send(self, message: ToReplica) -> None:
        """Send a message without waiting."""
        ...

    def receive(self) -> list[FromReplica]:
        """Return the messages that have arrived since the last call, without waiting."""
        ...


class Starter(Protocol):
    """Starts replicas beside others that keep their processes."""

    @property
    def has_lost_host(self) -> bool:
        """True if a host of ranks does not answer, so that these ranks cannot be started there again."""
        ...

    def begin_epoch(self, config: EngineConfig, survivors: Sequence[int]) -> None:
        """Close the store where ranks met, so that ranks that still wait there fail, and open another store.

        Args:
            config: the config from now on.
            survivors: indices so far of the replicas that are left, ascending. They are numbered anew in this order.
        """
        ...

    def message(self, replica: int, epoch: int, num_blocks: int, chunk_size: int | None) -> RankStart:
        """Return the start message of a replica's first rank."""
        ...

    def watch(self) -> RecordWatch | None:
        """Return a watch over the processes of all replicas, without earlier records. None: hangs are not detected."""
        ...

    def start(self, replica: int, epoch: int, num_blocks: int, chunk_size: int | None) -> ReplicaHandle:
        """Start the replica with this index. Its ranks meet the other ranks at the store that was opened last.

        Args:
            num_blocks: KV cache blocks of each rank.
            chunk_size: most tokens of a step; None: that of the config.
        """
        ...


class WorkerGroup:
    """The replicas of an engine, and their processes. They are started together and ended together."""

    def __init__(
        self,
        replicas: Sequence[ReplicaHandle] = (),
        *,
        seconds_to_collect: float = SECONDS_TO_COLLECT,
        release: Callable[[], None] = lambda: None,
        reports_hangs: bool = False,
        watch: RecordWatch | None = None,
        starter: Starter | None = None,
    ) -> None:
        """
        Args:
            replicas: replicas that have started; others are appended.
            seconds_to_collect: time by which consequences of a failure may be noticed before its cause.
            release: frees what the processes have used, once all of them have ended.
            reports_hangs: True if a replica that hangs fails by itself, so that silence is no sign of a failure.
            watch: finds processes that are stopped or hang.
            starter: starts single replicas again. None: all replicas can only be started together.
        """
        self.replicas: list[ReplicaHandle] = list(replicas)  # by dp rank
        self.ranks: list[WatchedProcess[Any]] = []  # ranks that no replica watches
        self.reports_hangs = reports_hangs
        self.watch = watch
        self.starter = starter
        self._seconds_to_collect = seconds_to_collect
        self._release = release
        self._owner = os.getpid()

    @property
    def members(self) -> list[Watched]:
        return [*self.ranks, *self.replicas]

    @property
    def has_failed(self) -> bool:
        return any(member.failures() for member in self.members)

    def collect_failures(self) -> list[FailureReport]:
        """Return the failures that are known shortly after the first failure."""
        return collect_failures(self.members, seconds=self._seconds_to_collect)

    def end(self, patience_s: float = 0.0) -> None:
        """Wait for the processes to exit, then kill those that have not. No process is left. May be called twice."""
        if os.getpid() == self._owner:  # a fork of the owner must leave the processes alone
            end_all(self.replicas, patience_s=patience_s)
            end_all(self.ranks)
            self._release()


class Launcher(Protocol):
    """Starts the replicas of an engine: `ThreadLauncher`, `ProcessLauncher` or `RayLauncher`."""

    def start(self, config: EngineConfig) -> WorkerGroup:
        """Start all replicas. They may still be loading the model when this returns.

        Raises:
            CheckpointError, SettingsError, EngineError: the replicas cannot be started.
        """
        ...

    def close(self) -> None:
        """Release the resources that all worker groups share, after the last group has ended."""
        ...
