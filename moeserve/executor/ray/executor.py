"""Runs the steps of one replica whose ranks are actors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from moeserve.errors import DistributedError, EngineError
from moeserve.executor.ray.actors import SECONDS_OF_SILENCE, StepOutcome
from moeserve.executor.ray.errors import first_line
from moeserve.protocol import StepPlan, StepResult
from moeserve.scheduling.lockstep import Agreement
from moeserve.worker.protocol import RankStart, Step, rank_name

logger = logging.getLogger(__name__)


class RayExecutor:
    """See `Executor`. Its process computes nothing."""

    def __init__(self, starts: Sequence[RankStart], ranks: Sequence[Any], *, show_progress: bool) -> None:
        """
        Args:
            starts: the starts of the replica's ranks, by tp.
            ranks: their actors.
        """
        config = starts[0].config
        self.name = rank_name(config, starts[0].rank)
        self._ranks = ranks
        self._timeout_s = config.collective_timeout + SECONDS_OF_SILENCE  # longer than ranks wait for each other
        loading = [
            rank.start.remote(msgspec.msgpack.encode(start), show_progress=show_progress and start.rank == 0)
            for rank, start in zip(ranks, starts, strict=True)
        ]
        try:
            self.num_blocks = int(ray.get(loading)[0])
        except RayError as error:
            raise DistributedError(f"{self.name}: a rank of the replica did not start ({first_line(error)})") from None
        self._graph = _compiled(ranks, self._timeout_s) if config.ray_compiled_graph else None

    def execute(self, plan: StepPlan | None, agreement: Agreement) -> StepResult:
        """Run a step on all ranks.

        Raises:
            EngineError: the model gave no numbers to sample from. Every rank has done its part of the step.
            DistributedError: a rank has failed or did not answer in time.
        """
        data = msgspec.msgpack.encode(Step(plan=plan, agreement=agreement))
        try:
            if self._graph is not None:
                answers = self._graph.execute(data)
            else:
                answers = [rank.execute.remote(data) for rank in self._ranks]
            answer = ray.get(list(answers), timeout=self._timeout_s)[0]
        except Exception as error:  # Ray raises many kinds
            raise DistributedError(
                f"{self.name}: step {agreement.step} was not done by all ranks of the replica ({first_line(error)})"
            ) from None
        outcome = msgspec.msgpack.decode(answer, type=StepOutcome)
        if outcome.result is None:
            raise EngineError(outcome.error)
        return outcome.result

    def shutdown(self) -> None:
        if self._graph is not None:
            self._graph.teardown()
            self._graph = None


def _compiled(ranks: Sequence[Any], timeout_s: float) -> Any:
    """Return a compiled graph that sends a plan to all ranks and returns their answers; None if Ray has none."""
    try:
        from ray.dag import InputNode, MultiOutputNode
        from ray.dag.context import DAGContext

        context = DAGContext.get_current()
        context.submit_timeout = context.get_timeout = int(timeout_s)
        with InputNode() as step:
            outputs = MultiOutputNode([rank.execute.bind(step) for rank in ranks])
        return outputs.experimental_compile()
    except Exception as error:  # plain calls do the same, so any error will do
        logger.warning("Ray cannot compile a graph here (%s), so steps are sent by plain calls", first_line(error))
        return None
