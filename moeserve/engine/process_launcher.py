"""`ProcessLauncher`: starts the replicas of an engine as processes, whose ranks may be on several hosts."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence

from moeserve.addresses import AgentAddress
from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import environment_of_rank
from moeserve.distributed.store_server import start_store
from moeserve.engine.hang_watch import RULE_OF_HOSTS, HangRule, HangWatch, RecordWatch, Watchable
from moeserve.engine.launcher import ReplicaHandle, WorkerGroup
from moeserve.engine.protocol import FromReplica
from moeserve.executor.hosts.pool import HostPool
from moeserve.machine import usable_cores
from moeserve.processes.local import start_process
from moeserve.processes.memory_kills import MEMORY_KILLS
from moeserve.processes.progress_records import ProgressRecord, ProgressRecords
from moeserve.worker.protocol import RankStart


class ProcessStarter:
    """A `Starter` of the engine processes of replicas on this host. Owns the store and the records of all ranks."""

    def __init__(self, config: EngineConfig, hosts: HostPool | None, *, show_progress: bool) -> None:
        """
        Args:
            hosts: the other hosts that have ranks; None: all ranks run on this host.
        """
        MEMORY_KILLS.forget()
        num_replicas, num_ranks = config.parallel.data_parallel_size, config.parallel.num_ranks
        self._config, self._hosts, self._show_progress = config, hosts, show_progress
        self._seats = list(range(num_replicas))  # seats of the replicas, see `RankStart`
        self._environment = environment_of_rank(config, usable_cores())
        self._store = start_store(hosts.host if hosts else None)  # must outlive the ranks' processes
        self._records = ProgressRecords(num_replicas * (1 + config.parallel.ranks_per_replica))
        self._agents: tuple[AgentAddress | None, ...] = ()
        if hosts is not None:
            hosts.drop_silent()
            self._agents = even_places(num_ranks, config.parallel.nnodes, hosts.agents())
        self._worker_group = secrets.token_hex(8)

    def begin_epoch(self, config: EngineConfig, survivors: Sequence[int]) -> None:
        MEMORY_KILLS.forget()
        self._config, self._seats = config, [self._seats[replica] for replica in survivors]
        self._store.close()
        self._store = start_store(self._hosts.host if self._hosts else None)

    @property
    def has_lost_host(self) -> bool:
        if self._hosts is None:
            return False
        answering = self._hosts.agents()
        return any(agent is not None and answering.get(agent.number) != agent for agent in self._agents)

    def message(self, replica: int, epoch: int, num_blocks: int | None, chunk_size: int | None) -> RankStart:
        return RankStart(
            config=self._config,
            rank=replica * self._config.parallel.ranks_per_replica,
            store=self._store.address,
            show_progress=self._show_progress and replica == 0 and epoch == 0,
            epoch=epoch,
            num_blocks=num_blocks,
            chunk_size=chunk_size,
            seat=self._seats[replica],
            agents=self._agents,
            worker_group=self._worker_group,
        )

    def start(
        self, replica: int, epoch: int = 0, num_blocks: int | None = None, chunk_size: int | None = None
    ) -> ReplicaHandle:
        return start_process(
            "moeserve.engine.replica_process:run",
            engine_name(self._seats[replica]),
            self.message(replica, epoch, num_blocks, chunk_size),
            FromReplica,
            environment=self._environment,
            records_fd=self._records.fd,
        )

    def watch(self) -> RecordWatch | None:
        if not self._config.failure.detect_hangs:
            return None
        self._records.clear()  # some may be of processes that have ended
        firsts = [self.message(replica, 0, None, None) for replica in range(len(self._seats))]
        ranks = [(first, index, rank) for index, first in enumerate(firsts) for rank in first.numbers_of_replica]
        processes = [
            Watchable(
                first.of_rank(rank).name,
                agent.number if (agent := first.agent_of(rank)) else 0,
                engine=len(ranks) + index,
            )
            for first, index, rank in ranks
        ]
        processes += [Watchable(engine_name(seat)) for seat in self._seats]
        places = [
            *(first.of_rank(rank).record for first, _, rank in ranks),
            *(each.record_of_engine for each in firsts),
        ]
        judges_hangs, rule = self._config.compute.device == "cpu", RULE_OF_HOSTS if self._agents else HangRule()
        return RecordWatch(HangWatch(processes, rule, judges_hangs=judges_hangs), self, places)

    def read(self) -> list[ProgressRecord | None]:
        """Return the present progress record of each process; None: the host has sent no record for a while."""
        records: list[ProgressRecord | None] = list(self._records.read())
        if self._hosts is not None:
            for replica in range(len(self._seats)):
                first = self.message(replica, 0, None, None)
                for rank in first.numbers_of_replica:
                    if (agent := first.agent_of(rank)) is not None:
                        place = first.of_rank(rank).record
                        records[place] = self._hosts.record(agent, self._worker_group, place)
        return records

    def close(self) -> None:
        self._store.close()
        self._records.close()


class ProcessLauncher:
    """A `Launcher` of one process for each replica, which in turn starts the processes of its ranks."""

    def __init__(self, hosts: HostPool | None = None, *, show_progress: bool) -> None:
        self._hosts, self._show_progress = hosts, show_progress

    def start(self, config: EngineConfig) -> WorkerGroup:
        starter = ProcessStarter(config, self._hosts, show_progress=self._show_progress)
        group = WorkerGroup(release=starter.close, watch=starter.watch(), starter=starter)
        try:
            for replica in range(config.parallel.data_parallel_size):
                group.replicas.append(starter.start(replica))
        except BaseException:
            group.end()
            raise
        return group

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()


def even_places(num_ranks: int, num_hosts: int, agents: Mapping[int, AgentAddress]) -> tuple[AgentAddress | None, ...]:
    """Return the agent of each rank's host; None: this host. All hosts have equally many ranks, in order.

    Args:
        agents: agents of the hosts that answer, by number. Ranks of other hosts go to the hosts with the fewest ranks.
    """
    hosts: dict[int, AgentAddress | None] = {0: None, **agents}
    numbers = [rank * num_hosts // num_ranks for rank in range(num_ranks)]
    load = Counter({number: numbers.count(number) for number in hosts})
    for rank, number in enumerate(numbers):
        if number not in hosts:
            numbers[rank] = min(hosts, key=lambda each: load[each])
            load[numbers[rank]] += 1
    return tuple(hosts[number] for number in numbers)


def engine_name(replica: int) -> str:
    """Return the name of the process of a replica's engine in messages, by the replica's index at the start."""
    return f"engine of replica {replica}"
