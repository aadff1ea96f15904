"""`RayLauncher`: starts the replicas of an engine as actors of Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from moeserve.addresses import StoreAddress, is_loopback
from moeserve.config.engine_config import EngineConfig
from moeserve.engine.base import new_replica
from moeserve.engine.hang_watch import RULE_OF_HOSTS, HangWatch, RecordWatch, Watchable
from moeserve.engine.launcher import WorkerGroup
from moeserve.engine.protocol import FromReplica, ToReplica
from moeserve.engine.replica_process import serve
from moeserve.errors import EngineError, SettingsError
from moeserve.executor.ray.actors import (
    SECONDS_OF_A_READ,
    SECONDS_OF_SILENCE,
    SECONDS_TO_START,
    ActorProcess,
    RankActor,
    actor_of,
    answer_of,
    handle_of,
    start_actor,
)
from moeserve.executor.ray.cluster import Cluster
from moeserve.executor.ray.executor import RayExecutor
from moeserve.executor.ray.nodes import NodeFacts, check_alike, own_facts
from moeserve.executor.ray.placement import Place, reserve, show_layout, warn_of_split_groups
from moeserve.executor.ray.records import ActorRecords
from moeserve.worker.protocol import RankStart, mesh_of, rank_name


class EngineActor(ActorProcess):
    """The engine of one replica. It computes nothing, so it needs no core and no GPU."""

    OUTGOING = FromReplica

    def serve(self, encoded: Sequence[bytes], ranks: Sequence[Any], show_progress: bool) -> None:
        """Serve until all replicas have agreed to shut down.

        Args:
            encoded: the start messages of the ranks, encoded by msgspec.
            ranks: the actors of these ranks.
        """
        channel = self._open_channel(ToReplica)
        try:
            with self._reporting_failures():
                starts = [msgspec.msgpack.decode(data, type=RankStart) for data in encoded]
                executor = RayExecutor(starts, ranks, show_progress=show_progress)
                self._start_serving()
                serve(channel, starts[0], executor, new_replica(starts[0].config, executor.loaded, starts[0].dp_index))
                executor.shutdown()
        finally:
            self._exit()  # no process waits for the result of this call


class RayLauncher:
    """A `Launcher` of one actor for each rank, and one for the loop of each replica, which does not compute."""

    def __init__(self, cluster: Cluster, *, show_progress: bool) -> None:
        self._cluster, self._show_progress = cluster, show_progress

    def start(self, config: EngineConfig) -> WorkerGroup:
        """Start all actors, which load the model. Return before the model is loaded.

        Raises:
            SettingsError: the nodes differ, or cannot read the model; the placement group of this process is too small.
            EngineError: the cluster has too few free resources, or a node fails.
        """
        if not ray.is_initialized():  # else the next call would start another cluster
            raise EngineError("Ray was shut down in this process; make a new LLM")
        reserved: list[PlacementGroup] = []
        # Ranks on a failed node time out, while the others report errors at once. Wait before naming the cause.
        seconds = SECONDS_OF_SILENCE + SECONDS_OF_A_READ
        group = WorkerGroup(seconds_to_collect=seconds, release=lambda: _release(reserved))
        try:
            places = reserve(config, self._cluster.nodes, self._cluster.placement_group, reserved)
            _start_actors(group, config, places)
            if config.failure.detect_hangs:
                group.watch = _watch_over(group, config, places)
            _check_nodes(group, config, places)
            warn_of_split_groups(places, mesh_of(config))
            show_layout(config, places, self._show_progress)
            _load(group, config, places, self._show_progress)
        except BaseException:
            group.end()
            raise
        return group

    def close(self) -> None:
        self._cluster.close()


def _release(reserved: Sequence[PlacementGroup]) -> None:
    if ray.is_initialized():
        for group in reserved:
            with contextlib.suppress(RayError):
                remove_placement_group(group)


def _start_actors(group: WorkerGroup, config: EngineConfig, places: Sequence[Place]) -> None:
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
        group.replicas.append(start_actor(EngineActor, name, place, {"num_cpus": 0}))


def _watch_over(group: WorkerGroup, config: EngineConfig, places: Sequence[Place]) -> RecordWatch:
    num_own, nodes = config.parallel.ranks_per_replica, list(dict.fromkeys(place.node for place in places))
    hosts = [nodes.index(place.node) for place in places]
    processes = [
        Watchable(rank.name, host, engine=len(places) + index // num_own)
        for index, (rank, host) in enumerate(zip(group.ranks, hosts, strict=True))
    ]
    processes += [Watchable(replica.name, host) for replica, host in zip(group.replicas, hosts[::num_own], strict=True)]
    # Records travel in calls, which no actor answers while native code has Python's lock.
    rule = dataclasses.replace(RULE_OF_HOSTS, stopped=SECONDS_OF_SILENCE)
    watch = HangWatch(processes, rule, judges_hangs=config.compute.device == "cpu")
    records = ActorRecords([handle_of(member) for member in group.members], [each.host for each in processes])
    return RecordWatch(watch, records, range(len(processes)))


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
    """Make the replicas start their ranks."""
    first_rank, first_node = group.ranks[0], places[0].node
    opening = actor_of(first_rank).open_store.remote(config.parallel.network_interface, first_node.address)
    store = msgspec.msgpack.decode(answer_of(first_rank, opening), type=StoreAddress)
    if is_loopback(store.host) and len({place.node for place in places}) > 1:
        raise SettingsError(
            f"ranks would meet at {store.host} on node {first_node.address}, which other nodes cannot reach; start Ray "
            "there with --node-ip-address, or set network_interface"
        )
    per_node = Counter(place.node for place in places)
    starts = []
    for rank, place in enumerate(places):
        config_there = config.changed(parallel={"num_ranks_on_host": per_node[place.node]})
        starts.append(msgspec.msgpack.encode(RankStart(config=config_there, rank=rank, store=store)))
    num_own = config.parallel.ranks_per_replica
    for index, replica in enumerate(group.replicas):
        own = slice(index * num_own, (index + 1) * num_own)
        actor_of(replica).serve.remote(starts[own], [actor_of(rank) for rank in group.ranks[own]], show_progress)
