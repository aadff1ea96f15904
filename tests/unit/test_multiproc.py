"""The executor of ranks in processes of their own: large rounds, and ranks that end."""

from __future__ import annotations

import select
import socket
from collections import deque
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest
from test_config import FACTS

from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.engine.driver import completed
from moeserve.errors import DistributedError
from moeserve.executor.multiproc import MultiprocExecutor
from moeserve.processes.channel import Channel
from moeserve.processes.supervision import WatchedProcess
from moeserve.protocol import CacheStart, Registration, StepPlan
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Intent, Round, RoundResult, agree, make_row
from moeserve.worker.protocol import FromRank, Loaded, ToRank

CONFIG = resolve(parse_settings({"executor": "mp"}), FACTS, MachineFacts(num_cores=2))


class Rank:
    """The process of a rank that does what the test does. See `ProcessHandle`."""

    watched_fds: ClassVar[list[int]] = []

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process: WatchedProcess[Any] = WatchedProcess("rank 0", ours, FromRank, self)
        self.channel: Channel[Any] = Channel(theirs, ToRank)
        self.channel.send(Loaded(num_blocks=7))

    def exit_cause(self) -> str | None:
        return None

    def kill(self) -> None:
        pass

    def wait(self, timeout_s: float) -> bool:
        return False

    def close(self) -> None:
        pass


@pytest.fixture
def rank() -> Rank:
    return Rank()


def wait(executor: MultiprocExecutor) -> None:
    poll = select.poll()
    executor.register(poll)
    assert poll.poll(20_000), "nothing would end the wait"
    executor.progress()


def test_a_round_larger_than_a_socket_reaches_the_rank_as_it_reads(rank: Rank) -> None:
    executor = MultiprocExecutor([rank.process], CONFIG)
    row = make_row(Intent(num_tokens=1, is_decode_only=False), number=0, replica=0)
    long_prompt = Registration(
        slot=0,
        token_ids=[70_000] * 500_000,
        num_prompt_tokens=500_000,
        cache=CacheStart([[0]]),
        params=RequestParams(),
        seed=0,
        end_token_ids=[],
    )
    plan = StepPlan(step=1, slots=[0], starts=[0], lengths=[1], registrations=[long_prompt])
    future = executor.submit(Round(row=row, plan=plan))
    while not (received := rank.channel.receive(0.0)):
        wait(executor)
    assert received[0].plan == plan
    rank.channel.send(RoundResult(agreement=agree([row], number=0, num_replicas=1)))
    while not future.done():
        wait(executor)


def test_the_last_result_of_a_rank_that_has_ended_is_kept(rank: Rank) -> None:
    executor = MultiprocExecutor([rank.process], CONFIG)
    row = make_row(Intent(num_tokens=0, is_decode_only=True), number=0, replica=0)
    result = RoundResult(agreement=agree([row], number=0, num_replicas=1))
    futures = deque(executor.submit(Round(row=row, plan=None)) for _ in range(2))
    rank.channel.send(result)
    rank.channel.close()
    wait(executor)
    assert completed(futures) == [result]
    with pytest.raises(DistributedError, match="rank 0 has ended"):
        executor.progress()


def test_results_before_a_failed_round_are_returned_before_its_error() -> None:
    row = make_row(Intent(num_tokens=0, is_decode_only=True), number=0, replica=0)
    result = RoundResult(agreement=agree([row], number=0, num_replicas=1))
    futures: deque[Future[RoundResult]] = deque(Future() for _ in range(2))
    futures[0].set_result(result)
    futures[1].set_exception(DistributedError("a consequence"))
    assert completed(futures) == [result]
    with pytest.raises(DistributedError, match="a consequence"):
        completed(futures)


def test_a_rank_that_closes_its_channel_has_ended(rank: Rank) -> None:
    executor = MultiprocExecutor([rank.process], CONFIG)
    rank.channel.close()
    with pytest.raises(DistributedError, match="rank 0 has ended"):
        wait(executor)
