"""What crosses between the user's process and the engine process of a replica, beside `messages.ReplicaMessage`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from moeserve.protocol import ReplicaStats, RequestUpdate
from moeserve.telemetry.expert_load import LoadWindow
from moeserve.worker.protocol import RankStart


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """To an engine process, once: what it is."""

    driver: RankStart  # rank tp = 0 of the replica
    show_progress: bool  # of loading, on a terminal


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From an engine process, once: the model is loaded."""

    num_blocks: int  # of KV cache, the same on all ranks


class Delivery(msgspec.Struct, frozen=True, tag="delivery"):
    """From an engine process: news of requests, how busy it is, and from the first what experts were given."""

    updates: list[RequestUpdate]
    stats: ReplicaStats
    load: LoadWindow | None = None
    answers: bool = False  # the load was asked for


EngineMessage: TypeAlias = Ready | Delivery
