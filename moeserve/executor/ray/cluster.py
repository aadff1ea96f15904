"""The Ray cluster that this process uses."""

from __future__ import annotations

import contextlib
import logging
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moeserve.config.environment import ray_address, ray_temporary_folder
from moeserve.errors import EngineError
from moeserve.executor.ray.actors import SECONDS_OF_SILENCE, SECONDS_TO_START
from moeserve.executor.ray.errors import first_line
from moeserve.executor.ray.nodes import Node, NodeFacts, check_alike, encoded_facts, own_facts

POLL_INTERVAL_S = 0.2
MIN_VERSION = (2, 52)


class Cluster:
    """A running Ray cluster, or a cluster of this host alone that the first object of this class starts.

    A cluster started here ends when the last of these objects is closed.
    """

    _num_open = 0  # number of objects that use a cluster started here
    _lock = threading.Lock()

    def __init__(self, *, may_start: bool = True) -> None:
        """
        Args:
            may_start: start a cluster on this host if none is running.

        Raises:
            EngineError: there is no cluster, or it cannot be used.
        """
        _require_version()
        self._is_ours = False
        with Cluster._lock:
            self._connect(may_start)
            Cluster._num_open += self._is_ours
        # The placement group of the calling task or actor. Threads that the task starts later would not find it.
        self.placement_group = get_current_placement_group()

    def _connect(self, may_start: bool) -> None:
        if ray.is_initialized():
            self._is_ours = Cluster._num_open > 0
            return
        address = _running_cluster()
        if not address and not may_start:
            raise EngineError("no Ray cluster was found: start one with `moeserve launch` or `ray start`")
        options: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
        try:
            ray.init(logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineError(
                f"the Ray cluster{f' at {address}' if address else ''} cannot be used: {error}. If it was started with "
                "a token, set RAY_AUTH_MODE=token here"
            ) from None
        self._is_ours = not address

    def nodes(self) -> list[Node]:
        """Return the living nodes, this node first and the others by address.

        Raises:
            EngineError: Ray was shut down, or cannot be reached.
        """
        if not ray.is_initialized():  # else this call would start another cluster
            raise EngineError("the connection to the Ray cluster was closed by ray.shutdown(); make a new engine")
        try:
            own, found = ray.get_runtime_context().get_node_id(), ray.nodes()
        except RayError as error:
            raise EngineError(f"the Ray cluster cannot be reached: {first_line(error)}") from None
        nodes = [
            Node(
                node_id=each["NodeID"],
                address=each["NodeManagerAddress"],
                cores=int(each["Resources"].get("CPU", 0)),
                gpus=int(each["Resources"].get("GPU", 0)),
            )
            for each in found
            if each["Alive"]
        ]
        return sorted(nodes, key=lambda node: (node.node_id != own, node.address))

    def cores_of_nodes(self) -> list[int]:
        """Return the number of CPUs of each living node. Raises EngineError as `nodes`."""
        return [node.cores for node in self.nodes()]

    def wait_for_nodes(self, count: int, timeout_s: float) -> None:
        """Wait until the cluster has `count` living nodes.

        Raises:
            EngineError: too few nodes have joined in time. The message names the nodes that have joined.
        """
        deadline = time.monotonic() + timeout_s
        while len(nodes := self.nodes()) < count:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{len(nodes)} of {count} nodes joined within {timeout_s:g} s: "
                    f"{', '.join(node.address for node in nodes)}; see the output of `moeserve launch` on the others"
                )
            time.sleep(POLL_INTERVAL_S)

    def check(self, model: str | None) -> list[NodeFacts]:
        """Return the facts of all living nodes.

        Raises:
            SettingsError: see `check_alike`.
            EngineError: a node does not answer.
        """
        task = ray.remote(num_cpus=0, max_retries=0)(encoded_facts)
        answers = {
            node: task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
            ).remote(model)
            for node in self.nodes()
        }
        asked_at, deadline = time.time(), time.monotonic() + SECONDS_TO_START
        found = []
        for node, answer in answers.items():
            try:
                data = ray.get(answer, timeout=max(0.1, deadline - time.monotonic()))
            except RayError as error:
                raise EngineError(f"node {node.address} cannot run a rank: {first_line(error)}") from None
            found.append(msgspec.msgpack.decode(data, type=NodeFacts))
        check_alike(found, own_facts(model), asked_at)
        return found

    def close(self) -> None:
        """Release the cluster. May be called twice."""
        with Cluster._lock:
            if self._is_ours:
                self._is_ours = False
                Cluster._num_open -= 1
                if Cluster._num_open == 0 and ray.is_initialized():
                    ray.shutdown()


def _require_version() -> None:
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise EngineError(f"Ray {ray.__version__} is too old: moeserve needs {needed} or newer")


def _running_cluster() -> str:
    """Return the address of the cluster in RAY_ADDRESS, or of a cluster started on this host; "" if none is running.

    As in Ray, RAY_ADDRESS=local requests a cluster of this process alone. The cluster is probed here, because Ray
    itself would wait a minute for a cluster that has ended, and then end this process.

    Raises:
        EngineError: the cluster in RAY_ADDRESS does not answer.
    """
    given = ray_address()
    if given == "local":
        return ""
    if given == "auto":
        given = ""
    if given.startswith("ray://"):
        raise EngineError(f"RAY_ADDRESS={given}: a Ray client cannot run an engine; start the program on a node")
    address = given
    if not given:
        with contextlib.suppress(OSError):
            folder = ray_temporary_folder() or tempfile.gettempdir()
            address = (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    if not address:
        return ""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=SECONDS_OF_SILENCE).close()
    except (OSError, ValueError) as error:
        if given:
            raise EngineError(f"RAY_ADDRESS={given}: no Ray cluster answers there ({error})") from None
        return ""
    return address
