"""Messages between the user's process and the engine process of a replica, beside `protocol.ReplicaMessage`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from moeserve.protocol import ReplicaStats, RequestUpdate
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
