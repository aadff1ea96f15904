"""The groups of ranks, and every collective that the engine uses. Knows tensors and ranks, not what they mean.

Everything is built from one exchange of rows between all ranks of a group, for which gloo has a collective that takes
any number of rows from each to each, also none. Nothing here touches torch.distributed's global state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from moeserve.distributed import gloo
from moeserve.distributed.mesh import Axis, Mesh, share_sizes
from moeserve.distributed.order_check import NO_STEP, Announcement, Operation, OrderCheck
from moeserve.distributed.store import Noticeboard, listed, own_address, start_store
from moeserve.errors import DistributedError

__all__ = [
    "GroupCoordinator",
    "Groups",
    "PendingTensor",
    "connect",
    "group_of_one",
    "single",
    "start_store",
    "unconnected",
]

# all_reduce takes one exchange when every rank adds everything, and two when each adds a share. With n ranks the first
# way receives about n - 2 times the size of x more, so with two ranks nothing more; up to here it is the quicker one.
MAX_EXTRA_BYTES = 2**20

# Sums of these are added in float32; of all other dtypes, in their own.
ADDED_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)

AXES: tuple[Axis, ...] = ("tp", "dp", "ep")


def group_of_one(name: str, rank: int = 0) -> GroupCoordinator:
    """A group without others: every collective returns what it is given."""
    return GroupCoordinator(name=name, rank=rank, ranks=(rank,), local_rank=0, connections=None)


def single() -> Groups:
    """The groups of an engine of one rank."""
    world, tp, dp, ep = map(group_of_one, ("world", *AXES))
    return Groups(mesh=Mesh(tp=1, dp=1), rank=0, world=world, tp=tp, dp=dp, ep=ep)


def unconnected(mesh: Mesh, rank: int) -> Groups:
    """The groups of one rank of a mesh that nobody started: to build its part of a model and look at it."""

    def coordinator(name: str, ranks: tuple[int, ...]) -> GroupCoordinator:
        return GroupCoordinator(name=name, rank=rank, ranks=ranks, local_rank=0, connections=None)

    tp, dp, ep = (coordinator(axis, mesh.group(axis, rank)) for axis in AXES)
    world = coordinator("world", tuple(range(mesh.world_size)))
    return Groups(mesh=mesh, rank=rank, world=world, tp=tp, dp=dp, ep=ep)


def connect(
    mesh: Mesh,
    rank: int,
    *,
    store_host: str,
    store_port: int,
    store_key: str = "",
    timeout_s: float,
    local_rank: int,
    check_order: bool,
) -> Groups:
    """Meet the other ranks of the mesh at a store, and connect with them. Each rank calls it once for each store.

    store_key is a secret of the launch: whoever else reaches the store knows no name of anything in it. local_rank
    counts the ranks of this host. timeout_s holds for coming here and for each collective afterwards. With
    check_order, ranks tell each other what they are about to join before every collective: slow, for debugging.

    DistributedError names the ranks that did not come. Listens on the address from which the store is reached.
    """
    address = own_address(rank, store_host, store_port, timeout_s)
    server = TCPStore(store_host, store_port, is_master=False, timeout=timedelta(seconds=timeout_s))
    store = PrefixStore(store_key, server) if store_key else server
    noticeboard = Noticeboard(rank, store, timeout_s)
    noticeboard.meet(range(mesh.world_size))

    def process_group(name: str, ranks: tuple[int, ...]) -> ProcessGroupGloo:
        prefix = PrefixStore(f"{name}/{ranks[0]}", store)
        try:
            return gloo.process_group(prefix, ranks.index(rank), len(ranks), address=address, timeout_s=timeout_s)
        except RuntimeError as error:
            what = f"group {name!r} ({listed(ranks)}) could not be connected: {gloo.cause(error, timeout_s)}"
            noticeboard.report(what)
            raise DistributedError(f"rank {rank}: {what}. {noticeboard.blame(ranks)}") from error

    everyone = tuple(range(mesh.world_size))
    order_check = OrderCheck(rank, process_group("order", everyone)) if check_order and len(everyone) > 1 else None

    def coordinator(name: str, ranks: tuple[int, ...]) -> GroupCoordinator:
        connections = None
        if len(ranks) > 1:
            connections = Connections(process_group(name, ranks), noticeboard, order_check, timeout_s)
        group = GroupCoordinator(name=name, rank=rank, ranks=ranks, local_rank=local_rank, connections=connections)
        group.barrier()  # what cannot work fails here, not in the first step
        return group

    world = coordinator("world", everyone)
    tp, dp, ep = (coordinator(axis, mesh.group(axis, rank)) for axis in AXES)
    return Groups(mesh=mesh, rank=rank, world=world, tp=tp, dp=dp, ep=ep, noticeboard=noticeboard)


@dataclass(frozen=True)
class Connections:
    """What the coordinator of several ranks holds."""

    process_group: ProcessGroupGloo
    noticeboard: Noticeboard
    order_check: OrderCheck | None
    timeout_s: float


@dataclass(frozen=True)
class PendingTensor:
    """A tensor that is on its way."""

    tensor: Tensor
    finish: Callable[[], None]

    def wait(self) -> Tensor:
        """The tensor once all of it is here. DistributedError as of the collective itself."""
        self.finish()
        return self.tensor


class GroupCoordinator:
    """One rank's membership of a group, with its collectives.

    Every rank of the group calls the same collectives in the same order. Tensors are on the CPU, of any dtype of
    float16, bfloat16, float32, float64, integers and bool, and need not be contiguous. Rows are entries of the first
    dimension, and ranks may have none. A group of one returns its own input, not a copy.

    DistributedError when a rank has died, or does not take part in time.
    """

    def __init__(
        self, *, name: str, rank: int, ranks: tuple[int, ...], local_rank: int, connections: Connections | None
    ) -> None:
        assert rank in ranks
        self.name = name
        self.rank = rank  # of this process in the world
        self.ranks = ranks  # of the group, ascending
        self.local_rank = local_rank  # among the ranks of this host
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(rank)
        self.cpu_group = connections.process_group if connections else None
        self.device_group = self.cpu_group
        self.step = NO_STEP  # this and the next: shown in errors
        self.layer: int | None = None
        self._connections = connections
        self._number = 0  # of the collective under way
        self._announce = self._check if connections and connections.order_check else self._count

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in float32 in rank order: the same bytes on all ranks."""
        if self.world_size == 1:
            return x
        self._announce("all_reduce", x.dtype, x.shape)
        flat = x.reshape(-1)
        num_values = flat.numel()
        if num_values * x.element_size() * (self.world_size - 2) <= MAX_EXTRA_BYTES:
            parts = self._gather(flat, [num_values] * self.world_size, "all_reduce")
            return _sum_in_order(parts.view(self.world_size, num_values)).view(x.shape)
        sizes = share_sizes(num_values, self.world_size)
        return self._gather(self._reduce(flat, sizes, "all_reduce"), sizes, "all_reduce").view(x.shape)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks in rank order: x [sizes[rank_in_group], ...] -> [sum(sizes), ...]."""
        return self.begin_all_gather(x, sizes).wait()

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> PendingTensor:
        """`all_gather`, returning at once. x may be overwritten only after the wait."""
        assert len(x) == sizes[self.rank_in_group]
        if self.world_size == 1:
            return PendingTensor(x, _nothing)
        self._announce("all_gather", x.dtype, x.shape[1:], sizes)
        return self._begin_gather(x, sizes, "all_gather")

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's rows of the sum over ranks: x [sum(sizes), ...] -> [sizes[rank_in_group], ...].

        Added in float32 in rank order.
        """
        assert len(x) == sum(sizes)
        if self.world_size == 1:
            return x
        self._announce("reduce_scatter", x.dtype, x.shape[1:], sizes)
        return self._reduce(x, sizes, "reduce_scatter")

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> PendingTensor:
        """Send rows to each rank: x [sum(send_sizes), ...] -> [sum(receive_sizes), ...], both in rank order.

        Returns at once. x may be overwritten only after the wait.
        """
        assert len(x) == sum(send_sizes)
        if self.world_size == 1:
            return PendingTensor(x, _nothing)
        self._announce("all_to_all", x.dtype, x.shape[1:], (), send_sizes, receive_sizes)
        return self._exchange(x, send_sizes, receive_sizes, "all_to_all")

    def broadcast(self, x: Tensor, source_in_group: int) -> Tensor:
        """x of the source rank. The others pass a tensor of the same shape and dtype, whose values do not matter."""
        assert 0 <= source_in_group < self.world_size
        if self.world_size == 1:
            return x
        self._announce("broadcast", x.dtype, x.shape, (source_in_group,))
        receive_sizes = [0] * self.world_size
        receive_sizes[source_in_group] = x.numel()
        copies = self.world_size if self.rank_in_group == source_in_group else 0
        send_sizes = [x.numel() if copies else 0] * self.world_size
        return self._exchange(x.reshape(-1).repeat(copies), send_sizes, receive_sizes, "broadcast").wait().view(x.shape)

    def all_reduce_minimum(self, value: int) -> int:
        """The least of all ranks' values, which fit into 64 bits."""
        if self.world_size == 1:
            return value
        self._announce("all_reduce_minimum", torch.int64)
        return int(self._gather(torch.tensor([value]), [1] * self.world_size, "all_reduce_minimum").min())

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.world_size > 1:
            self._announce("barrier", torch.uint8)
            self._gather(torch.zeros(1, dtype=torch.uint8), [1] * self.world_size, "barrier")

    def close(self) -> None:
        """Drop the connections: ranks that wait for this one fail at once. Nothing may be under way."""
        self.cpu_group = self.device_group = self._connections = None

    def _gather(self, x: Tensor, sizes: Sequence[int], operation: Operation) -> Tensor:
        return self._begin_gather(x, sizes, operation).wait()

    def _begin_gather(self, x: Tensor, sizes: Sequence[int], operation: Operation) -> PendingTensor:
        copies = x.repeat(self.world_size, *[1] * (x.dim() - 1))
        return self._exchange(copies, [len(x)] * self.world_size, sizes, operation)

    def _reduce(self, x: Tensor, sizes: Sequence[int], operation: Operation) -> Tensor:
        own = sizes[self.rank_in_group]
        parts = self._exchange(x, sizes, [own] * self.world_size, operation).wait()
        return _sum_in_order(parts.view(self.world_size, own, *x.shape[1:]))

    def _exchange(
        self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], operation: Operation
    ) -> PendingTensor:
        """Rows from all to all: the one thing that ranks do."""
        at = self._position()
        sent = x.contiguous()
        received = x.new_empty((sum(receive_sizes), *x.shape[1:]))
        try:
            work = gloo.exchange(self._connected.process_group, sent, send_sizes, received, receive_sizes)
        except RuntimeError as error:
            self._fail(operation, at, error)

        def finish() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                self._fail(operation, at, error)

        return PendingTensor(received, finish)

    @property
    def _connected(self) -> Connections:
        if self._connections is None:
            raise DistributedError(f"rank {self.rank}: group {self.name!r} is closed")
        return self._connections

    def _count(
        self,
        operation: Operation,
        dtype: torch.dtype,
        shape: Sequence[int] = (),
        sizes: Sequence[int] = (),
        send_sizes: Sequence[int] = (),
        receive_sizes: Sequence[int] = (),
    ) -> None:
        self._number += 1

    def _check(
        self,
        operation: Operation,
        dtype: torch.dtype,
        shape: Sequence[int] = (),
        sizes: Sequence[int] = (),
        send_sizes: Sequence[int] = (),
        receive_sizes: Sequence[int] = (),
    ) -> None:
        """Count, and make sure that all ranks of the group are about to join the same."""
        self._number += 1
        connected = self._connected
        assert connected.order_check
        mine = Announcement(
            group=self.name,
            operation=operation,
            number=self._number,
            step=self.step,
            dtype=str(dtype).removeprefix("torch."),
            shape=tuple(shape),
            sizes=tuple(sizes),
        )
        announcements = {
            rank: replace(mine, num_sent=send_sizes[index], num_expected=receive_sizes[index]) if send_sizes else mine
            for index, rank in enumerate(self.ranks)
            if rank != self.rank
        }
        try:
            disagreement = connected.order_check.disagreement(announcements)
        except RuntimeError as error:
            self._fail(operation, self._position(), error)
        if disagreement is not None:
            connected.noticeboard.report(disagreement)
            raise DistributedError(f"ranks disagree on what comes next: {disagreement}")

    def _position(self) -> str:
        """Which collective this is."""
        step = "" if self.step == NO_STEP else f", step {self.step}"
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"number {self._number}{step}{layer}"

    def _fail(self, operation: Operation, position: str, error: RuntimeError) -> NoReturn:
        """Say what is known, on this rank and in the store."""
        connected = self._connected
        where = f"{operation} of group {self.name!r} ({listed(self.ranks)}; {position})"
        cause = gloo.cause(error, connected.timeout_s)
        connected.noticeboard.report(f"{where} failed: {cause}")
        blame = connected.noticeboard.blame(self.ranks)
        raise DistributedError(f"rank {self.rank}: {where} failed: {cause}. {blame}") from error


