"""Runs one rank in this process."""

from __future__ import annotations

from moeserve.config.settings import EngineConfig
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.protocol import StepPlan, StepResult
from moeserve.scheduling.lockstep import Agreement
from moeserve.worker.protocol import rank_name
from moeserve.worker.worker import Worker


class UniprocExecutor:
    """See `Executor`."""

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        self.name = rank_name(config, 0)
        self.worker: Worker | None = Worker(config, groups_of_one_rank(), show_progress=show_progress)
        self.num_blocks = self.worker.num_blocks

    def execute(self, plan: StepPlan | None, agreement: Agreement) -> StepResult:
        assert self.worker is not None, "execute after shutdown"
        return self.worker.execute(plan, agreement)

    def shutdown(self) -> None:
        self.worker = None
