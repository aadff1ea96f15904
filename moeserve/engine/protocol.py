"""Messages of replicas to the engine, and between processes that share an engine.

`protocol.ReplicaMessage` has the messages to replicas.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from moeserve.config.engine_config import EngineConfig
from moeserve.controls import Command, ControlResult, WeightState
from moeserve.processes.failures import FailureReport
from moeserve.protocol import AbortRequest, AddRequest, Delivery, ReplicaMessage, ReplicaStats, RequestUpdate
from moeserve.telemetry.expert_load import LoadWindow
from moeserve.worker.protocol import RankStart


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Sent by a replica once in each epoch, when its ranks have the model."""

    num_blocks: int  # KV cache blocks, equal on all ranks
    file_hashes: tuple[tuple[str, str], ...] = ()  # hashes of the checkpoint's files, equal on all ranks
    chunk_size: int | None = None  # most tokens of a step, equal on all ranks; None: that of the config
    epoch: int = 0


class ReplicaFaulted(msgspec.Struct, frozen=True, tag="replica-faulted"):
    """Sent by a replica in which ranks have failed or left their step. The replica waits for `Recover`."""

    epoch: int
    reports: list[FailureReport]
    has_lost_ranks: bool  # False: only ranks of other replicas have failed


class Recover(msgspec.Struct, frozen=True, tag="recover"):
    """Sent to a replica that has processes left: replace failed ranks, and drop all requests."""

    start: RankStart  # start message of the replica's first rank in the next epoch
    lost: list[int]  # ranks of this replica to replace although they may run, numbered as in the next epoch


ToReplica: TypeAlias = ReplicaMessage | Recover
FromReplica: TypeAlias = Ready | Delivery | ReplicaFaulted


class SharedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an engine for one of several processes that share it."""

    index: int  # the process's index
    config: EngineConfig
    num_blocks: int  # KV cache blocks of each rank


class Updates(msgspec.Struct, frozen=True, tag="updates"):
    """Sent to a process that shares an engine: updates of its requests."""

    updates: list[RequestUpdate]


class EngineState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Sent to all processes that share an engine when the state has changed."""

    refusal: str  # as in `EngineClient`
    has_failed: bool
    replica_stats: list[ReplicaStats]
    num_blocks: int
    is_paused: bool
    weights: WeightState


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Sent to all processes that share an engine: a window of expert loads."""

    window: LoadWindow


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Sent by a process that shares an engine, for all others. A note replaces the sender's previous note."""

    sender: int
    body: bytes


class Scale(msgspec.Struct, frozen=True, tag="scale"):
    """Sent by a process that shares an engine, to change the number of replicas."""

    sender: int
    data_parallel_size: int


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    """The answer to `Scale`, sent when the change is over."""

    error: str = ""  # empty: the change has succeeded
    kind: str = ""  # class name of the error


class RunControl(msgspec.Struct, frozen=True, tag="run-control"):
    """Sent by a process that shares an engine, to run a command on all replicas."""

    sender: int
    ticket: int  # number of this message among those of the sender
    command: Command


class ControlRan(msgspec.Struct, frozen=True, tag="control-ran"):
    """The answer to `RunControl`, sent when the command has run."""

    ticket: int
    is_paused: bool
    weights: WeightState
    result: ControlResult | None = None  # None: an error
    error: str = ""
    kind: str = ""  # class name of the error


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Sent to all processes that share an engine: exit after the requests in flight."""

    at_once: bool = False  # exit now; the requests fail


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """Sent at intervals by a process that shares an engine, until it listens: it is neither stopped nor stuck."""


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """Sent by a process that shares an engine when it accepts connections."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The last message of a process that shares an engine."""


FromHub: TypeAlias = Updates | EngineState | Load | Note | Scaled | ControlRan | Drain
ToHub: TypeAlias = AddRequest | AbortRequest | Note | Scale | RunControl | Starting | Listening | Leave
