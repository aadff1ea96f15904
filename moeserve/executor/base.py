"""What an executor promises to the engine core."""

from __future__ import annotations

from typing import Protocol

from moeserve.protocol import StepPlan, StepResult
from moeserve.scheduling.lockstep import Agreement


class Executor(Protocol):
    """Runs every rank of one replica. Built ready: weights loaded, KV cache sized."""

    name: str  # of the rank that samples, for errors
    num_blocks: int  # blocks of KV cache that every rank has

    def execute(self, plan: StepPlan | None, agreement: Agreement) -> StepResult:
        """Runs one step on all ranks, of no tokens where there is no plan, and returns what the first one sampled.

        Raises:
            EngineError: the model gave no numbers to choose from. Every rank has done its part of the step.
            DistributedError: a rank did not take the step, or a collective failed.
        """
        ...

    def shutdown(self) -> None:
        """Ends the ranks and frees what they hold, once all replicas have agreed to end. May be called twice."""
        ...