@dataclass(frozen=True)
class Groups:
    """The groups that one rank is in. Ranks that are alone in a group have a coordinator too."""

    mesh: Mesh
    rank: int
    world: GroupCoordinator
    tp: GroupCoordinator
    dp: GroupCoordinator
    ep: GroupCoordinator
    noticeboard: Noticeboard | None = None  # none where nobody else is

    def set_step(self, step: int) -> None:
        """Tell the groups which step this is, for their errors and the order check."""
        for group in (self.world, self.tp, self.dp, self.ep):
            group.step = step

    def set_layer(self, layer: int | None) -> None:
        """Tell the groups which layer of the model is computed, for their errors; None: outside all layers."""
        for group in (self.world, self.tp, self.dp, self.ep):
            group.layer = layer

    def leave(self, why: str) -> None:
        """Stop taking part, because of an error of this rank's own: the others' errors will say why.

        Ranks that wait for this one fail at once, unless a collective is under way here; then, when the process ends.
        """
        if self.noticeboard:
            self.noticeboard.report(why)
        for group in (self.world, self.tp, self.dp, self.ep):
            group.close()


def _sum_in_order(parts: Tensor) -> Tensor:
    """The sum over the first dimension, first to last. The parts' dtype."""
    total = parts[0].to(torch.float32 if parts.dtype in ADDED_IN_FLOAT32 else parts.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def _nothing() -> None:
    return
