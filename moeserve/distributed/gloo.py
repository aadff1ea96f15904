"""All that we use of gloo, torch's transport for tensors on the CPU. Knows no names of groups and explains no errors.

gloo takes float16, bfloat16, float32, float64, integers and bool. Its errors are RuntimeErrors, without the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work

TIMER_SLACK_NS = 100_000_000
PR_SET_TIMERSLACK = 29  # of Linux' prctl


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


def exchange(
    group: ProcessGroupGloo, sent: Tensor, send_sizes: Sequence[int], received: Tensor, receive_sizes: Sequence[int]
) -> Work:
    """Begin to send rows of `sent` to each rank, and to fill `received` with theirs. Both are contiguous."""
    return group.alltoall_base(received, sent, list(receive_sizes), list(send_sizes))  # type: ignore[attr-defined]


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
