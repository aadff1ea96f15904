"""Starts the actors of an engine: one for each rank, and one for the engine of each replica, which does not compute."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from moeserve.addresses import StoreAddress, is_loopback
from moeserve.config.engine_config import EngineConfig
from moeserve.errors import EngineError, SettingsError
from moeserve.executor.ray.actors import (
    SECONDS_OF_A_READ,
    SECONDS_OF_SILENCE,
    SECONDS_TO_START,
    ActorProcess,
    RankActor,
    actor_of,
    answer_of,
    start_actor,
)
from moeserve.executor.ray.cluster import Cluster
from moeserve.executor.ray.nodes import NodeFacts, check_alike, own_facts
from moeserve.executor.ray.placement import Place, reserve, show_layout, warn_of_split_groups
from moeserve.processes.worker_group import WorkerGroup
from moeserve.worker.protocol import RankStart, mesh_of, rank_name


def start_ray_group(
    config: EngineConfig, cluster: Cluster, engine_class: type[ActorProcess], *, show_progress: bool
) -> WorkerGroup:
    """Start all actors and make them load the model. Return without waiting until it is loaded.

    Args:
        engine_class: the actor class of a replica's engine, with a method `serve(starts: list[bytes], ranks,
            show_progress)`.

    Raises:
        SettingsError: the nodes differ, or cannot read the model; the placement group of this process is too small.
        EngineError: the cluster has too few free resources, or a node fails.
    """
    if not ray.is_initialized():  # else the next call would start another cluster
        raise EngineError("Ray was shut down in this process; make a new LLM")
    reserved: list[PlacementGroup] = []
    # Ranks on a failed node time out, while the others report errors at once. Wait before naming the cause.
    group = WorkerGroup(SECONDS_OF_SILENCE + SECONDS_OF_A_READ, lambda: _release(reserved))
    try:
        places = reserve(config, cluster.nodes, cluster.placement_group, reserved)
        _start_actors(group, config, places, engine_class)
        _check_nodes(group, config, places)
        warn_of_split_groups(places, mesh_of(config))
        show_layout(config, places, show_progress)
        _load(group, config, places, show_progress)
    except BaseException:
        group.end()
        raise
    return group


def _release(reserved: Sequence[PlacementGroup]) -> None:
    if ray.is_initialized():
        for group in reserved:
            with contextlib.suppress(RayError):
                remove_placement_group(group)


def _start_actors(
    group: WorkerGroup, config: EngineConfig, places: Sequence[Place], engine_class: type[ActorProcess]
) -> None:
    per_node = Counter(place.node for place in places)
    for rank, place in enumerate(places):
        # Threads that spin while they wait would take cores from threads that compute.
        is_full = per_node[place.node] * config.compute.num_threads >= place.node.cores
        resources = {
            "num_cpus": config.compute.num_threads,
            "num_gpus": int(config.compute.device == "cuda"),
            "runtime_env": {"env_vars": {"OMP_WAIT_POLICY": "passive"}} if is_full else {},
        }
        name = f"{rank_name(config, rank)} on node {place.node.address}"
        group.ranks.append(start_actor(RankActor, name, place, resources))
    for replica, place in enumerate(places[:: config.parallel.ranks_per_replica]):
        name = f"engine of replica {replica} on node {place.node.address}"
        group.engines.append(start_actor(engine_class, name, place, {"num_cpus": 0}))


def _check_nodes(group: WorkerGroup, config: EngineConfig, places: Sequence[Place]) -> None:
    """Check the facts that a rank on each node finds there. The rank first fetches a model that is from a hub."""
    rank_on = {place.node: rank for rank, place in zip(group.ranks, places, strict=True)}
    timeout_s = SECONDS_TO_START if config.weights.hub_model is None else config.failure.load_timeout
    encoded = msgspec.msgpack.encode(config)
    asked_at = time.time()
    answers = [(rank, actor_of(rank).facts.remote(encoded)) for rank in rank_on.values()]
    found = [msgspec.msgpack.decode(answer_of(rank, answer, timeout_s), type=NodeFacts) for rank, answer in answers]
    check_alike(found, own_facts(config.weights.model_path), asked_at)


def _load(group: WorkerGroup, config: EngineConfig, places: Sequence[Place], show_progress: bool) -> None:
    """Make the engines start their ranks."""
    first_rank, first_node = group.ranks[0], places[0].node
    opening = actor_of(first_rank).open_store.remote(config.parallel.network_interface, first_node.address)
    store = msgspec.msgpack.decode(answer_of(first_rank, opening), type=StoreAddress)
    if is_loopback(store.host) and len({place.node for place in places}) > 1:
        raise SettingsError(
            f"ranks would meet at {store.host} on node {first_node.address}, which other nodes cannot reach; start Ray "
            "there with --node-ip-address, or set network_interface"
        )
    starts = [
        msgspec.msgpack.encode(RankStart(config=config, rank=rank, store=store))
        for rank in range(config.parallel.num_ranks)
    ]
    num_own = config.parallel.ranks_per_replica
    for replica, engine in enumerate(group.engines):
        own = slice(replica * num_own, (replica + 1) * num_own)
        actor_of(engine).serve.remote(starts[own], [actor_of(rank) for rank in group.ranks[own]], show_progress)
