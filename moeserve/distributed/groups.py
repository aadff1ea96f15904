"""All groups that one rank belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.distributed.mesh import Axis, Mesh
from moeserve.distributed.store import RankStore
from moeserve.processes.progress_records import begin_layer, begin_round

NEIGHBOURS = "neighbours"  # name of each group of two ranks in consecutive pipeline stages
AXES: tuple[Axis, ...] = ("tp", "dp", "ep", "pp")


@dataclass(frozen=True)
class Groups:
    """The groups that one rank belongs to. A group of one rank has a coordinator too.

    `stage` has the same ranks as `ep`. Exchanges outside of layers use `stage`, so that the wait times measured in `ep`
    show only how unevenly experts are loaded.
    """

    mesh: Mesh
    rank: int
    world: GroupCoordinator
    tp: GroupCoordinator
    dp: GroupCoordinator
    ep: GroupCoordinator
    pp: GroupCoordinator
    stage: GroupCoordinator
    previous: GroupCoordinator | None = None  # with this rank's counterpart in the previous stage; None: first stage
    next: GroupCoordinator | None = None  # with this rank's counterpart in the next stage; None: last stage
    store: RankStore | None = None  # None if there are no other ranks

    @property
    def all(self) -> tuple[GroupCoordinator, ...]:
        neighbours = (group for group in (self.previous, self.next) if group is not None)
        return self.world, self.tp, self.dp, self.ep, self.pp, self.stage, *neighbours

    @property
    def of_layers(self) -> tuple[GroupCoordinator, ...]:
        """The groups that carry tensors on the model's device."""
        return tuple(group for group in (self.tp, self.ep, self.previous, self.next) if group is not None)

    def wait_until_loaded(self, timeout_s: float, since_s: float) -> None:
        """Wait until all ranks have loaded the model. Collective: all ranks.

        Args:
            since_s: the `time.monotonic` time at which this rank began to load.

        Raises:
            DistributedError: a rank has not loaded the model in time.
        """
        if self.store:
            self.store.wait_until_loaded(self.world.ranks, timeout_s, since_s)

    def begin_step(self, step: int) -> None:
        """Begin a step in all groups. Raises DistributedError if a GPU collective of an earlier step has failed."""
        self.raise_failure()
        begin_round(step)
        for group in self.all:
            group.begin_step(step)

    def set_layer(self, layer: int | None) -> None:
        """Set the layer number for error messages and progress records; None outside of all layers."""
        if layer is not None:
            begin_layer(layer)
        for group in self.all:
            group.layer = layer

    def count_collectives(self) -> tuple[int, ...]:
        """Return the number of collectives begun in each group, followed by the number of bytes sent in each group."""
        return *(group.num_begun for group in self.all), *(group.num_bytes_sent for group in self.all)

    def add_replayed(self, counts: Sequence[int]) -> None:
        """Add the counts (in the order of `count_collectives`) of collectives that a graph has replayed."""
        num_groups = len(self.all)
        for group, count, num_bytes in zip(self.all, counts[:num_groups], counts[num_groups:], strict=True):
            group.num_begun += count
            group.num_bytes_sent += num_bytes

    @property
    def supports_cpu_graphs(self) -> bool:
        """True if CPU graphs can capture layers that use these groups. Transfers between stages are never captured."""
        return self.tp.supports_cpu_graphs and self.ep.supports_cpu_graphs

    @property
    def supports_cuda_graphs(self) -> bool:
        """True if CUDA graphs can capture steps that use these groups."""
        return all(group.supports_cuda_graphs for group in self.of_layers)

    def raise_failure(self) -> None:
        """Raise DistributedError if a GPU collective of any group was aborted. See `GroupCoordinator.raise_failure`."""
        for group in self.of_layers:
            group.raise_failure()

    def leave(self, cause: str) -> None:
        """Leave all groups because of an error of this rank. The errors of the other ranks quote `cause`.

        Ranks that wait for this rank fail at once, or, if a collective is in progress here, when this process exits.
        """
        if self.store:
            self.store.report_failure(cause)
        for group in self.all:
            group.close()
        if self.store:
            self.store.close()

    def reconnected(self, connected: Groups) -> Groups:
        """Return these groups with the connections of `connected`. Coordinators stay the same: layers refer to them."""
        for group, other in zip(self.all, connected.all, strict=True):
            group.adopt(other)
        return replace(self, store=connected.store)


def groups_of_one_rank() -> Groups:
    """Return the groups of an engine with a single rank."""
    return unconnected(Mesh(tp=1, dp=1), 0)


def unconnected(mesh: Mesh, rank: int) -> Groups:
    """Return the groups of one rank without connections, to build and inspect the rank's part of a model."""

    def coordinator(name: str, ranks: tuple[int, ...]) -> GroupCoordinator:
        nodes = (0,) * len(ranks)
        return GroupCoordinator(name=name, rank=rank, ranks=ranks, node_of_rank=nodes, connection=None)

    return make_groups(mesh, rank, coordinator)


def make_groups(
    mesh: Mesh,
    rank: int,
    make: Callable[[str, tuple[int, ...]], GroupCoordinator],
    store: RankStore | None = None,
) -> Groups:
    """Return the groups of one rank.

    Args:
        make: returns the coordinator of a group, given the group's name and ranks. All ranks call `make` for their
            groups in the same order.
    """
    world = make("world", tuple(range(mesh.world_size)))
    tp, dp, ep, pp = (make(axis, mesh.group(axis, rank)) for axis in AXES)
    stage = make("stage", ep.ranks)
    # Each rank connects to the previous stage first, so no ranks wait for each other in a cycle.
    previous, following = (
        None if (pair := mesh.neighbour(rank, distance)) is None else make(NEIGHBOURS, pair) for distance in (-1, 1)
    )
    return Groups(
        mesh=mesh,
        rank=rank,
        world=world,
        tp=tp,
        dp=dp,
        ep=ep,
        pp=pp,
        stage=stage,
        previous=previous,
        next=following,
        store=store,
    )
