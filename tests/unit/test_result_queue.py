"""Ends of rounds pass from one thread to another without a loss, and wake the one that waits."""

from __future__ import annotations

import select
import threading
from concurrent.futures import Future

from moeserve.executor.results import ResultQueue
from moeserve.protocol import TransferResult
from moeserve.scheduling.lockstep import Intent, RoundResult, agree, make_row

NUM_ROUNDS = 20_000


def result(number: int) -> RoundResult:
    row = make_row(Intent(num_tokens=0, is_decode_only=True), number=number, replica=0)
    return RoundResult(agreement=agree([row], number=number, num_replicas=1))


def test_all_ends_arrive_in_order() -> None:
    queue = ResultQueue()
    futures: list[Future[RoundResult]] = [queue.expect() for _ in range(NUM_ROUNDS)]
    results = [result(number) for number in range(NUM_ROUNDS - 1)]
    error = ZeroDivisionError("planted")

    def add() -> None:
        for each in (*results, error):
            queue.add(each)

    thread = threading.Thread(target=add)
    thread.start()
    poll = select.poll()
    poll.register(queue.fd, select.POLLIN)
    while not futures[-1].done():
        queue.complete()  # at any time, not only when it has been woken
        assert futures[-1].done() or poll.poll(20_000)
        queue.complete()
    thread.join()
    assert [future.result() for future in futures[:-1]] == results
    assert futures[-1].exception() is error
    queue.complete()
    assert not poll.poll(0)  # else the engine would not sleep


def test_a_transfer_ends_when_all_ranks_have_ended_it() -> None:
    queue = ResultQueue(num_ranks=2)
    first, second = queue.expect_transfer(0), queue.expect_transfer(1)
    queue.add_transfer(TransferResult(number=1, num_copied=5, seconds=1.0))
    queue.add_transfer(TransferResult(number=0, num_copied=5, seconds=1.0))
    queue.complete()
    assert not first.done()
    queue.add_transfer(TransferResult(number=0, num_copied=3, seconds=0.5))
    queue.complete()
    assert first.result() == TransferResult(number=0, num_copied=3, seconds=1.0)  # what all have; the slowest
    assert not second.done()
