"""Runs the ranks of one replica, each in a process of its own, on this host or through the agents of other hosts."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import environment_of_rank
from moeserve.errors import DistributedError
from moeserve.executor.hosts.remote import start_remote_rank
from moeserve.executor.results import TransferAnswers
from moeserve.machine import usable_cores
from moeserve.processes.channel import frame
from moeserve.processes.failures import FailureReport
from moeserve.processes.local import start_process
from moeserve.processes.supervision import SECONDS_TO_EXIT, WatchedProcess, end_all, register, wait_for_messages
from moeserve.protocol import Transfer, TransferResult
from moeserve.scheduling.lockstep import Round, RoundResult, gathered
from moeserve.worker.protocol import Faulted, FromRank, Leave, Loaded, RankStart, sampling_rank


def start_rank(first: RankStart, rank: int, records_fd: int | None) -> WatchedProcess[Any]:
    """Start the process of one rank of a replica.

    Args:
        first: the start message of the replica's first rank.
        records_fd: the file of the ranks' progress records.
    """
    start, agent = first.of_rank(rank), first.agent_of(rank)
    if agent is not None:
        return start_remote_rank(agent, start, first.worker_group, first.num_records)
    return start_process(
        "moeserve.worker.rank_process:run",
        start.name,
        start,
        FromRank,
        environment=environment_of_rank(start.config, usable_cores()),
        records_fd=records_fd,
    )


class RankFaultedError(DistributedError):
    """A rank that could continue with other ranks has left its step, because another rank failed."""

    def __init__(self, report: FailureReport) -> None:
        super().__init__(report.cause)
        self.report = report


class MultiprocExecutor:
    """An `Executor` whose ranks are processes."""

    def __init__(
        self,
        ranks: Sequence[WatchedProcess[Any]],
        config: EngineConfig,
        epoch: int = 0,
        interrupt: tuple[int, Callable[[], object]] | None = None,
    ) -> None:
        """
        Args:
            ranks: the processes of all ranks of the replica, in order.
            epoch: number of earlier recoveries. Messages of ranks from earlier epochs are dropped.
            interrupt: a file descriptor, and a function that is called when the descriptor is readable while ranks
                load. The function may raise an error.

        Raises:
            DistributedError: a rank has failed.
        """
        self.name = ", ".join(rank.name for rank in ranks)
        first = sampling_rank(config)
        self._ranks = [*ranks[first:], *ranks[:first]]  # starts with the rank that samples
        self._pending: deque[Future[RoundResult]] = deque()
        self._num_answering = len(ranks) if config.gathers_reports else 1
        self._answers: list[deque[RoundResult]] = [deque() for _ in ranks]  # by rank, in order of rounds
        self._transfers = TransferAnswers(len(ranks))
        loaded: dict[str, Loaded] = {}
        while len(loaded) < len(ranks):
            wait_for_messages(ranks, None, *([interrupt[0]] if interrupt else ()))
            if interrupt:
                interrupt[1]()
            self._require_alive()
            for rank in ranks:
                for message in rank.receive():
                    if isinstance(message, Loaded | Faulted) and message.epoch == epoch:
                        if isinstance(message, Faulted):
                            raise RankFaultedError(message.report)
                        loaded[rank.name] = message
        self.loaded = [loaded[rank.name] for rank in ranks]

    def submit(self, work: Round) -> Future[RoundResult]:
        data = frame(work)
        for rank in self._ranks:
            rank.channel.send_frame(data)
        self._pending.append(Future())
        return self._pending[-1]

    def transfer(self, work: Transfer) -> Future[TransferResult]:
        data = frame(work)
        for rank in self._ranks:
            rank.channel.send_frame(data)
        return self._transfers.expect(work.number)

    def register(self, poll: select.poll) -> None:
        register(self._ranks, poll)

    def progress(self) -> None:
        for rank, answers in zip(self._ranks, self._answers, strict=True):
            for message in rank.receive():  # also sends pending data
                if isinstance(message, Faulted):
                    raise RankFaultedError(message.report)
                if isinstance(message, TransferResult):
                    self._transfers.add(message)
                else:
                    answers.append(message)
        answering = self._answers[: self._num_answering]
        if not all(answering):  # the next call raises; results that have arrived are returned first
            self._require_alive()
        while all(answering):
            self._pending.popleft().set_result(gathered([answers.popleft() for answers in answering]))

    def shutdown(self) -> None:
        for rank in self._ranks:
            rank.channel.send(Leave())
        end_all(self._ranks, patience_s=SECONDS_TO_EXIT)
        self._ranks = []

    def _require_alive(self) -> None:
        for rank in self._ranks:
            if rank.has_ended or rank.channel.is_closed:
                raise DistributedError(f"{rank.name} has ended")
