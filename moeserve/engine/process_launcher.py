"""`ProcessLauncher`: starts the replicas of an engine as processes of this host."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import environment_of_rank
from moeserve.distributed.store_server import start_store
from moeserve.engine.hang_watch import HangWatch, RecordWatch, Watchable
from moeserve.engine.launcher import ReplicaHandle, WorkerGroup
from moeserve.engine.protocol import FromReplica
from moeserve.machine import usable_cores
from moeserve.processes.local import start_process
from moeserve.processes.progress_records import ProgressRecords
from moeserve.worker.protocol import RankStart


class ProcessStarter:
    """A `Starter` of processes on this host, with what they share: the store where ranks meet, and progress records."""

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        num_replicas = config.parallel.data_parallel_size
        self._config, self._show_progress = config, show_progress
        self._seats = list(range(num_replicas))  # of the replicas, see `RankStart`
        self._environment = environment_of_rank(config, usable_cores())
        self._store = start_store()  # must outlive the ranks' processes
        self._records = ProgressRecords(num_replicas * (1 + config.parallel.ranks_per_replica))

    def begin_epoch(self, config: EngineConfig, survivors: Sequence[int]) -> None:
        self._config, self._seats = config, [self._seats[replica] for replica in survivors]
        self._store.close()
        self._store = start_store()

    def message(self, replica: int, epoch: int, num_blocks: int | None) -> RankStart:
        return RankStart(
            config=self._config,
            rank=replica * self._config.parallel.ranks_per_replica,
            store=self._store.address,
            show_progress=self._show_progress and replica == 0 and epoch == 0,
            epoch=epoch,
            num_blocks=num_blocks,
            seat=self._seats[replica],
        )

    def start(self, replica: int, epoch: int = 0, num_blocks: int | None = None) -> ReplicaHandle:
        return start_process(
            "moeserve.engine.replica_process:run",
            engine_name(self._seats[replica]),
            self.message(replica, epoch, num_blocks),
            FromReplica,
            environment=self._environment,
            records_fd=self._records.fd,
        )

    def watch(self) -> RecordWatch | None:
        if not self._config.failure.detect_hangs:
            return None
        self._records.clear()  # some may be of processes that have ended
        firsts = [self.message(replica, 0, None) for replica in range(len(self._seats))]
        ranks = [
            (first.of_rank(rank), index) for index, first in enumerate(firsts) for rank in first.numbers_of_replica
        ]
        processes = [Watchable(start.name, engine=len(ranks) + index) for start, index in ranks]
        processes += [Watchable(engine_name(seat)) for seat in self._seats]
        places = [*(start.record for start, _ in ranks), *(first.record_of_engine for first in firsts)]
        judges_hangs = self._config.compute.device == "cpu"
        return RecordWatch(HangWatch(processes, judges_hangs=judges_hangs), self._records, places)

    def close(self) -> None:
        self._store.close()
        self._records.close()


class ProcessLauncher:
    """A `Launcher` of one process for each replica, which in turn starts the processes of its ranks."""

    def __init__(self, *, show_progress: bool) -> None:
        self._show_progress = show_progress

    def start(self, config: EngineConfig) -> WorkerGroup:
        starter = ProcessStarter(config, show_progress=self._show_progress)
        group = WorkerGroup(release=starter.close, watch=starter.watch(), starter=starter)
        try:
            for replica in range(config.parallel.data_parallel_size):
                group.replicas.append(starter.start(replica))
        except BaseException:
            group.end()
            raise
        return group

    def close(self) -> None:
        pass


def engine_name(replica: int) -> str:
    """Return the name of the process of a replica's engine in messages, by the index that it had at the start."""
    return f"engine of replica {replica}"
