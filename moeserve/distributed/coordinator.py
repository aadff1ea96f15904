"""One rank's membership of a group, with all collectives that the engine uses.

The transport carries the data. This file adds the parts that all transports have in common: counters, the check of the
order of collectives, and errors that name ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from moeserve.distributed.order_check import NO_STEP, CollectiveCall, Operation, OrderCheck
from moeserve.distributed.store import RankStore, format_ranks
from moeserve.distributed.transport import Pending, Transport, TransportError
from moeserve.errors import DistributedError


@dataclass(frozen=True)
class GroupConnection:
    """The objects through which the coordinator of a group of several ranks reaches the other ranks.

    In each collective, all ranks have their tensors on the same kind of device.
    """

    transport: Transport  # carries tensors on the CPU
    store: RankStore
    order_check: OrderCheck | None
    device_transport: Transport | None = None  # carries tensors on this rank's GPU
    make_torch_group: Callable[[], Any] | None = None  # makes a torch.distributed group of the ranks' GPUs

    def transport_of(self, x: Tensor) -> Transport:
        if x.device.type == "cpu":
            return self.transport
        assert self.device_transport is not None, f"this group carries tensors on the CPU only, not on {x.device}"
        return self.device_transport


@dataclass(frozen=True)
class PendingTensor:
    """The result of a collective in progress."""

    tensor: Tensor
    finish: Callable[[], None]

    def wait(self) -> Tensor:
        """Return the tensor once it is complete. May be called twice. Raises DistributedError on failure."""
        self.finish()
        return self.tensor


class GroupCoordinator:
    """One rank's membership of a group, with its collectives.

    Every rank of the group calls the same collectives in the same order. Tensors on the CPU may be of dtype float16,
    bfloat16, float32, float64, bool or any integer, and need not be contiguous. Rows are the entries of the first
    dimension; a rank may have no rows. In a group of one rank, collectives return their input, not a copy.

    The tp, ep and stage groups also carry tensors on the ranks' GPUs; see `nccl.py` for dtypes and for the order of
    additions. With GPU tensors, a collective or a wait returns as soon as it is queued on the current stream.

    Each collective raises DistributedError if a rank has died or does not join in time. With GPU tensors the error may
    be raised later: see `raise_failure`.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        node_of_rank: tuple[int, ...],
        connection: GroupConnection | None,
    ) -> None:
        """
        Args:
            rank: the rank of this process in the world.
            ranks: the ranks of the group, ascending.
            node_of_rank: the index of the host of each rank of the group, in the group's order.
            connection: None if the group has no other ranks, or is left unconnected.
        """
        assert rank in ranks
        self.name = name
        self.rank = rank
        self.ranks = ranks
        self.node_of_rank = node_of_rank
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(rank)
        self.step = NO_STEP  # errors name the step and the layer
        self.layer: int | None = None
        self.num_begun = 0  # collectives begun, including the one in progress
        self.num_bytes_sent = 0  # bytes sent to other ranks; with shared memory, bytes that other ranks read
        self._connection = connection

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows of all ranks in rank order: x [sizes[rank_in_group], ...] -> [sum(sizes), ...]."""
        return self.begin_all_gather(x, sizes).wait()

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> PendingTensor:
        """Begin `all_gather` and return at once. x must not change before the result is waited for."""
        assert len(x) == sizes[self.rank_in_group]
        if self.world_size == 1:
            return PendingTensor(x, _nothing)
        self._count_and_check("all_gather", x.dtype, x.shape[1:], sizes)
        self.num_bytes_sent += x.nbytes * (self.world_size - 1)
        return self._begin_all_gather(x, sizes, "all_gather")

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's rows of the sum over ranks: x [sum(sizes), ...] -> [sizes[rank_in_group], ...].

        CPU tensors are added in a tree of ranks (`sum_in_tree`). For GPU tensors see `nccl.py`.

        Args:
            dtype: dtype to which the sum is rounded; None: the dtype of x. If given, GPU tensors are added in the same
                tree as CPU tensors.
        """
        assert len(x) == sum(sizes)
        if self.world_size == 1:
            return x if dtype is None else x.to(dtype)
        self._count_and_check("reduce_scatter", x.dtype, x.shape[1:], sizes)
        self._count_rows_sent(x, sizes)
        try:
            reduced = self._connected.transport_of(x).reduce_scatter(x, sizes, dtype)
        except TransportError as error:
            self._fail("reduce_scatter", self._position(), error)
        self._prepare_replay("reduce_scatter")
        return reduced

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> PendingTensor:
        """Begin to send rows to each rank: x [sum(send_sizes), ...] -> [sum(receive_sizes), ...], both in rank order.

        Returns at once. x must not change before the result is waited for.
        """
        assert len(x) == sum(send_sizes)
        if self.world_size == 1:
            return PendingTensor(x, _nothing)
        self._count_and_check("all_to_all", x.dtype, x.shape[1:], (), send_sizes, receive_sizes)
        self._count_rows_sent(x, send_sizes)
        try:
            pending = self._connected.transport_of(x).begin_all_to_all(x, send_sizes, receive_sizes)
        except TransportError as error:
            self._fail("all_to_all", self._position(), error)
        return self._pending_tensor(pending, "all_to_all")

    def broadcast(self, x: Tensor, source_in_group: int) -> Tensor:
        """Return the source rank's x. Other ranks pass a tensor of the same shape and dtype; its values are unused."""
        assert 0 <= source_in_group < self.world_size
        if self.world_size == 1:
            return x
        self._count_and_check("broadcast", x.dtype, x.shape, (source_in_group,))
        sizes = [0] * self.world_size
        sizes[source_in_group] = x.numel()
        sent = x.reshape(-1)[: sizes[self.rank_in_group]]
        return self._begin_all_gather(sent, sizes, "broadcast").wait().view(x.shape)

    def all_reduce_minimum(self, value: int) -> int:
        """Return the minimum of all ranks' values, which must fit into 64 bits."""
        if self.world_size == 1:
            return value
        self._count_and_check("all_reduce_minimum", torch.int64)
        return int(self._gather_scalars(torch.tensor([value]), "all_reduce_minimum").min())

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks in rank order."""
        padded = torch.frombuffer(bytearray(b"\0" + data), dtype=torch.uint8)  # every rank sends a byte or more
        sizes = self.all_gather(torch.tensor([len(padded)]), [1] * self.world_size).tolist()
        gathered = self.all_gather(padded, sizes).split(sizes)
        return [bytes(each[1:].numpy()) for each in gathered]

    def barrier(self) -> None:
        """Wait until all ranks of the group have called `barrier`."""
        if self.world_size > 1:
            self._count_and_check("barrier", torch.uint8)
            self._gather_scalars(torch.zeros(1, dtype=torch.uint8), "barrier")

    def share_memory(self, num_bytes: int) -> Tensor:
        """Return uint8 memory that all ranks map, filled with zeros. Pages that no rank writes take no physical memory.

        Collective: all ranks of the group. Once a later collective is complete, a rank can read what other ranks wrote
        to the memory before they joined that collective.

        Raises:
            TransportUnavailable: on all ranks, if one of them cannot map the memory; the message gives the reason.
        """
        try:
            return self._connected.transport.share_memory(num_bytes)
        except TransportError as error:
            self._fail("share_memory", self._position(), error)

    def make_torch_group(self) -> Any:
        """Return the ep group between GPUs as a torch.distributed ProcessGroup, for libraries that need one."""
        make = self._connected.make_torch_group
        assert make is not None
        return make()

    def begin_step(self, step: int) -> None:
        """Set the step number for errors and the order check, and restart the operation indices of `seconds_waited`."""
        self.step = step
        if self._connection is not None:
            self._connection.transport.begin_step()

    def seconds_waited(self) -> list[float]:
        """Return the seconds spent waiting for other ranks: entry i is the sum over all steps of a step's operation i.

        Only the ep group is measured; other groups return an empty list. The list has the same length on all ranks. A
        collective is one or two operations.
        """
        return [] if self._connection is None else self._connection.transport.seconds_waited()

    @property
    def progresses_in_background(self) -> bool:
        """True if a collective in progress advances while its rank computes, without blocking later collectives."""
        return self._connection is None or self._connection.transport.progresses_in_background

    @property
    def supports_cpu_graphs(self) -> bool:
        """True if CPU graphs can capture and replay collectives of this group."""
        if self.world_size == 1:
            return True
        connection = self._connected
        if connection.order_check is not None or connection.device_transport is not None:
            return False
        return connection.transport.supports_cpu_graphs

    @property
    def supports_cuda_graphs(self) -> bool:
        """True if CUDA graphs can capture and replay collectives of this group on GPU tensors."""
        if self.world_size == 1:
            return True
        connection = self._connected
        return connection.order_check is None and connection.device_transport is not None

    def raise_failure(self) -> None:
        """Raise DistributedError if a collective on a GPU was aborted: the GPU stream continues without a valid result.

        Call this after the host has waited for the GPU, before results are used. The call costs almost nothing.
        """
        if self._connection is not None and self._connection.device_transport is not None:
            try:
                self._connection.device_transport.raise_failure()
            except TransportError as error:
                self._fail("a collective", f"up to {self._position()}", error)

    def close(self) -> None:
        """Close the connection, which other groups with the same members share. No collective may be in progress.

        Ranks that wait for this rank fail at once.
        """
        if self._connection is not None:
            if self._connection.device_transport is not None:
                self._connection.device_transport.close()
            self._connection.transport.close()
            self._connection = None

    def adopt(self, connected: GroupCoordinator) -> None:
        """Take over the connection of another coordinator of the same ranks. This coordinator must have been closed."""
        assert (self.name, self.rank, self.ranks) == (connected.name, connected.rank, connected.ranks)
        assert self._connection is None
        self._connection = connected._connection
        self.step, self.layer = NO_STEP, None
        self.num_begun, self.num_bytes_sent = connected.num_begun, 0

    @property
    def _connected(self) -> GroupConnection:
        if self._connection is None:
            raise DistributedError(f"rank {self.rank}: group {self.name!r} is closed")
        return self._connection

    def _gather_scalars(self, x: Tensor, operation: Operation) -> Tensor:
        return self._begin_all_gather(x, [1] * self.world_size, operation).wait()

    def _begin_all_gather(self, x: Tensor, sizes: Sequence[int], operation: Operation) -> PendingTensor:
        try:
            pending = self._connected.transport_of(x).begin_all_gather(x, sizes)
        except TransportError as error:
            self._fail(operation, self._position(), error)
        return self._pending_tensor(pending, operation)

    def _pending_tensor(self, pending: Pending, operation: Operation) -> PendingTensor:
        tensor, wait = pending
        number, step, layer = self.num_begun, self.step, self.layer

        def finish() -> None:
            try:
                wait()
            except TransportError as error:
                self._fail(operation, _format_position(number, step, layer), error)
            self._prepare_replay(operation)

        return PendingTensor(tensor, finish)

    def _prepare_replay(self, operation: Operation) -> None:
        """While a CPU graph is being captured, register the error to raise if a replay of the last collective fails."""
        transport = self._connected.transport
        if not transport.is_capturing:
            return
        layer = self.layer

        def fail(cause: str) -> NoReturn:
            self._fail(operation, _format_position(self.num_begun, self.step, layer), TransportError(cause))

        transport.on_replay_failure(fail)

    def _count_rows_sent(self, x: Tensor, sizes: Sequence[int]) -> None:
        if len(x):
            self.num_bytes_sent += x.nbytes // len(x) * (len(x) - sizes[self.rank_in_group])

    def _count_and_check(
        self,
        operation: Operation,
        dtype: torch.dtype,
        shape: Sequence[int] = (),
        sizes: Sequence[int] = (),
        send_sizes: Sequence[int] = (),
        receive_sizes: Sequence[int] = (),
    ) -> None:
        """Count a collective. With an order check, verify that all ranks of the group call the same collective."""
        self.num_begun += 1
        connection = self._connected
        if connection.order_check is None:
            return
        call = CollectiveCall(
            group=self.name,
            operation=operation,
            number=self.num_begun,
            step=self.step,
            dtype=str(dtype).removeprefix("torch."),
            shape=tuple(shape),
            sizes=tuple(sizes),
        )
        calls = {
            rank: replace(call, num_sent=send_sizes[index], num_expected=receive_sizes[index]) if send_sizes else call
            for index, rank in enumerate(self.ranks)
            if rank != self.rank
        }
        try:
            mismatch = connection.order_check.find_mismatch(calls)
        except TransportError as error:
            self._fail(operation, self._position(), error)
        if mismatch is not None:
            connection.store.report_failure(mismatch)
            raise DistributedError(f"ranks call different collectives: {mismatch}")

    def _position(self) -> str:
        return _format_position(self.num_begun, self.step, self.layer)

    def _fail(self, operation: str, position: str, error: Exception) -> NoReturn:
        """Report the failure in the store, and raise an error with the reports of the other ranks."""
        connection = self._connected
        failure = f"{operation} of group {self.name!r} ({format_ranks(self.ranks)}; {position}) failed: {error}"
        connection.store.report_failure(failure)
        reports = connection.store.failure_reports(self.ranks)
        raise DistributedError(f"rank {self.rank}: {failure}. {reports}") from error


def _format_position(number: int, step: int, layer: int | None) -> str:
    shown_step = "" if step == NO_STEP else f", step {step}"
    shown_layer = "" if layer is None else f", layer {layer}"
    return f"collective {number}{shown_step}{shown_layer}"


def _nothing() -> None:
    return
