"""The transport over gloo, torch's library for CPU tensors within and between hosts.

gloo carries float16, bfloat16, float32, float64, integers and bool. Errors are RuntimeErrors that name no ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work

from moeserve.distributed.transport import (
    Pending,
    Transport,
    TransportError,
    reduce_scatter_by_all_to_all,
)
from moeserve.memory import new_empty
from moeserve.processes.progress_records import Phase, in_phase

TIMER_SLACK_NS = 100_000_000
PR_SET_TIMERSLACK = 29  # an option of Linux's prctl


@dataclass
class GlooConnection:
    """One rank's connection to a set of ranks. Transports of groups with the same members share it."""

    process_group: ProcessGroupGloo | None  # None once the connection is closed
    timeout_s: float


class GlooTransport(Transport):
    """One rank's transport of one group. Each collective is one or two all-to-all exchanges."""

    def __init__(self, connection: GlooConnection, *, measures_waits: bool = False) -> None:
        assert connection.process_group is not None
        self._connection = connection
        self._measures_waits = measures_waits
        self._num_ranks = connection.process_group.size()
        self._rank = connection.process_group.rank()
        self._seconds_waited: list[float] = []  # entry i: sum over all steps of a step's operation i
        self._num_begun = 0  # number of operations begun in this step

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        copies = x.repeat(self._num_ranks, *[1] * (x.dim() - 1))
        return self.begin_all_to_all(copies, [len(x)] * self._num_ranks, sizes)

    def begin_all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        process_group, timeout_s = self._connection.process_group, self._connection.timeout_s
        if process_group is None:
            raise TransportError("this rank has left the group")
        sent = x.contiguous()
        received = new_empty(x, sum(receive_sizes), *x.shape[1:])
        try:
            work: Work = process_group.alltoall_base(received, sent, list(receive_sizes), list(send_sizes))  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise TransportError(cause_of(error, timeout_s)) from error

        index = self._num_begun
        if self._measures_waits:
            self._num_begun += 1
            if index == len(self._seconds_waited):
                self._seconds_waited.append(0.0)

        def wait() -> None:
            began = time.perf_counter()
            try:
                with in_phase(Phase.BLOCKED):
                    work.wait()
            except RuntimeError as error:
                raise TransportError(cause_of(error, timeout_s)) from error
            if self._measures_waits:
                self._seconds_waited[index] += time.perf_counter() - began

        return received, wait

    def begin_step(self) -> None:
        self._num_begun = 0

    def seconds_waited(self) -> list[float]:
        return self._seconds_waited.copy()

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return reduce_scatter_by_all_to_all(self, x, sizes, self._rank, dtype)

    def close(self) -> None:
        self._connection.process_group = None


def make_process_group(
    store: Store, rank_in_group: int, num_ranks: int, *, address: str, timeout_s: float
) -> ProcessGroupGloo:
    """Connect to the other ranks, listening on `address` only.

    timeout_s limits both the connecting and each collective. Raises RuntimeError if a rank does not connect in time.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_gloo_device(address)]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank_in_group, num_ranks, options)


@functools.cache
def _gloo_device(address: str) -> object:
    """Return gloo's device. All groups of this process share it, because each device has a polling thread."""
    with _long_timer_slack():
        return ProcessGroupGloo.create_device(hostname=address)


@contextlib.contextmanager
def _long_timer_slack() -> Iterator[None]:
    """Let threads started in this context sleep up to TIMER_SLACK_NS longer than requested; data still wakes them.

    gloo's thread polls a hundred times a second, which would account for most of the CPU time of an idle rank.
    """
    if sys.platform == "linux":
        set_timer_slack = functools.partial(ctypes.CDLL(None).prctl, PR_SET_TIMERSLACK)
        set_timer_slack(ctypes.c_ulong(TIMER_SLACK_NS))
        try:
            yield
        finally:
            set_timer_slack(ctypes.c_ulong(0))  # the default
    else:
        yield


def send(group: ProcessGroupGloo, x: Tensor, rank_in_group: int) -> Work:
    """Begin to send x to one rank. Keep the returned work until it is complete."""
    return group.send([x], rank_in_group, 0)  # type: ignore[attr-defined]


def receive(group: ProcessGroupGloo, x: Tensor, rank_in_group: int) -> Work:
    """Begin to receive x from one rank. Keep the returned work until it is complete."""
    return group.recv([x], rank_in_group, 0)  # type: ignore[attr-defined]


def cause_of(error: RuntimeError, timeout_s: float) -> str:
    """Return the cause of a gloo error, in words that a user understands."""
    message = str(error)
    if "timed out" in message.lower() or "timeout" in message:
        return f"not all ranks joined within {timeout_s:g} s"
    if any(closed in message for closed in ("Connection closed", "Connection reset", "Broken pipe")):
        return "another rank closed its connection"
    return message
