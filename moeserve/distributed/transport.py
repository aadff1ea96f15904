"""The transport interface: collectives on the tensors of one group, and their parts that all transports share.

A group's transport is chosen when it is connected. Tensors on the CPU use shared memory (`shared_memory.py`) where all
ranks are on one host, else gloo (`gloo.py`), with the same bytes as results. Tensors on GPUs use NCCL (`nccl.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

# Sums of these dtypes accumulate in float32; sums of all others in their own dtype.
ACCUMULATED_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


class TransportError(Exception):
    """A collective failed. The message gives the cause; the group coordinator adds which collective it was."""


class TransportUnavailable(Exception):
    """A rank of the group cannot use a transport, so none of them does. Raised on all ranks."""


# The result of a collective under way, and the function that waits until it is complete (TransportError if it fails).
Pending: TypeAlias = tuple[Tensor, Callable[[], object]]


class Transport(Protocol):
    """One rank's collectives with the other ranks (at least one) of a group.

    Collectives have the contracts of `GroupCoordinator`. Sizes are rows of each rank, and consistent with x. Calls come
    from one thread at a time. Properties and methods with a default are overridden by the transports that differ.
    """

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending: ...

    def begin_all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending: ...

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor: ...

    def share_memory(self, num_bytes: int) -> Tensor:
        """See `GroupCoordinator.share_memory`. Raises TransportError if a rank does not come in time."""
        raise TransportUnavailable(f"{type(self).__name__} shares no memory")

    def close(self) -> None:
        """Drop the connections, so that ranks waiting for this one fail at once. May be called twice."""
        ...

    def begin_step(self) -> None:
        """Restart the numbering of operations that `seconds_waited` uses. All ranks call it at the same point."""
        return

    def seconds_waited(self) -> list[float]:
        """Return the seconds spent waiting for other ranks by index of the operation in its step, all steps together.

        Equally long on all ranks. Empty if this transport does not measure.
        """
        return []

    @property
    def progresses_in_background(self) -> bool:
        """True if a collective under way proceeds while its rank computes, and lets later collectives pass."""
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
        """While capturing: call `fail` with the cause when the collective just waited for fails during a replay."""
        raise AssertionError(f"CPU graphs cannot capture the collectives of {type(self).__name__}")

    def raise_failure(self) -> None:
        """Raise TransportError if a collective on a device failed after it had returned: its result is invalid."""
        return


def reduce_scatter_by_all_to_all(
    transport: Transport, x: Tensor, sizes: Sequence[int], rank_in_group: int, dtype: torch.dtype | None
) -> Tensor:
    """Return this rank's rows of the sum: receive them from all ranks, and add them in the tree."""
    num_own = sizes[rank_in_group]
    parts, wait = transport.begin_all_to_all(x, sizes, [num_own] * len(sizes))
    wait()
    return sum_in_tree(parts.view(len(sizes), num_own, *x.shape[1:]), dtype)


def sum_in_tree(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum over the first dimension: ((0 + 1) + (2 + 3)) + ..., where the last parts may lack a neighbour.

    So twice as many parts have a sum of the same bytes, if neighbours among them add up to these parts.

    Args:
        dtype: to which the sum is rounded; None: that of the parts.
    """
    sums = list(parts.float() if parts.dtype in ACCUMULATED_IN_FLOAT32 else parts)
    while len(sums) > 1:
        last = sums[-1:] if len(sums) % 2 else []
        sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=False)] + last
    return sums[0].to(dtype or parts.dtype)
