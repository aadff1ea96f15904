"""What a rank's process is told by the process that started it. Plain data; what a rank is, `worker.py` knows."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from moeserve.config.settings import EngineConfig
from moeserve.protocol import StepPlan
from moeserve.scheduling.lockstep import Agreement


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """Who a rank is, and where it meets the others."""

    config: EngineConfig
    rank: int
    store_host: str
    store_port: int
    store_key: str = ""  # see `connect`

    @property
    def dp_index(self) -> int:
        return self.rank // self.config.tensor_parallel_size


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Execute this plan, or zero tokens where there is none."""

    plan: StepPlan | None
    agreement: Agreement


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """End: the replica was shut down."""


WorkerMessage: TypeAlias = Step | Leave


def rank_name(config: EngineConfig, rank: int) -> str:
    """What a rank is called in messages to people."""
    dp_index, tp_index = divmod(rank, config.tensor_parallel_size)
    return f"rank {rank} (replica {dp_index}, tp {tp_index})" if config.num_ranks > 1 else "rank 0"
