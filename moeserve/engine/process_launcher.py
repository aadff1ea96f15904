"""`ProcessLauncher`: starts the replicas of an engine as processes of this host."""

from __future__ import annotations

from moeserve.addresses import StoreAddress
from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import environment_of_rank
from moeserve.distributed.store_server import start_store
from moeserve.engine.hang_watch import HangWatch, RecordWatch, Watchable
from moeserve.engine.launcher import ReplicaHandle, WorkerGroup
from moeserve.engine.protocol import FromReplica
from moeserve.machine import usable_cores
from moeserve.processes.local import start_process
from moeserve.processes.progress_records import ProgressRecords
from moeserve.worker.protocol import RankStart, rank_name


class ProcessStarter:
    """A `Starter` of processes on this host, with what they share: the store where ranks meet, and progress records."""

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        self._config, self._show_progress = config, show_progress
        self._environment = environment_of_rank(config, usable_cores())
        self._store = start_store()  # must outlive the ranks' processes
        self.records = ProgressRecords(config.parallel.num_ranks + config.parallel.data_parallel_size)

    def new_store(self) -> StoreAddress:
        self._store.close()
        self._store = start_store()
        return self._store.address

    def start(self, replica: int, epoch: int = 0, num_blocks: int | None = None) -> ReplicaHandle:
        first_rank = RankStart(
            config=self._config,
            rank=replica * self._config.parallel.ranks_per_replica,
            store=self._store.address,
            show_progress=self._show_progress and replica == 0 and epoch == 0,
            epoch=epoch,
            num_blocks=num_blocks,
        )
        return start_process(
            "moeserve.engine.replica_process:run",
            engine_name(replica),
            first_rank,
            FromReplica,
            environment=self._environment,
            records_fd=self.records.fd,
        )

    def close(self) -> None:
        self._store.close()
        self.records.close()


class ProcessLauncher:
    """A `Launcher` of one process for each replica, which in turn starts the processes of its ranks."""

    def __init__(self, *, show_progress: bool) -> None:
        self._show_progress = show_progress

    def start(self, config: EngineConfig) -> WorkerGroup:
        starter = ProcessStarter(config, show_progress=self._show_progress)
        watch = watch_of(config, starter.records) if config.failure.detect_hangs else None
        group = WorkerGroup(release=starter.close, watch=watch, starter=starter)
        try:
            for replica in range(config.parallel.data_parallel_size):
                group.replicas.append(starter.start(replica))
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
    judges_hangs = config.compute.device == "cpu"
    return RecordWatch(lambda: HangWatch([*ranks, *engines], judges_hangs=judges_hangs), records)


def engine_name(replica: int) -> str:
    """Return the name of the process of a replica's engine in messages."""
    return f"engine of replica {replica}"
