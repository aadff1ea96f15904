"""`ProcessLauncher`: starts the replicas of an engine as processes of this host."""

from __future__ import annotations

from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import environment_of_rank
from moeserve.distributed.store_server import start_store
from moeserve.engine.hang_watch import HangWatch, RecordWatch, Watchable
from moeserve.engine.launcher import WorkerGroup
from moeserve.engine.protocol import FromReplica
from moeserve.machine import usable_cores
from moeserve.processes.local import start_process
from moeserve.processes.progress_records import ProgressRecords
from moeserve.worker.protocol import RankStart, rank_name


class ProcessLauncher:
    """A `Launcher` of one process for each replica, which in turn starts the processes of its ranks."""

    def __init__(self, *, show_progress: bool) -> None:
        self._show_progress = show_progress

    def start(self, config: EngineConfig) -> WorkerGroup:
        store = start_store()  # ranks meet at the store, which must outlive their processes
        records = ProgressRecords(config.parallel.num_ranks + config.parallel.data_parallel_size)

        def release() -> None:
            store.close()
            records.close()

        group = WorkerGroup(release=release, watch=watch_of(config, records) if config.failure.detect_hangs else None)
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
                        engine_name(first_rank.dp_index),
                        first_rank,
                        FromReplica,
                        environment=environment,
                        records_fd=records.fd,
                    )
                )
        except BaseException:
            group.end()
            raise
        return group

    def close(self) -> None:
        pass


def watch_of(config: EngineConfig, records: ProgressRecords) -> RecordWatch:
    """Return the watch over the records of all ranks, followed by those of the engines of all replicas."""
    num_ranks, num_own = config.parallel.num_ranks, config.parallel.ranks_per_replica
    ranks = [Watchable(rank_name(config, rank), engine=num_ranks + rank // num_own) for rank in range(num_ranks)]
    engines = [Watchable(engine_name(replica)) for replica in range(config.parallel.data_parallel_size)]
    return RecordWatch(HangWatch([*ranks, *engines], judges_hangs=config.compute.device == "cpu"), records.read)


def engine_name(replica: int) -> str:
    """Return the name of the process of a replica's engine in messages."""
    return f"engine of replica {replica}"
