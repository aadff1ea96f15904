"""The placement of ranks in a cluster: reservation of resources, and their assignment to ranks."""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
)

from moeserve.config.engine_config import EngineConfig
from moeserve.config.resolve_parallel import fit_whole
from moeserve.distributed.mesh import Mesh
from moeserve.errors import EngineError, SettingsError
from moeserve.executor.ray.nodes import Node
from moeserve.worker.protocol import mesh_of

logger = logging.getLogger(__name__)

SECONDS_TO_RESERVE = 30.0  # timeout of a reservation that fits into the cluster
SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class Place:
    """The place where one rank runs."""

    group: PlacementGroup
    bundle: int
    node: Node


def reserve(
    config: EngineConfig,
    list_nodes: Callable[[], Sequence[Node]],
    adopted: PlacementGroup | None,
    reserved: list[PlacementGroup],
) -> list[Place]:
    """Return the place of each rank, by rank: places on this node first, the others by address and bundle.

    Args:
        list_nodes: returns the living nodes, this node first.
        adopted: the placement group whose free bundles are used. None: reserve a group for each replica, or for each
            pipeline stage of a replica where nodes are too small for whole replicas.
        reserved: receives the groups that were reserved, also if an error is raised.

    Raises:
        SettingsError: the adopted group is too small.
        EngineError: the cluster, or the adopted group, has too few free resources.
    """
    nodes, sizes = list_nodes(), (config.parallel.ranks_per_replica, config.parallel.tensor_parallel_size)
    bundle = {"CPU": float(config.compute.num_threads)} | ({"GPU": 1.0} if config.compute.device == "cuda" else {})
    if adopted is not None:
        free = _free_places(adopted, bundle, list_nodes, config.parallel.num_ranks)
        return whole_groups_first(free, *sizes)[: config.parallel.num_ranks]
    cores = [node.cores for node in nodes]
    fitting = [
        size for size in sizes if fit_whole(cores, config.compute.num_threads, size, config.parallel.num_ranks // size)
    ]
    size, strategy = (fitting[0], "STRICT_PACK") if fitting else (sizes[0], "PACK")
    for _ in range(config.parallel.num_ranks // size):
        name = f"moeserve-{secrets.token_hex(4)}"
        reserved.append(placement_group([bundle] * size, strategy=strategy, name=name))
    deadline = time.monotonic() + SECONDS_TO_RESERVE
    for group in reserved:
        if not group.wait(max(0.1, deadline - time.monotonic())):
            raise EngineError(
                f"the Ray cluster has no room now for {len(reserved)} times {size} ranks with "
                f"{_shown(bundle)} each: {_shown(ray.available_resources())} of {_shown(ray.cluster_resources())} are "
                "free; end what uses them, or use fewer ranks or threads"
            )
    nodes = list_nodes()  # a node may have joined in the meantime
    placed = [_places_in(group, bundle, nodes) for group in reserved]
    placed.sort(key=lambda places: [_order_of(place.node, nodes) for place in places])
    return [place for places in placed for place in places]


def whole_groups_first(places: Sequence[Place], *sizes: int) -> list[Place]:
    """Return the places in order of nodes, so that as many replicas as possible have all their ranks on one node.

    Args:
        sizes: ranks of a replica, then of a pipeline stage. Replicas that do not fit on one node keep each stage on one
            node if possible.
    """
    if not sizes:
        return list(places)
    by_node: dict[Node, list[Place]] = {}
    for place in places:
        by_node.setdefault(place.node, []).append(place)
    size, *smaller = sizes
    num_whole = {node: len(each) // size * size for node, each in by_node.items()}
    whole = [place for node, each in by_node.items() for place in each[: num_whole[node]]]
    rest = [place for node, each in by_node.items() for place in each[num_whole[node] :]]
    return whole + whole_groups_first(rest, *smaller)


def warn_of_split_groups(places: Sequence[Place], mesh: Mesh) -> None:
    """Log a warning that names the replicas whose tp ranks are on several nodes."""
    split: dict[int, None] = {}
    for rank in range(0, len(places), mesh.tp):
        if len({place.node for place in places[rank : rank + mesh.tp]}) > 1:
            split[mesh.coordinates(rank).dp] = None
    if split:
        logger.warning(
            "tp ranks of replica %s are on several nodes, so activations cross the network twice more per layer",
            ", ".join(map(str, split)),
        )


def show_layout(config: EngineConfig, places: Sequence[Place], show_progress: bool) -> None:
    """Print or log the node of each rank, before anything is loaded."""
    compute = config.compute
    lines = [f"{'rank':>4}  replica  stage  tp  node"]
    for rank, place in enumerate(places):
        at = mesh_of(config).coordinates(rank)
        device = (
            "1 GPU" if compute.device == "cuda" else f"{compute.num_threads} thread{'s' * (compute.num_threads > 1)}"
        )
        lines.append(f"{rank:>4}  {at.dp:>7}  {at.pp:>5}  {at.tp:>2}  {place.node.address}  {device}")
    if show_progress:
        print("\n".join(lines), file=sys.stderr, flush=True)
    else:
        logger.info("ranks:\n%s", "\n".join(lines))


def _free_places(
    group: PlacementGroup, least: dict[str, float], list_nodes: Callable[[], Sequence[Node]], num_ranks: int
) -> list[Place]:
    """Wait until a group has enough unused bundles, and return them. Bundles of ended ranks are free after a moment."""
    deadline = time.monotonic() + SECONDS_TO_RESERVE
    while True:
        places, available = _places_in(group, least, list_nodes()), ray.available_resources()
        free = [
            place
            for place in places
            if all(_free_in_bundle(available, place, name) >= amount for name, amount in least.items())
        ]
        if len(free) >= num_ranks:
            return free
        shortage = (
            f"the placement group of this process has {len(places)} bundles with {_shown(least)}, of which {len(free)} "
            f"are free, but {num_ranks} ranks need one each; make it larger, or run outside of it"
        )
        if len(places) < num_ranks:
            raise SettingsError(shortage)
        if time.monotonic() > deadline:
            raise EngineError(shortage)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _free_in_bundle(available: dict[str, float], place: Place, resource: str) -> float:
    """Return the free amount of a bundle's resource. The resource's name includes the bundle's index and group."""
    return available.get(f"{resource}_group_{place.bundle}_{place.group.id.hex()}", 0.0)


def _places_in(group: PlacementGroup, least: dict[str, float], nodes: Sequence[Node]) -> list[Place]:
    """Return the bundles of a group that can hold a rank, in order of nodes; bundles on dead nodes come last."""
    node_of = {node.node_id: node for node in nodes}
    ids = placement_group_table(group)["bundles_to_node_id"]
    places = [
        Place(group, index, node_of.get(ids[index]) or Node(ids[index], "?", cores=0, gpus=0))
        for index, bundle in enumerate(group.bundle_specs)
        if all(bundle.get(resource, 0) >= amount for resource, amount in least.items())
    ]
    return sorted(places, key=lambda place: (_order_of(place.node, nodes), place.bundle))


def _order_of(node: Node, nodes: Sequence[Node]) -> int:
    return nodes.index(node) if node in nodes else len(nodes)


def _shown(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if name in ("CPU", "GPU")) or "nothing"
