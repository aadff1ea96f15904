"""The groups of ranks, and every collective that the engine uses. Knows tensors and ranks, not what they mean.

How rows travel is a `Transport`'s business, chosen for each group when it is connected: ranks with a GPU have one for
what is on it, and one for what is on the host all the same. Here is what all of them share: counting, the check of the
order, errors that name ranks. Of torch.distributed's global state nothing is touched but names in one table, by
`symmetric_memory.py`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from moeserve.distributed import gloo, nccl, shared_memory, symmetric_memory
from moeserve.distributed.handshake import CannotReach
from moeserve.distributed.mesh import Axis, Mesh
from moeserve.distributed.order_check import NO_STEP, Announcement, Operation, OrderCheck
from moeserve.distributed.store import Noticeboard, listed, own_address, start_store
from moeserve.distributed.transport import ByDevice, Pending, Transport, TransportError
from moeserve.errors import DistributedError
from moeserve.machine import host_identity

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

logger = logging.getLogger(__name__)

# auto: shared memory for each group whose ranks are on one host and can map each other's memory, gloo for the others.
TransportName = Literal["auto", "gloo"]

AXES: tuple[Axis, ...] = ("tp", "dp", "ep")

CPU = torch.device("cpu")
GROUPS_OF_LAYERS = ("tp", "ep")  # whose tensors are where the model is; all others carry figures of the host


def group_of_one(name: str, rank: int = 0) -> GroupCoordinator:
    """A group without others: every collective returns what it is given."""
    return GroupCoordinator(name=name, rank=rank, ranks=(rank,), node_of_rank=(0,), local_rank=0, connections=None)


def single() -> Groups:
    """The groups of an engine of one rank."""
    world, tp, dp, ep = map(group_of_one, ("world", *AXES))
    return Groups(mesh=Mesh(tp=1, dp=1), rank=0, world=world, tp=tp, dp=dp, ep=ep)


def unconnected(mesh: Mesh, rank: int) -> Groups:
    """The groups of one rank of a mesh that nobody started: to build its part of a model and look at it."""

    def coordinator(name: str, ranks: tuple[int, ...]) -> GroupCoordinator:
        nodes = (0,) * len(ranks)
        return GroupCoordinator(name=name, rank=rank, ranks=ranks, node_of_rank=nodes, local_rank=0, connections=None)

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
    transport: TransportName = "auto",
    device: torch.device = CPU,
) -> Groups:
    """Meet the other ranks of the mesh at a store, and connect with them. Each rank calls it once for each store.

    store_key is a secret of the launch: whoever else reaches the store knows no name of anything in it. local_rank
    counts the ranks of this host. timeout_s holds for coming here and for each collective afterwards. With
    check_order, ranks tell each other what they are about to join before every collective: slow, for debugging.

    `transport` is that of tensors on the CPU. With a GPU for `device`, which no other rank has and which is current in
    this thread, the groups that layers use carry tensors on it as well, over NCCL, which adds as is quickest.

    DistributedError names the ranks that did not come. SettingsError where there is a GPU, but no NCCL. gloo and NCCL
    listen on the address from which the store is reached; shared memory has no address, and no name anywhere.
    """
    address = own_address(rank, store_host, store_port, timeout_s)
    server = TCPStore(store_host, store_port, is_master=False, timeout=timedelta(seconds=timeout_s))
    store = PrefixStore(store_key, server) if store_key else server
    noticeboard = Noticeboard(rank, store, timeout_s)
    hosts = noticeboard.meet(range(mesh.world_size), host_identity())

    def refuse(name: str, ranks: tuple[int, ...], why: str, error: Exception) -> NoReturn:
        what = f"group {name!r} ({listed(ranks)}) could not be connected: {why}"
        noticeboard.report(what)
        raise DistributedError(f"rank {rank}: {what}. {noticeboard.blame(ranks)}") from error

    def process_group(name: str, ranks: tuple[int, ...]) -> ProcessGroupGloo:
        prefix = PrefixStore(f"{name}/{ranks[0]}", store)
        try:
            return gloo.process_group(prefix, ranks.index(rank), len(ranks), address=address, timeout_s=timeout_s)
        except RuntimeError as error:
            refuse(name, ranks, gloo.cause(error, timeout_s), error)

    def connected(name: str, ranks: tuple[int, ...]) -> Transport:
        if transport == "auto":
            prefix = PrefixStore(f"memory/{name}/{ranks[0]}", store)
            try:
                return shared_memory.connect(
                    prefix, ranks, ranks.index(rank), num_ranks_in_all=mesh.world_size, timeout_s=timeout_s
                )
            except CannotReach as reason:
                if rank == 0 and name == "world":  # once is enough
                    logger.info("ranks cannot all share memory (%s): some talk over gloo, which is slower", reason)
            except TransportError as error:
                refuse(name, ranks, str(error), error)
        return gloo.GlooTransport(process_group(name, ranks), timeout_s)

    nccl_groups: dict[tuple[int, ...], Any] = {}  # by members: two at a time could wait for each other on the device

    def connected_on_device(name: str, ranks: tuple[int, ...]) -> nccl.NcclTransport:
        prefix = PrefixStore(f"{device.type}/{name}/{ranks[0]}", store)
        where = ranks.index(rank), len(ranks)
        is_new = ranks not in nccl_groups
        try:
            if is_new:
                nccl_groups[ranks] = nccl.process_group(
                    prefix, *where, device=device, address=address, timeout_s=timeout_s
                )
            one_shot = None
            if name == "tp":  # ep's sums may run beside tp's, on a stream of their own
                one_shot = sums_at_once(PrefixStore("symmetric", prefix), ranks, nccl_groups[ranks])
            through = nccl.NcclTransport(nccl_groups[ranks], timeout_s, one_shot=one_shot, owns_group=is_new)
            through.try_out(device)
            return through
        except TransportError as error:
            refuse(name, ranks, str(error), error)
        except RuntimeError as error:
            refuse(name, ranks, nccl.cause(error, timeout_s), error)

    def sums_at_once(
        prefix: PrefixStore, ranks: tuple[int, ...], nccl_group: Any
    ) -> symmetric_memory.OneShotSum | None:
        try:
            return symmetric_memory.connect(
                prefix,
                ranks.index(rank),
                len(ranks),
                is_one_host=len({hosts[member] for member in ranks}) == 1,
                device=device,
                timeout_s=timeout_s,
                library=symmetric_memory.TorchLibrary(nccl_group),
            )
        except CannotReach as reason:
            if rank == 0:  # once is enough
                logger.info("small sums go over NCCL, not through symmetric memory (%s)", reason)
            return None

    everyone = tuple(range(mesh.world_size))
    order_check = None
    if check_order and len(everyone) > 1:
        order_check = OrderCheck(rank, process_group("order", everyone), timeout_s)

    def coordinator(name: str, ranks: tuple[int, ...]) -> GroupCoordinator:
        connections = None
        if len(ranks) > 1:
            way: Transport = connected(name, ranks)
            if device.type != "cpu":
                way = ByDevice(way, connected_on_device(name, ranks) if name in GROUPS_OF_LAYERS else None)
            make_torch_group = None
            if name == "ep" and ranks in nccl_groups:
                where = PrefixStore("torch/ep", store), ranks.index(rank), len(ranks)
                make_torch_group = functools.partial(nccl.as_torch_group, *where, nccl_groups[ranks])
            connections = Connections(way, noticeboard, order_check, make_torch_group)
        group = GroupCoordinator(
            name=name,
            rank=rank,
            ranks=ranks,
            node_of_rank=tuple(hosts.index(hosts[member]) for member in ranks),
            local_rank=local_rank,
            connections=connections,
        )
        group.barrier()  # what cannot work fails here, not in the first step
        return group

    world = coordinator("world", everyone)
    tp, dp, ep = (coordinator(axis, mesh.group(axis, rank)) for axis in AXES)
    return Groups(mesh=mesh, rank=rank, world=world, tp=tp, dp=dp, ep=ep, noticeboard=noticeboard)


@dataclass(frozen=True)
class Connections:
    """What the coordinator of several ranks holds."""

    transport: Transport
    noticeboard: Noticeboard
    order_check: OrderCheck | None
    make_torch_group: Callable[[], Any] | None = None


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

    The groups that layers use carry tensors on the ranks' GPUs too, where `connect` was given these: see `nccl.py` for
    dtypes, and for the order in which sums are added. There a collective returns, and a wait ends, when the current
    stream will have waited.

    DistributedError when a rank has died, or does not take part in time. On a GPU it may come late: see
    `raise_failure`.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        node_of_rank: tuple[int, ...],
        local_rank: int,
        connections: Connections | None,
    ) -> None:
        assert rank in ranks
        self.name = name
        self.rank = rank  # of this process in the world
        self.ranks = ranks  # of the group, ascending
        self.node_of_rank = node_of_rank  # by rank in the group: a number of its host
        self.local_rank = local_rank  # among the ranks of this host
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(rank)
        self.step = NO_STEP  # this and the next: shown in errors
        self.layer: int | None = None
        self._connections = connections
        self.num_begun = 0  # collectives, the one under way included
        self.num_bytes_sent = 0  # to other ranks, where each of them is sent what is for it

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in float32 in rank order (on a GPU, see `nccl.py`): the same bytes on all ranks."""
        if self.world_size == 1:
            return x
        self._announce("all_reduce", x.dtype, x.shape)
        self.num_bytes_sent += x.nbytes * (self.world_size - 1)
        try:
            reduced = self._transport.all_reduce(x)
        except TransportError as error:
            self._fail("all_reduce", self._position(), error)
        self._prepare_replay("all_reduce")
        return reduced

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks in rank order: x [sizes[rank_in_group], ...] -> [sum(sizes), ...]."""
        return self.begin_all_gather(x, sizes).wait()

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> PendingTensor:
        """`all_gather`, returning at once. x may be overwritten only after the wait."""
        assert len(x) == sizes[self.rank_in_group]
        if self.world_size == 1:
            return PendingTensor(x, _nothing)
        self._announce("all_gather", x.dtype, x.shape[1:], sizes)
        self.num_bytes_sent += x.nbytes * (self.world_size - 1)
        return self._begin_all_gather(x, sizes, "all_gather")

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's rows of the sum over ranks: x [sum(sizes), ...] -> [sizes[rank_in_group], ...].

        Added in float32 in rank order; on a GPU, see `nccl.py`.
        """
        assert len(x) == sum(sizes)
        if self.world_size == 1:
            return x
        self._announce("reduce_scatter", x.dtype, x.shape[1:], sizes)
        self._count_rows_sent(x, sizes)
        try:
            reduced = self._transport.reduce_scatter(x, sizes)
        except TransportError as error:
            self._fail("reduce_scatter", self._position(), error)
        self._prepare_replay("reduce_scatter")
        return reduced

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> PendingTensor:
        """Send rows to each rank: x [sum(send_sizes), ...] -> [sum(receive_sizes), ...], both in rank order.

        Returns at once. x may be overwritten only after the wait.
        """
        assert len(x) == sum(send_sizes)
        if self.world_size == 1:
            return PendingTensor(x, _nothing)
        self._announce("all_to_all", x.dtype, x.shape[1:], (), send_sizes, receive_sizes)
        self._count_rows_sent(x, send_sizes)
        try:
            pending = self._transport.begin_all_to_all(x, send_sizes, receive_sizes)
        except TransportError as error:
            self._fail("all_to_all", self._position(), error)
        return self._arriving(pending, "all_to_all")

    def broadcast(self, x: Tensor, source_in_group: int) -> Tensor:
        """x of the source rank. The others pass a tensor of the same shape and dtype, whose values do not matter."""
        assert 0 <= source_in_group < self.world_size
        if self.world_size == 1:
            return x
        self._announce("broadcast", x.dtype, x.shape, (source_in_group,))
        sizes = [0] * self.world_size
        sizes[source_in_group] = x.numel()
        sent = x.reshape(-1)[: sizes[self.rank_in_group]]
        return self._begin_all_gather(sent, sizes, "broadcast").wait().view(x.shape)

    def all_reduce_minimum(self, value: int) -> int:
        """The least of all ranks' values, which fit into 64 bits."""
        if self.world_size == 1:
            return value
        self._announce("all_reduce_minimum", torch.int64)
        return int(self._gather_one(torch.tensor([value]), "all_reduce_minimum").min())

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.world_size > 1:
            self._announce("barrier", torch.uint8)
            self._gather_one(torch.zeros(1, dtype=torch.uint8), "barrier")

    def make_torch_group(self) -> Any:
        """The ep group between GPUs, as torch.distributed knows it, for a library that wants one."""
        make = self._connected.make_torch_group
        assert make is not None
        return make()

    def begin_step(self, step: int) -> None:
        """Tell which step this is, for errors and the order check; and to count from its first collective."""
        self.step = step
        if self._connections is not None:
            self._connections.transport.begin_step()

    def seconds_waited(self) -> list[float]:
        """For what other ranks had not sent yet: by place among the exchanges of a step, all steps together.

        All ranks have equally many: an exchange has the same place on each, and a collective is one or two of them.
        """
        return [] if self._connections is None else self._transport.seconds_waited()

    @property
    def supports_cpu_graphs(self) -> bool:
        """Whether a graph that was recorded during collectives of this group can be played."""
        if self.world_size == 1:
            return True
        return self._connected.order_check is None and self._transport.supports_cpu_graphs

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether collectives of this group, of tensors on a GPU, can be captured in a CUDA graph."""
        if self.world_size == 1:
            return True
        way = self._transport
        return self._connected.order_check is None and isinstance(way, ByDevice) and way.supports_cuda_graphs

    def raise_failure(self) -> None:
        """DistributedError when a collective on a GPU was given up since: its stream has gone on, without a result.

        For when the host has waited for the GPU, and before it believes what came from there. Costs next to nothing.
        """
        way = None if self._connections is None else self._transport
        if isinstance(way, ByDevice):
            try:
                way.raise_failure()
            except TransportError as error:
                self._fail("a collective", f"up to {self._position()}", error)

    def close(self) -> None:
        """Drop the connections: ranks that wait for this one fail at once. Nothing may be under way."""
        if self._connections is not None:
            self._connections.transport.close()
            self._connections = None

    def _count_rows_sent(self, x: Tensor, sizes: Sequence[int]) -> None:
        if len(x):
            self.num_bytes_sent += x.nbytes // len(x) * (len(x) - sizes[self.rank_in_group])

    def _gather_one(self, x: Tensor, operation: Operation) -> Tensor:
        return self._begin_all_gather(x, [1] * self.world_size, operation).wait()

    def _begin_all_gather(self, x: Tensor, sizes: Sequence[int], operation: Operation) -> PendingTensor:
        try:
            pending = self._transport.begin_all_gather(x, sizes)
        except TransportError as error:
            self._fail(operation, self._position(), error)
        return self._arriving(pending, operation)

    def _arriving(self, pending: Pending, operation: Operation) -> PendingTensor:
        tensor, wait = pending
        at = self.num_begun, self.step, self.layer

        def finish() -> None:
            try:
                wait()
            except TransportError as error:
                self._fail(operation, _shown_position(*at), error)
            self._prepare_replay(operation)

        return PendingTensor(tensor, finish)

    def _prepare_replay(self, operation: Operation) -> None:
        """While a graph is recorded: what the collective waited for last says if it fails as it is played."""
        if not self._transport.is_capturing:
            return
        layer = self.layer

        def fail(cause: str) -> NoReturn:
            self._fail(operation, _shown_position(self.num_begun, self.step, layer), TransportError(cause))

        self._transport.on_replay_failure(fail)

    @property
    def _connected(self) -> Connections:
        if self._connections is None:
            raise DistributedError(f"rank {self.rank}: group {self.name!r} is closed")
        return self._connections

    @property
    def _transport(self) -> Transport:
        return self._connected.transport

    def _announce(
        self,
        operation: Operation,
        dtype: torch.dtype,
        shape: Sequence[int] = (),
        sizes: Sequence[int] = (),
        send_sizes: Sequence[int] = (),
        receive_sizes: Sequence[int] = (),
    ) -> None:
        """Count, and where that is asked for make sure that all ranks of the group are about to join the same."""
        self.num_begun += 1
        connected = self._connected
        if connected.order_check is None:
            return
        mine = Announcement(
            group=self.name,
            operation=operation,
            number=self.num_begun,
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
        except TransportError as error:
            self._fail(operation, self._position(), error)
        if disagreement is not None:
            connected.noticeboard.report(disagreement)
            raise DistributedError(f"ranks disagree on what comes next: {disagreement}")

    def _position(self) -> str:
        """Which collective this is."""
        return _shown_position(self.num_begun, self.step, self.layer)

    def _fail(self, operation: str, position: str, error: Exception) -> NoReturn:
        """Say what is known, on this rank and in the store."""
        connected = self._connected
        where = f"{operation} of group {self.name!r} ({listed(self.ranks)}; {position})"
        cause = str(error)
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

    def begin_step(self, step: int) -> None:
        """See `GroupCoordinator.begin_step`. DistributedError when a GPU's collective of an earlier step has failed."""
        self.raise_failure()
        for group in (self.world, self.tp, self.dp, self.ep):
            group.begin_step(step)

    def set_layer(self, layer: int | None) -> None:
        """Tell the groups which layer of the model is computed, for their errors; None: outside all layers."""
        for group in (self.world, self.tp, self.dp, self.ep):
            group.layer = layer

    def count_collectives(self) -> tuple[int, ...]:
        """Of each group, how many have begun on this rank; then, what they sent."""
        groups = self.world, self.tp, self.dp, self.ep
        return *(group.num_begun for group in groups), *(group.num_bytes_sent for group in groups)

    def add_replayed(self, counts: Sequence[int]) -> None:
        """Count so many more of each group, and what they sent: they were played from a graph."""
        groups = self.world, self.tp, self.dp, self.ep
        for group, count, num_bytes in zip(groups, counts[: len(groups)], counts[len(groups) :], strict=True):
            group.num_begun += count
            group.num_bytes_sent += num_bytes

    @property
    def supports_cpu_graphs(self) -> bool:
        """Whether layers that call these groups can be recorded."""
        return self.tp.supports_cpu_graphs and self.ep.supports_cpu_graphs

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether layers that call these groups can be captured in a CUDA graph."""
        return self.tp.supports_cuda_graphs and self.ep.supports_cuda_graphs

    def raise_failure(self) -> None:
        """See `GroupCoordinator.raise_failure`."""
        for group in (self.tp, self.ep):
            group.raise_failure()

    def leave(self, why: str) -> None:
        """Stop taking part, because of an error of this rank's own: the others' errors will say why.

        Ranks that wait for this one fail at once, unless a collective is under way here; then, when the process ends.
        """
        if self.noticeboard:
            self.noticeboard.report(why)
        for group in (self.world, self.tp, self.dp, self.ep):
            group.close()


def _shown_position(number: int, step: int, layer: int | None) -> str:
    shown_step = "" if step == NO_STEP else f", step {step}"
    shown_layer = "" if layer is None else f", layer {layer}"
    return f"number {number}{shown_step}{shown_layer}"


def _nothing() -> None:
    return
