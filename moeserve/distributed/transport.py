"""The transport interface: collectives on the tensors of one group, and the parts that transports share.

The transport of a group is chosen when the group is connected. CPU tensors use shared memory (`shared_memory.py`) if
all ranks are on one host, else gloo (`gloo.py`), with bytewise equal results. GPU tensors use NCCL (`nccl.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

# Sums of these dtypes accumulate in float32; sums of all other dtypes accumulate in their own dtype.
ACCUMULATED_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


class TransportError(Exception):
    """A collective failed. The message gives the cause; the group coordinator adds the name of the collective."""


class TransportUnavailable(Exception):
    """A rank of the group cannot use a transport, so no rank does. Raised on all ranks."""


# The result of a collective in progress, and a function that waits until it is complete (TransportError if it fails).
Pending: TypeAlias = tuple[Tensor, Callable[[], object]]


class Transport(Protocol):
    """One rank's collectives with the other ranks (at least one) of a group.

    The collectives have the contracts of `GroupCoordinator`: `sizes[r]` is the number of rows of rank r. Calls come
    from one thread at a time. A transport overrides the properties and methods whose defaults do not fit it.
    """

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending: ...

    def begin_all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending: ...

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor: ...

    def share_memory(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8 memory that all ranks map. Raises TransportError if a rank does not answer."""
        raise TransportUnavailable(f"{type(self).__name__} shares no memory")

    def close(self) -> None:
        """Close the connections, so that ranks waiting for this rank fail at once. May be called twice."""
        ...

    def begin_step(self) -> None:
        """Restart the operation indices of `seconds_waited`. All ranks call this at the same point of the program."""
        return

    def seconds_waited(self) -> list[float]:
        """Return the seconds spent waiting for other ranks: entry i is the sum over all steps of a step's operation i.

        The list has the same length on all ranks, and is empty if this transport does not measure waits.
        """
        return []

    @property
    def progresses_in_background(self) -> bool:
        """True if a collective in progress advances while its rank computes, without blocking later collectives."""
        return True

    @property
    def supports_cpu_graphs(self) -> bool:
        """True if collectives can be captured in a CPU graph and replayed."""
        return False

    @property
    def is_capturing(self) -> bool:
        """True while this thread captures a CPU graph."""
        return False

    def on_replay_failure(self, fail: Callable[[str], NoReturn]) -> None:
        """While a CPU graph is captured: make replays call `fail` with the cause if the last collective fails."""
        raise AssertionError(f"CPU graphs cannot capture the collectives of {type(self).__name__}")

    def raise_failure(self) -> None:
        """Raise TransportError if a collective on a device failed after its call returned, so its result is invalid."""
        return


def reduce_scatter_by_all_to_all(
    transport: Transport, x: Tensor, sizes: Sequence[int], rank_in_group: int, dtype: torch.dtype | None
) -> Tensor:
    """Return this rank's rows of the sum over ranks, [sizes[rank_in_group], ...].

    All ranks send their terms of these rows to this rank, where `sum_in_tree` adds them.
    """
    num_own = sizes[rank_in_group]
    parts, wait = transport.begin_all_to_all(x, sizes, [num_own] * len(sizes))
    wait()
    return sum_in_tree(parts.view(len(sizes), num_own, *x.shape[1:]), dtype)


def sum_in_tree(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum over the first dimension: ((0 + 1) + (2 + 3)) + ..., where the last part may lack a neighbour.

    Splitting each part into two neighbours that add up to it therefore does not change the bytes of the sum.

    Args:
        dtype: dtype to which the sum is rounded; None: the dtype of the parts.
    """
    sums = list(parts.float() if parts.dtype in ACCUMULATED_IN_FLOAT32 else parts)
    while len(sums) > 1:
        last = sums[-1:] if len(sums) % 2 else []
        sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=False)] + last
    return sums[0].to(dtype or parts.dtype)
