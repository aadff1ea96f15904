"""The rendezvous of all ranks of a mesh, and the connections between them."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch.distributed import ProcessGroupGloo, Store

from moeserve.addresses import StoreAddress
from moeserve.distributed import gloo, nccl, shared_memory, symmetric_memory
from moeserve.distributed.coordinator import GroupConnection, GroupCoordinator
from moeserve.distributed.groups import NEIGHBOURS, Groups, make_groups
from moeserve.distributed.mesh import Mesh
from moeserve.distributed.order_check import OrderCheck
from moeserve.distributed.store import (
    WAIT_FOR_REPORTS_S,
    GatheringStore,
    RankStore,
    RendezvousStore,
    connect_store,
    format_ranks,
)
from moeserve.distributed.torch_group import as_torch_group
from moeserve.distributed.transport import Transport, TransportError, TransportUnavailable
from moeserve.errors import DistributedError
from moeserve.machine import host_identity

logger = logging.getLogger(__name__)

# auto: shared memory for groups whose ranks are on one host and can map each other's memory, gloo for all others.
TransportName = Literal["auto", "gloo"]

CPU = torch.device("cpu")
# These groups carry tensors on the model's device; all other groups carry CPU tensors only.
GROUPS_ON_DEVICES = ("tp", "ep", "stage", NEIGHBOURS)  # used by layers and to move experts
MEASURED_GROUPS = ("ep",)  # wait times are measured here: they show how unevenly ranks are loaded


@dataclass(frozen=True)
class Rendezvous:
    """The store where the ranks of a launch meet. A rank connects once to a store, or once to each scope of a store.

    timeout_s limits each collective. seconds_to_meet limits the time until all ranks have joined; None: timeout_s.
    """

    store: StoreAddress
    timeout_s: float
    scope: str = ""
    seconds_to_meet: float | None = None
    seconds_for_reports: float = WAIT_FOR_REPORTS_S  # time that an error waits for failure reports of other ranks


def connect(
    mesh: Mesh,
    rank: int,
    rendezvous: Rendezvous,
    *,
    check_order: bool = False,
    transport: TransportName = "auto",
    device: torch.device = CPU,
) -> Groups:
    """Meet the other ranks of the mesh, and connect to them. Collective: all ranks of the mesh.

    gloo and NCCL listen on the address from which this rank reaches the store, or on the loopback interface if the
    store is on this host. Shared memory uses no network address.

    Args:
        check_order: ranks compare descriptions of each collective before they begin it. Slow; for debugging.
        transport: the transport of CPU tensors.
        device: the CPU, or this rank's GPU, which no other rank uses and which is current in this thread. With a GPU,
            the groups that layers use also carry tensors on the GPU.

    Raises:
        DistributedError: a rank did not connect; the message names all such ranks.
        SettingsError: the device is a GPU, but torch has no NCCL.
    """
    timeout_s = rendezvous.timeout_s
    seconds_to_meet = timeout_s if rendezvous.seconds_to_meet is None else rendezvous.seconds_to_meet
    store = connect_store(rank, rendezvous.store, seconds_to_meet, rendezvous.scope)
    rank_store = RankStore(rank, store, seconds_to_meet, rendezvous.seconds_for_reports)
    hosts = rank_store.register(range(mesh.world_size), host_identity())
    connector = _Connector(rank, hosts, rank_store, store.own_address, transport, device, timeout_s)

    everyone = tuple(range(mesh.world_size))
    order_check = None
    if check_order and len(everyone) > 1:
        order_check = OrderCheck(rank, connector.gloo_group("order", everyone), timeout_s)

    def coordinator(name: str, ranks: tuple[int, ...]) -> GroupCoordinator:
        connection = None
        if len(ranks) > 1:
            connection = GroupConnection(
                connector.host_transport(name, ranks),
                rank_store,
                order_check,
                connector.device_transport(name, ranks),
                connector.torch_group_factory(name, ranks),
            )
        nodes = tuple(hosts.index(hosts[member]) for member in ranks)
        group = GroupCoordinator(name=name, rank=rank, ranks=ranks, node_of_rank=nodes, connection=connection)
        group.barrier()  # collective: all ranks of the group; detects broken connections before the first step
        return group

    return make_groups(mesh, rank, coordinator, rank_store)


@dataclass
class _Connector:
    """Connects one rank to the members of its groups, once for each distinct set of members.

    All ranks of a group must call the same methods for the group, in the same order.
    """

    rank: int
    hosts: list[str]  # identity of each rank's host
    rank_store: RankStore
    address: str
    transport_name: TransportName
    device: torch.device
    timeout_s: float  # time limit of each collective
    host_connections: dict[tuple[int, ...], shared_memory.SharedMemoryConnection | gloo.GlooConnection] = field(
        default_factory=dict
    )
    nccl_groups: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def host_transport(self, name: str, ranks: tuple[int, ...]) -> Transport:
        """Return the transport of a group's CPU tensors, over the connection to the group's members."""
        if ranks not in self.host_connections:
            self.host_connections[ranks] = self._connect_hosts(name, ranks)
        connection, measures_waits = self.host_connections[ranks], name in MEASURED_GROUPS
        if isinstance(connection, gloo.GlooConnection):
            return gloo.GlooTransport(connection, measures_waits=measures_waits)
        return shared_memory.SharedMemoryTransport(connection, measures_waits=measures_waits)

    def device_transport(self, name: str, ranks: tuple[int, ...]) -> Transport | None:
        """Return the transport of a group's GPU tensors. None if the group carries no GPU tensors."""
        is_needed = self.device.type != "cpu" and name in GROUPS_ON_DEVICES
        return self._nccl_transport(name, ranks) if is_needed else None

    def gloo_group(self, name: str, ranks: tuple[int, ...]) -> ProcessGroupGloo:
        store, index = GatheringStore(self._store_of(name, ranks), len(ranks)), ranks.index(self.rank)
        try:
            return gloo.make_process_group(store, index, len(ranks), address=self.address, timeout_s=self.timeout_s)
        except RuntimeError as error:
            self._fail(name, ranks, gloo.cause_of(error, self.timeout_s), error)

    def torch_group_factory(self, name: str, ranks: tuple[int, ...]) -> functools.partial[Any] | None:
        """Return a function that makes a torch.distributed group of the ep ranks' GPUs. None for any other group."""
        if name != "ep" or self.device.type == "cpu":
            return None
        return functools.partial(self._torch_group, ranks)

    def _torch_group(self, ranks: tuple[int, ...]) -> Any:
        store = self._store_of("torch/ep", ranks)
        return as_torch_group(store, ranks.index(self.rank), len(ranks), self.nccl_groups[ranks])

    def _connect_hosts(
        self, name: str, ranks: tuple[int, ...]
    ) -> shared_memory.SharedMemoryConnection | gloo.GlooConnection:
        if self.transport_name == "auto":
            store = self._store_of(f"memory/{name}", ranks)
            try:
                return shared_memory.connect(
                    store, ranks, ranks.index(self.rank), world_size=len(self.hosts), timeout_s=self.timeout_s
                )
            except TransportUnavailable as reason:
                if self.rank == 0 and name == "world":  # one message is enough
                    logger.info("ranks cannot all share memory (%s): some use gloo, which is slower", reason)
            except TransportError as error:
                self._fail(name, ranks, str(error), error)
        return gloo.GlooConnection(self.gloo_group(name, ranks), self.timeout_s)

    def _nccl_transport(self, name: str, ranks: tuple[int, ...]) -> nccl.NcclTransport:
        """Return a transport over an NCCL process group. Groups with the same ranks share one process group.

        Kernels of two process groups could deadlock on a GPU.
        """
        store, index = self._store_of(f"{self.device.type}/{name}", ranks), ranks.index(self.rank)
        is_new = ranks not in self.nccl_groups
        try:
            if is_new:
                self.nccl_groups[ranks] = nccl.make_process_group(
                    store, index, len(ranks), device=self.device, address=self.address, timeout_s=self.timeout_s
                )
            small_all_reduce = None
            if name == "tp":  # not for ep, whose sums may run on another stream at the same time as tp's
                small_all_reduce = self._one_shot_all_reduce(store.within("symmetric"), ranks)
            transport = nccl.NcclTransport(
                self.nccl_groups[ranks], self.timeout_s, small_all_reduce=small_all_reduce, owns_process_group=is_new
            )
            transport.check(self.device)  # collective: all ranks of the group
            return transport
        except TransportError as error:
            self._fail(name, ranks, str(error), error)
        except RuntimeError as error:
            self._fail(name, ranks, nccl.cause_of(error, self.timeout_s), error)

    def _one_shot_all_reduce(self, store: Store, ranks: tuple[int, ...]) -> symmetric_memory.OneShotAllReduce | None:
        try:
            return symmetric_memory.connect(
                store,
                ranks.index(self.rank),
                len(ranks),
                is_one_host=len({self.hosts[member] for member in ranks}) == 1,
                device=self.device,
                timeout_s=self.timeout_s,
                library=symmetric_memory.TorchSymmetricMemory(self.nccl_groups[ranks]),
            )
        except TransportUnavailable as reason:
            if self.rank == 0:  # one message is enough
                logger.info("all-reduces of small tensors use NCCL, not symmetric memory (%s)", reason)
            return None

    def _store_of(self, name: str, ranks: tuple[int, ...]) -> RendezvousStore:
        return self.rank_store.store.within(f"{name}/{ranks[0]}")

    def _fail(self, name: str, ranks: tuple[int, ...], cause: str, error: Exception) -> NoReturn:
        failure = f"group {name!r} ({format_ranks(ranks)}) could not be connected: {cause}"
        self.rank_store.report_failure(failure)
        reports = self.rank_store.failure_reports(ranks)
        raise DistributedError(f"rank {self.rank}: {failure}. {reports}") from error
