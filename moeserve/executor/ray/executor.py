"""Runs the rounds of one replica whose ranks are actors."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from moeserve.errors import DistributedError
from moeserve.executor.ray.actors import SECONDS_OF_SILENCE
from moeserve.executor.ray.errors import first_line
from moeserve.executor.results import ResultQueue
from moeserve.protocol import Transfer, TransferResult
from moeserve.scheduling.lockstep import Round, RoundResult, gathered
from moeserve.worker.protocol import Loaded, RankStart, rank_name, sampling_rank

logger = logging.getLogger(__name__)


class RayExecutor:
    """An `Executor` whose ranks are Ray actors. The process of this object computes nothing."""

    def __init__(self, starts: Sequence[RankStart], ranks: Sequence[Any], *, show_progress: bool) -> None:
        """
        Args:
            starts: the start messages of the replica's ranks, in order of rank.
            ranks: the actors of these ranks.
        """
        config = starts[0].config
        self.name = ", ".join(rank_name(config, start.rank) for start in starts)
        first = sampling_rank(config)
        self._ranks = [*ranks[first:], *ranks[:first]]  # starts with the rank that samples
        self._timeout_s = config.failure.step_timeout + SECONDS_OF_SILENCE  # the ranks' own timeouts name the rank
        loading = [
            rank.start.remote(msgspec.msgpack.encode(start), show_progress=show_progress and start.rank == 0)
            for rank, start in zip(ranks, starts, strict=True)
        ]
        try:
            self.loaded = [msgspec.msgpack.decode(answer, type=Loaded) for answer in ray.get(loading)]
        except RayError as error:
            raise DistributedError(f"{self.name}: a rank of the replica did not start ({first_line(error)})") from None
        num_in_flight = config.schedule.max_concurrent_batches
        self._graph = (
            _compiled(self._ranks, self._timeout_s, num_in_flight) if config.parallel.ray_compiled_graph else None
        )
        self._sent: SimpleQueue[Any] = SimpleQueue()  # pending answers to rounds; None: the executor shuts down
        self._results = ResultQueue(len(ranks))
        threading.Thread(target=self._await_answers, name="await-answers", daemon=True).start()

    def submit(self, work: Round) -> Future[RoundResult]:
        data = msgspec.msgpack.encode(work)
        if self._graph is not None:
            try:
                answers = self._graph.execute(data)
            except Exception as error:  # Ray raises many kinds
                raise DistributedError(f"{self.name}: a round could not be sent ({first_line(error)})") from None
        else:
            answers = [rank.execute.remote(data) for rank in self._ranks]
        future = self._results.expect()
        self._sent.put(answers)
        return future

    def transfer(self, work: Transfer) -> Future[TransferResult]:
        future, data = self._results.expect_transfer(work.number), msgspec.msgpack.encode(work)
        for rank in self._ranks:
            rank.transfer.remote(data).future().add_done_callback(self._end_transfer)
        return future

    def register(self, poll: select.poll) -> None:
        poll.register(self._results.fd, select.POLLIN)

    def progress(self) -> None:
        self._results.complete()

    def _end_transfer(self, answer: Future[bytes]) -> None:
        """Add the answer of a rank. A failed rank is ignored here: its rounds fail too, and end the replica."""
        if answer.exception() is None:
            self._results.add_transfer(msgspec.msgpack.decode(answer.result(), type=TransferResult))

    def _await_answers(self) -> None:
        """Wait for the answers to rounds, in order. Runs in a thread of its own."""
        while (answers := self._sent.get()) is not None:
            try:
                encoded = ray.get(list(answers), timeout=self._timeout_s)
                results = [msgspec.msgpack.decode(each, type=RoundResult) for each in encoded if each]
                if results:  # empty after the round that shuts all replicas down
                    self._results.add(gathered(results))
            except Exception as error:  # Ray raises many kinds
                cause = f"{self.name}: a round was not done by all ranks of the replica ({first_line(error)})"
                self._results.add(DistributedError(cause))

    def shutdown(self) -> None:
        self._sent.put(None)
        if self._graph is not None:
            self._graph.teardown()
            self._graph = None


def _compiled(ranks: Sequence[Any], timeout_s: float, num_in_flight: int) -> Any:
    """Return a compiled graph that sends a round to all ranks and returns the answers; None if Ray cannot make it."""
    try:
        from ray.dag import InputNode, MultiOutputNode
        from ray.dag.context import DAGContext

        context = DAGContext.get_current()
        context.submit_timeout = context.get_timeout = int(timeout_s)
        with InputNode() as step:
            outputs = MultiOutputNode([rank.execute.bind(step) for rank in ranks])
        return outputs.experimental_compile(_max_inflight_executions=num_in_flight + 1)
    except Exception as error:  # of any kind: plain calls do the same
        logger.warning("Ray cannot compile a graph here (%s), so steps are sent by plain calls", first_line(error))
        return None
