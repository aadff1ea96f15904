"""How the rows of one group travel: what every way of it can do. Knows ranks of the group and tensors.

Which way a group takes is chosen once, when it is connected: `shared_memory.py` where its ranks are on one host and can
map each other's memory, else `gloo.py`. What comes out has the same bytes. Tensors on GPUs go by `nccl.py`, beside one
of these two for what is on the host all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

from moeserve.distributed.mesh import share_sizes

# Sums of these are added in float32; of all other dtypes, in their own.
ADDED_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


class TransportError(Exception):
    """A collective failed. Says why, in words that can follow a colon, and not where: the group adds that."""


# A tensor that is on its way, and what waits until it is there. TransportError as of the collective itself.
Pending: TypeAlias = tuple[Tensor, Callable[[], object]]


class Transport(Protocol):
    """One rank's connections with the others of a group, of which there is at least one.

    The contracts are those of `GroupCoordinator`. Sizes are rows of each rank and fit to x. One thread at a time.
    """

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending: ...

    def begin_all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending: ...

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def begin_step(self) -> None:
        """Operations begun from now on are the first, the second and so on of a step. The same ones on all ranks."""
        ...

    def seconds_waited(self) -> list[float]:
        """By place among the operations of a step, all steps together: for what was not there yet."""
        ...

    @property
    def supports_cpu_graphs(self) -> bool:
        """Whether collectives that are begun and waited for while a graph is recorded can be played from it."""
        ...

    @property
    def is_capturing(self) -> bool:
        """Whether this thread records a graph."""
        ...

    def on_replay_failure(self, fail: Callable[[str], NoReturn]) -> None:
        """While a graph is recorded: what raises an error when the collective waited for last fails as it is played.

        It gets what `TransportError` would say.
        """

    def close(self) -> None:
        """Drop the connections: ranks that wait for this one fail at once."""


class NotCapturable:
    """The part of a `Transport` that graphs cannot hold."""

    @property
    def supports_cpu_graphs(self) -> bool:
        return False

    @property
    def is_capturing(self) -> bool:
        return False

    def on_replay_failure(self, fail: Callable[[str], NoReturn]) -> None:
        raise AssertionError(f"the collectives of {type(self).__name__} cannot be recorded on graphs")


class DeviceTransport(Transport, Protocol):
    """A `Transport` of tensors on a device that works on its own, in the order of streams.

    What is begun, waited for and returned is so for the current stream: the host waits for nothing, and a collective
    that fails on the device does so after it has returned.
    """

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether collectives of the same sizes can be captured in a CUDA graph, and replayed by all ranks."""
        ...

    def raise_failure(self) -> None:
        """TransportError when a collective has failed on the device: what has come of it is no result."""
        ...


class ByDevice(NotCapturable):
    """A `Transport` of both kinds of tensors: each goes the way of the device that it is on.

    Ranks put a collective's tensors on the same kind of device, as they use the same sizes. Nothing of it is recorded
    on graphs, which are for ranks without a GPU.
    """

    def __init__(self, cpu: Transport, cuda: DeviceTransport | None) -> None:
        """
        Args:
            cuda: None: all of the group's tensors are on the CPU.
        """
        self._cpu = cpu
        self._cuda = cuda

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        return self._way_of(x).begin_all_gather(x, sizes)

    def begin_all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        return self._way_of(x).begin_all_to_all(x, send_sizes, receive_sizes)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._way_of(x).reduce_scatter(x, sizes)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._way_of(x).all_reduce(x)

    def begin_step(self) -> None:
        self._cpu.begin_step()
        if self._cuda is not None:
            self._cuda.begin_step()

    def seconds_waited(self) -> list[float]:
        """The host's, which waits for tensors on the CPU alone."""
        return self._cpu.seconds_waited()

    @property
    def supports_cuda_graphs(self) -> bool:
        return self._cuda is not None and self._cuda.supports_cuda_graphs

    def raise_failure(self) -> None:
        if self._cuda is not None:
            self._cuda.raise_failure()

    def close(self) -> None:
        if self._cuda is not None:
            self._cuda.close()
        self._cpu.close()

    def _way_of(self, x: Tensor) -> Transport:
        if x.device.type == "cpu":
            return self._cpu
        assert self._cuda is not None, f"the group carries tensors on the CPU alone, not on {x.device}"
        return self._cuda


def all_gather(transport: Transport, x: Tensor, sizes: Sequence[int]) -> Tensor:
    gathered, wait = transport.begin_all_gather(x, sizes)
    wait()
    return gathered


def exchange_and_add(transport: Transport, x: Tensor, sizes: Sequence[int], rank_in_group: int) -> Tensor:
    """`reduce_scatter`, of an exchange."""
    own = sizes[rank_in_group]
    parts, wait = transport.begin_all_to_all(x, sizes, [own] * len(sizes))
    wait()
    return sum_in_order(parts.view(len(sizes), own, *x.shape[1:]))


def gather_and_add(transport: Transport, x: Tensor, num_ranks: int) -> Tensor:
    """`all_reduce` in which every rank adds everything."""
    num_values = x.numel()
    parts = all_gather(transport, x.reshape(-1), [num_values] * num_ranks)
    return sum_in_order(parts.view(num_ranks, num_values)).view(x.shape)


def add_shares_and_gather(transport: Transport, x: Tensor, num_ranks: int) -> Tensor:
    """`all_reduce` in which each rank adds a share."""
    sizes = share_sizes(x.numel(), num_ranks)
    return all_gather(transport, transport.reduce_scatter(x.reshape(-1), sizes), sizes).view(x.shape)


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum over the first dimension, first to last. The parts' dtype."""
    total = parts[0].to(torch.float32 if parts.dtype in ADDED_IN_FLOAT32 else parts.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
