"""Runs the ranks of one replica on this host: the first in this process, each other in a process of its own.

A step is one message of some hundred bytes to each worker. Workers do not answer: one that did not execute a step is
missing in the step's first collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moeserve.config.environment import environment_of_rank
from moeserve.config.settings import EngineConfig
from moeserve.distributed.groups import Groups
from moeserve.errors import DistributedError
from moeserve.machine import usable_cores
from moeserve.processes.channel import frame
from moeserve.processes.local import start_process
from moeserve.processes.supervision import SECONDS_TO_EXIT, WatchedProcess, end_all
from moeserve.protocol import StepPlan, StepResult
from moeserve.scheduling.lockstep import Agreement
from moeserve.worker.protocol import Leave, RankStart, Step, rank_name
from moeserve.worker.worker import Worker


def start_workers(driver: RankStart) -> list[WatchedProcess[Any]]:
    """Start a process for each rank of the driver's replica except its own. They send nothing but failure reports."""
    config = driver.config
    environment = environment_of_rank(config, usable_cores())
    return [
        start_process(
            "moeserve.worker.process:run",
            rank_name(config, rank),
            msgspec.structs.replace(driver, rank=rank),
            None,
            environment=environment,
        )
        for rank in range(driver.rank + 1, driver.rank + config.tensor_parallel_size)
    ]


class MultiprocExecutor:
    """See `Executor`. This process runs rank tp = 0."""

    def __init__(
        self, config: EngineConfig, groups: Groups, workers: Sequence[WatchedProcess[Any]], *, show_progress: bool
    ) -> None:
        """
        Args:
            workers: the processes of the other ranks, from `start_workers`.
        """
        self.name = rank_name(config, groups.rank)
        self._workers = workers
        self._timeout_s = config.collective_timeout
        self.worker = Worker(config, groups, show_progress=show_progress)
        self.num_blocks = self.worker.num_blocks

    def execute(self, plan: StepPlan | None, agreement: Agreement) -> StepResult:
        if self._workers:
            step = frame(Step(plan=plan, agreement=agreement))
            for worker in self._workers:
                worker.channel.send_frame(step)
            for worker in self._workers:
                if not worker.channel.flush(self._timeout_s):
                    raise DistributedError(
                        f"{worker.name} did not receive step {agreement.step} within {self._timeout_s} seconds"
                    )
        return self.worker.execute(plan, agreement)

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.channel.send(Leave())
        self.worker.close()  # collective: all ranks
        end_all(self._workers, patience_s=SECONDS_TO_EXIT)
        self._workers = ()
