"""The processes that serve as one engine, and those of one host. Knows how they start and end, not what they say."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed import TCPStore

from moeserve.config.environment import environment_of_rank
from moeserve.config.settings import EngineConfig
from moeserve.distributed.store import start_store
from moeserve.engine.protocol import EngineMessage, EngineStart
from moeserve.machine import usable_cores
from moeserve.processes.failures import FailureReport
from moeserve.processes.local import start_process
from moeserve.processes.supervision import WatchedProcess, collect_failures, end_all
from moeserve.worker.protocol import RankStart, rank_name


class WorkerGroup(Protocol):
    """The processes of all replicas, started together and ended together."""

    @property
    def engines(self) -> Sequence[WatchedProcess[EngineMessage]]:
        """One for each replica, by dp rank."""
        ...

    @property
    def members(self) -> Sequence[WatchedProcess[Any]]:
        """All that are watched from here, the engines among them."""
        ...

    def collect_failures(self) -> list[FailureReport]:
        """After a first sign of one: all that can be known of its cause."""
        ...

    def end(self, patience_s: float = 0.0) -> None:
        """Gives them time to go by themselves, then ends them. Nothing is left. May be called twice."""
        ...


class LocalWorkerGroup:
    """See `WorkerGroup`. One process for each replica, which starts those of its further ranks itself."""

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        # Where the ranks meet. Its port is open from here to the end of the processes.
        self._store: TCPStore | None = start_store()
        key = secrets.token_hex(16)
        environment = environment_of_rank(config, usable_cores())
        self.engines: list[WatchedProcess[EngineMessage]] = []
        self.members = self.engines
        try:
            for rank in range(0, config.num_ranks, config.tensor_parallel_size):
                driver = RankStart(
                    config=config, rank=rank, store_host="127.0.0.1", store_port=self._store.port, store_key=key
                )
                child = start_process(
                    "moeserve.engine.process:run",
                    rank_name(config, rank),
                    EngineStart(driver=driver, show_progress=show_progress and rank == 0),
                    EngineMessage,
                    environment=environment,
                )
                self.engines.append(child)
        except BaseException:
            self.end()
            raise

    def collect_failures(self) -> list[FailureReport]:
        return collect_failures(self.members)

    def end(self, patience_s: float = 0.0) -> None:
        end_all(self.engines, patience_s=patience_s)
        self._store = None
