"""Where ranks run in a cluster: reserved resources, and which rank gets which of them."""

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
    get_current_placement_group,
    placement_group,
    placement_group_table,
)

from moeserve.config.resolve import fit_whole
from moeserve.config.settings import EngineConfig
from moeserve.distributed.mesh import Mesh
from moeserve.errors import EngineError, SettingsError
from moeserve.executor.ray.nodes import Node
from moeserve.worker.protocol import mesh_of

logger = logging.getLogger(__name__)

SECONDS_TO_RESERVE = 30.0  # that a reservation which the cluster could hold may take


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    group: PlacementGroup
    bundle: int
    node: Node


def reserve(
    config: EngineConfig, list_nodes: Callable[[], Sequence[Node]], reserved: list[PlacementGroup]
) -> list[Place]:
    """Return a place for each rank, by rank: those of this node first, then by address and bundle.

    The placement group that this process is in is used if there is one; else a group is reserved for each replica, or
    for each of its pipeline stages where nodes are too small for whole replicas.

    Args:
        list_nodes: returns the living nodes, this one first.
        reserved: groups that were reserved are appended, also when an error is raised.

    Raises:
        SettingsError: the placement group that this process is in is too small.
        EngineError: the cluster has too few free resources.
    """
    nodes, sizes = list_nodes(), (config.ranks_per_replica, config.tensor_parallel_size)
    bundle = {"CPU": float(config.num_threads)} | ({"GPU": 1.0} if config.device == "cuda" else {})
    if (adopted := get_current_placement_group()) is not None:
        places = _places_in(adopted, bundle, nodes)
        if len(places) < config.num_ranks:
            raise SettingsError(
                f"the placement group of this process has {len(places)} bundles with {_shown(bundle)}, but there are "
                f"{config.num_ranks} ranks; make it larger, or run outside of it"
            )
        return whole_groups_first(places, *sizes)[: config.num_ranks]
    cores = [node.cores for node in nodes]
    fitting = [size for size in sizes if fit_whole(cores, config.num_threads, size, config.num_ranks // size)]
    size, strategy = (fitting[0], "STRICT_PACK") if fitting else (sizes[0], "PACK")
    for _ in range(config.num_ranks // size):
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
    nodes = list_nodes()  # one may have joined meanwhile
    placed = [_places_in(group, bundle, nodes) for group in reserved]
    placed.sort(key=lambda places: [_order_of(place.node, nodes) for place in places])
    return [place for places in placed for place in places]


def whole_groups_first(places: Sequence[Place], *sizes: int) -> list[Place]:
    """Return the places in order of nodes, so that as many replicas as possible have all their ranks on one node.

    Args:
        sizes: ranks of a replica, then of a pipeline stage: of the other replicas, stages are on one node if possible.
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
    """Log a warning that names the replicas with tp ranks on several nodes."""
    split: dict[int, None] = {}
    for rank in range(0, len(places), mesh.tp):
        if len({place.node for place in places[rank : rank + mesh.tp]}) > 1:
            split[mesh.coordinates(rank).dp] = None
    if split:
        logger.warning(
            "tp ranks of replica %s are on several nodes, so each layer sends activations over the network twice more",
            ", ".join(map(str, split)),
        )


def show_layout(config: EngineConfig, places: Sequence[Place], show_progress: bool) -> None:
    """Print which rank is where, or log it, before anything is loaded."""
    lines = [f"{'rank':>4}  replica  stage  tp  node"]
    for rank, place in enumerate(places):
        at = mesh_of(config).coordinates(rank)
        device = "1 GPU" if config.device == "cuda" else f"{config.num_threads} thread{'s' * (config.num_threads > 1)}"
        lines.append(f"{rank:>4}  {at.dp:>7}  {at.pp:>5}  {at.tp:>2}  {place.node.address}  {device}")
    if show_progress:
        print("\n".join(lines), file=sys.stderr, flush=True)
    else:
        logger.info("ranks:\n%s", "\n".join(lines))


def _places_in(group: PlacementGroup, least: dict[str, float], nodes: Sequence[Node]) -> list[Place]:
    """Return the bundles of a group that hold a rank, in order of nodes; bundles of nodes that have died come last."""
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
