"""`ProcessLauncher`: starts the replicas of an engine as processes of this host."""

from __future__ import annotations

from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import environment_of_rank
from moeserve.distributed.store_server import start_store
from moeserve.engine.launcher import WorkerGroup
from moeserve.engine.protocol import FromReplica
from moeserve.machine import usable_cores
from moeserve.processes.local import start_process
from moeserve.worker.protocol import RankStart


class ProcessLauncher:
    """A `Launcher` of one process for each replica, which in turn starts the processes of its ranks."""

    def __init__(self, *, show_progress: bool) -> None:
        self._show_progress = show_progress

    def start(self, config: EngineConfig) -> WorkerGroup:
        store = start_store()  # ranks meet at the store, which must outlive their processes
        group = WorkerGroup(release=store.close)
        environment = environment_of_rank(config, usable_cores())
        try:
            for rank in range(0, config.parallel.num_ranks, config.parallel.ranks_per_replica):
                first_rank = RankStart(
                    config=config,
                    rank=rank,
                    store=store.address,
                    show_progress=self._show_progress and rank == 0,
                )
                group.replicas.append(
                    start_process(
                        "moeserve.engine.replica_process:run",
                        f"engine of replica {first_rank.dp_index}",
                        first_rank,
                        FromReplica,
                        environment=environment,
                    )
                )
        except BaseException:
            group.end()
            raise
        return group

    def close(self) -> None:
        pass
