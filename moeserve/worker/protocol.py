"""Messages between the process of a rank and the engine process of its replica."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from moeserve.addresses import AgentAddress, StoreAddress
from moeserve.cache_kind import CacheKind
from moeserve.config.engine_config import EngineConfig
from moeserve.distributed.mesh import Mesh
from moeserve.kv.rules import RULES, CacheGroup
from moeserve.processes.failures import FailureReport
from moeserve.protocol import Transfer, TransferResult
from moeserve.scheduling.lockstep import Round, RoundResult


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a rank, and the address of the store where the ranks meet."""

    config: EngineConfig
    rank: int
    store: StoreAddress
    show_progress: bool = False  # show the progress of loading on a terminal
    epoch: int = 0  # number of recoveries before
    num_blocks: int | None = None  # KV cache blocks of each rank; None: as many as there is room for
    chunk_size: int | None = None  # most tokens of a step; None: that of the config, or less if memory is short
    # The index of the rank's replica when the engine started. Processes are named after this index, so that they keep
    # their names when replicas are left out and the others are numbered anew. None: the index in the config.
    seat: int | None = None
    agents: tuple[AgentAddress | None, ...] = ()  # agents of the hosts of all ranks at the engine's start
    worker_group: str = ""  # name of the worker group for agents
    host: str = ""  # host of the rank, if the engine runs on another host

    @property
    def name(self) -> str:
        """The name of the rank's process in messages."""
        on_host = f" on host {self.host}" if self.host else ""
        if self.seat is None or self.seat == self.dp_index:
            return rank_name(self.config, self.rank) + on_host
        num_own = self.config.parallel.ranks_per_replica
        at_start = self.config.changed(parallel={"data_parallel_size": self.seat + 1})
        return rank_name(at_start, self.seat * num_own + self.rank % num_own) + on_host

    @property
    def record(self) -> int:
        """The index of the rank's progress record, which comes after the record of the replica's engine."""
        return self.record_of_engine + 1 + self.rank % self.config.parallel.ranks_per_replica

    @property
    def record_of_engine(self) -> int:
        seat = self.dp_index if self.seat is None else self.seat
        return seat * (1 + self.config.parallel.ranks_per_replica)

    @property
    def dp_index(self) -> int:
        return mesh_of(self.config).coordinates(self.rank).dp

    @property
    def numbers_of_replica(self) -> range:
        """The ranks of the replica whose first rank this is."""
        return range(self.rank, self.rank + self.config.parallel.ranks_per_replica)

    def of_rank(self, rank: int) -> RankStart:
        """Return the start message of another rank of the replica, given the message of the first rank."""
        config, agent = self.config, self.agent_of(rank)
        if self.agents:
            config = config.changed(parallel={"num_ranks_on_host": self.agents.count(agent)})
        return msgspec.structs.replace(
            self,
            config=config,
            rank=rank,
            show_progress=self.show_progress and rank == self.rank,
            agents=(),  # agents contain the key
            host=agent.host if agent else "",
        )

    def agent_of(self, rank: int) -> AgentAddress | None:
        """Return the agent of the host of a rank of this replica; None: the rank runs on the engine's host."""
        num_own = self.config.parallel.ranks_per_replica
        seat = self.dp_index if self.seat is None else self.seat
        return self.agents[seat * num_own + rank % num_own] if self.agents else None

    @property
    def num_records(self) -> int:
        """The number of progress records of the worker group."""
        num_own = self.config.parallel.ranks_per_replica
        return len(self.agents) // num_own * (1 + num_own)

    @property
    def samples(self) -> bool:
        """True if this rank samples its replica's tokens."""
        return self.rank % self.config.parallel.ranks_per_replica == sampling_rank(self.config)

    @property
    def answers(self) -> bool:
        """True if this rank sends the results of rounds."""
        return self.samples or self.config.gathers_reports


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Command to exit, sent after a round in which all replicas agreed to stop."""


class Rejoin(msgspec.Struct, frozen=True, tag="rejoin"):
    """Command to drop all connections and requests, and to connect again with the ranks of another epoch."""

    start: RankStart  # start message with which a new process would take this rank's place


ToRank: TypeAlias = Round | Transfer | Leave | Rejoin


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The store behind the KV cache of a rank, if it has one."""

    num_host_places: dict[CacheKind, int] = {}  # places in memory or a file without a name; the same on all ranks
    folder: str | None = None  # folder of this rank's items


class GroupFacts(msgspec.Struct, frozen=True, array_like=True):
    """A `CacheGroup` as a message."""

    kind: CacheKind
    numbers: list[int]  # the fields of the group's rule
    num_places: int

    @classmethod
    def of(cls, group: CacheGroup) -> GroupFacts:
        return cls(group.rule.kind, list(vars(group.rule).values()), group.num_places)

    @property
    def group(self) -> CacheGroup:
        return CacheGroup(RULES[self.kind](*self.numbers), self.num_places)


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Message of a rank that it has its part of the model, sent once in each epoch."""

    num_blocks: int  # number of KV cache blocks, the same on all ranks
    store: StoreFacts = StoreFacts()
    address: str = ""  # "host:port" at which other engines can read the rank's KV cache items; empty: none can
    other_groups: list[GroupFacts] = []  # cache groups after the first; the same on all ranks
    file_hashes: tuple[tuple[str, str], ...] = ()  # hashes of the checkpoint's files; see `hash_files`
    chunk_size: int | None = None  # most tokens of a step, the same on all ranks; None: that of the config
    epoch: int = 0


class Faulted(msgspec.Struct, frozen=True, tag="faulted"):
    """Message of a rank that another rank has failed. The sender then waits for `Rejoin`."""

    epoch: int
    report: FailureReport


FromRank: TypeAlias = Loaded | RoundResult | TransferResult | Faulted


def rank_name(config: EngineConfig, rank: int) -> str:
    """Return the name of a rank for error messages."""
    if config.parallel.num_ranks == 1:
        return "rank 0"
    at = mesh_of(config).coordinates(rank)
    stage = f"stage {at.pp}, " if config.parallel.pipeline_parallel_size > 1 else ""
    return f"rank {rank} (replica {at.dp}, {stage}tp {at.tp})"


def mesh_of(config: EngineConfig) -> Mesh:
    """Return the mesh of all ranks."""
    parallel = config.parallel
    return Mesh(
        tp=parallel.tensor_parallel_size,
        dp=parallel.data_parallel_size,
        pp=parallel.pipeline_parallel_size,
    )


def sampling_rank(config: EngineConfig) -> int:
    """Return the index, among the ranks of a replica, of the rank that samples: the first rank of the last stage."""
    return config.parallel.ranks_per_replica - config.parallel.tensor_parallel_size
