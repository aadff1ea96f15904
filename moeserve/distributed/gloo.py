"""All that we use of gloo, torch's transport for tensors on the CPU, between hosts as well. Knows no names of groups.

gloo takes float16, bfloat16, float32, float64, integers and bool. Its errors are RuntimeErrors, without the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work

from moeserve.distributed.transport import (
    NotCapturable,
    Pending,
    TransportError,
    add_shares_and_gather,
    exchange_and_add,
    gather_and_add,
)
from moeserve.memory import new_empty

# all_reduce takes one exchange when every rank adds everything, and two when each adds a share. With n ranks the first
# way receives about n - 2 times the size of x more, so with two ranks nothing more; up to here it is the quicker one.
MAX_EXTRA_BYTES = 2**20

TIMER_SLACK_NS = 100_000_000
PR_SET_TIMERSLACK = 29  # of Linux' prctl


class GlooTransport(NotCapturable):
    """Every collective is one exchange of rows: gloo takes any number of rows from each to each, also none."""

    def __init__(self, group: ProcessGroupGloo, timeout_s: float) -> None:
        self._group: ProcessGroupGloo | None = group
        self._timeout_s = timeout_s
        self._num_ranks = group.size()
        self._rank = group.rank()
        self._seconds_waited: list[float] = []
        self._num_begun = 0  # operations of the step

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        copies = x.repeat(self._num_ranks, *[1] * (x.dim() - 1))
        return self.begin_all_to_all(copies, [len(x)] * self._num_ranks, sizes)

    def begin_all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        assert self._group is not None, "it was closed"
        sent = x.contiguous()
        received = new_empty(x, sum(receive_sizes), *x.shape[1:])
        try:
            work: Work = self._group.alltoall_base(received, sent, list(receive_sizes), list(send_sizes))  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise TransportError(cause(error, self._timeout_s)) from error

        place = self._num_begun
        self._num_begun += 1
        if place == len(self._seconds_waited):
            self._seconds_waited.append(0.0)

        def wait() -> None:
            began = time.perf_counter()
            try:
                work.wait()
            except RuntimeError as error:
                raise TransportError(cause(error, self._timeout_s)) from error
            self._seconds_waited[place] += time.perf_counter() - began

        return received, wait

    def begin_step(self) -> None:
        self._num_begun = 0

    def seconds_waited(self) -> list[float]:
        return self._seconds_waited.copy()

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return exchange_and_add(self, x, sizes, self._rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.nbytes * (self._num_ranks - 2) <= MAX_EXTRA_BYTES:
            return gather_and_add(self, x, self._num_ranks)
        return add_shares_and_gather(self, x, self._num_ranks)

    def close(self) -> None:
        self._group = None


def process_group(
    store: Store, rank_in_group: int, num_ranks: int, *, address: str, timeout_s: float
) -> ProcessGroupGloo:
    """Connect with the others, listening on `address` alone. timeout_s holds for this and for each collective."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device(address)]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank_in_group, num_ranks, options)


@functools.cache
def _device(address: str) -> object:
    """One for all groups of this process: each has a thread of its own that wakes now and then."""
    with _new_threads_may_wake_late():
        return ProcessGroupGloo.create_device(hostname=address)


@contextlib.contextmanager
def _new_threads_may_wake_late() -> Iterator[None]:
    """Threads that are started meanwhile may wait TIMER_SLACK_NS longer than they ask to; what arrives wakes them.

    gloo's asks to wake a hundred times a second, which is most of what an idle rank costs.
    """
    if sys.platform != "linux":
        yield
        return
    set_timer_slack = functools.partial(ctypes.CDLL(None).prctl, PR_SET_TIMERSLACK)
    set_timer_slack(ctypes.c_ulong(TIMER_SLACK_NS))
    try:
        yield
    finally:
        set_timer_slack(ctypes.c_ulong(0))  # the default


def send(group: ProcessGroupGloo, x: Tensor, rank_in_group: int) -> Work:
    """Begin to send x to one rank. The work must be kept until it is done."""
    return group.send([x], rank_in_group, 0)  # type: ignore[attr-defined]


def receive(group: ProcessGroupGloo, x: Tensor, rank_in_group: int) -> Work:
    """Begin to fill x with what one rank sends. The work must be kept until it is done."""
    return group.recv([x], rank_in_group, 0)  # type: ignore[attr-defined]


def cause(error: RuntimeError, timeout_s: float) -> str:
    """What gloo's words mean to a reader."""
    words = str(error)
    if "timed out" in words.lower() or "timeout" in words:
        return f"not all ranks took part within {timeout_s:g} s"
    if any(closed in words for closed in ("Connection closed", "Connection reset", "Broken pipe")):
        return "another rank closed its connection"
    return words
