"""The interface of executors."""

from __future__ import annotations

from typing import Protocol

from moeserve.protocol import StepPlan, StepResult
from moeserve.scheduling.lockstep import Agreement


class Executor(Protocol):
    """Runs every rank of one replica. Its constructor returns when weights are loaded and the KV cache is sized."""

    name: str  # of the rank that samples, for messages
    num_blocks: int  # KV cache blocks of each rank

    def execute(self, plan: StepPlan | None, agreement: Agreement) -> StepResult:
        """Run one step on all ranks and return the tokens that the first one sampled. No plan: a step of no tokens.

        Raises:
            EngineError: the model gave no numbers to sample from. Every rank has done its part of the step.
            DistributedError: a rank did not receive the step, or a collective failed.
        """
        ...

    def shutdown(self) -> None:
        """End the ranks and free their memory, once all replicas have agreed to end. May be called twice."""
        ...
