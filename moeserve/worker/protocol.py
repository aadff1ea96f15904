"""Messages to the process of a worker rank, from the process that started it."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from moeserve.config.settings import EngineConfig
from moeserve.protocol import StepPlan
from moeserve.scheduling.lockstep import Agreement


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a rank, and the address where it meets the others."""

    config: EngineConfig
    rank: int
    store_host: str
    store_port: int
    store_key: str = ""  # see `connect`

    @property
    def dp_index(self) -> int:
        return self.rank // self.config.tensor_parallel_size


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Execute this plan, or zero tokens without one."""

    plan: StepPlan | None
    agreement: Agreement


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Exit, because the replica was shut down."""


WorkerMessage: TypeAlias = Step | Leave


def rank_name(config: EngineConfig, rank: int) -> str:
    """Return the name of a rank for error messages."""
    dp_index, tp_index = divmod(rank, config.tensor_parallel_size)
    return f"rank {rank} (replica {dp_index}, tp {tp_index})" if config.num_ranks > 1 else "rank 0"
