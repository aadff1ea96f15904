"""Messages of engine processes to the user's process, and between processes that share an engine.

Others are in `protocol.ReplicaMessage`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from moeserve.config.settings import EngineConfig
from moeserve.protocol import AbortRequest, AddRequest, ReplicaStats, RequestUpdate
from moeserve.telemetry.expert_load import LoadWindow
from moeserve.worker.protocol import RankStart


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of an engine process."""

    first_rank: RankStart  # of the replica


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Sent by an engine process once, when the model is loaded."""

    num_blocks: int  # of KV cache, the same on all ranks


class Delivery(msgspec.Struct, frozen=True, tag="delivery"):
    """Sent by an engine process: updates of requests, how busy it is, and from the first replica expert loads."""

    updates: list[RequestUpdate]
    stats: ReplicaStats
    load: LoadWindow | None = None
    answers: bool = False  # the load was requested


EngineMessage: TypeAlias = Ready | Delivery


class SharedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as it is described to one of several processes that share it."""

    index: int  # of the process
    config: EngineConfig
    num_blocks: int  # of KV cache of each rank


class Updates(msgspec.Struct, frozen=True, tag="updates"):
    """Sent to a process that shares an engine: updates of its requests."""

    updates: list[RequestUpdate]


class EngineState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Sent to all processes that share an engine, when it has changed."""

    refusal: str  # as in `Engine`
    has_failed: bool
    replica_stats: list[ReplicaStats]
    num_blocks: int


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Sent to all processes that share an engine."""

    window: LoadWindow


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Sent by a process that shares an engine, for all others. It replaces the sender's last one."""

    sender: int
    body: bytes


class Scale(msgspec.Struct, frozen=True, tag="scale"):
    """Sent by a process that shares an engine: change the number of replicas."""

    sender: int
    data_parallel_size: int


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    """The answer to `Scale`, when the change is over."""

    error: str = ""  # empty: as many replicas as requested serve
    kind: str = ""  # name of the error's class


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Sent to all processes that share an engine: end after the requests in flight."""

    at_once: bool = False  # or now, with an error for them


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The last message of a process that shares an engine."""


FromHub: TypeAlias = Updates | EngineState | Load | Note | Scaled | Drain
ToHub: TypeAlias = AddRequest | AbortRequest | Note | Scale | Leave
