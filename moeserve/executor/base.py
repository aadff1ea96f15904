"""What an executor promises to the engine core."""

from __future__ import annotations

from typing import Protocol

from moeserve.messages import StepPlan, StepResult


class Executor(Protocol):
    """Runs every rank of one replica. Built ready: weights loaded, KV cache sized."""

    num_blocks: int  # blocks of KV cache that every rank has

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step on all ranks and returns what rank 0 sampled."""
        ...

    def shutdown(self) -> None:
        """Ends the ranks and frees what they hold. May be called twice."""
        ...
