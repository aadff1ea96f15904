"""Facts about the nodes of a cluster, and the check that all nodes can run one engine together."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import ray

from moeserve.config.engine_config import EngineConfig
from moeserve.config.hub_name import parse_hub_name
from moeserve.errors import MoeserveError, SettingsError
from moeserve.executor.kernels import own_kernels, warn_of_other_kernels
from moeserve.machine import installed_version

SECONDS_OF_SKEW = 10.0  # allowed difference between the clocks of two nodes
PACKAGES = ("moeserve", "torch", "ray")  # whose versions must be the same on all nodes


@dataclass(frozen=True)
class Node:
    """A living node of the cluster."""

    node_id: str
    address: str
    cores: int
    gpus: int


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a node, as found by a process on it."""

    node_id: str
    address: str  # the node's address in the cluster
    hostname: str
    python: str
    versions: dict[str, str]  # by package; "" where it is missing
    kernels: str  # instruction set of the C++ kernels; "" if there are none
    time: float  # seconds since the epoch
    unreadable: str  # the reason why the node cannot read the model; "" if it can

    @property
    def name(self) -> str:
        return f"node {self.address} ({self.hostname})"


def facts_of_rank(config: EngineConfig) -> NodeFacts:
    """Return the facts of this node, after fetching the model if it is in a hub."""
    from moeserve.models.checkpoint.model_files import on_this_host  # imports torch, which a rank has loaded

    try:
        config = on_this_host(config)
    except MoeserveError as error:
        return msgspec.structs.replace(own_facts(None), unreadable=str(error))
    return own_facts(config.weights.model_path)


def own_facts(model: str | None) -> NodeFacts:
    """Return the facts of this node.

    Args:
        model: folder of the checkpoint that ranks on this node will read, or the model's name in a hub.
    """
    return NodeFacts(
        node_id=ray.get_runtime_context().get_node_id(),
        address=ray.util.get_node_ip_address(),
        hostname=socket.gethostname(),
        python=platform.python_version(),
        versions={package: installed_version(package) for package in PACKAGES},
        kernels=own_kernels(),
        time=time.time(),
        unreadable=why_unreadable(model) if model else "",
    )


def encoded_facts(model: str | None) -> bytes:
    """Return `own_facts`, encoded. Runs as a Ray task."""
    return msgspec.msgpack.encode(own_facts(model))


def why_unreadable(model: str) -> str:
    """Return the reason why this node cannot read a checkpoint's files; "" if it can, or will fetch them from a hub."""
    if parse_hub_name(model) is not None:
        return ""
    folder = Path(model)
    try:
        (folder / "config.json").open("rb").close()
        for shard in folder.glob("*.safetensors"):
            shard.open("rb").close()
    except OSError as error:
        return str(error)
    return ""


def check_alike(found: Sequence[NodeFacts], own: NodeFacts, asked_at: float) -> None:
    """Check that ranks on these nodes can form one engine. Warn about differences that affect only last bits.

    Args:
        own: facts of this node, collected after all other nodes have answered.
        asked_at: time by this node's clock when the facts of the other nodes were requested.

    Raises:
        SettingsError: nodes differ, or cannot read the model. The message names all such nodes.
    """
    faults = []
    for node in found:
        for what, theirs, ours in [
            ("Python", node.python, own.python),
            *((package, node.versions[package], own.versions[package]) for package in PACKAGES),
        ]:
            if theirs != ours:
                faults.append(
                    f"{node.name} has {what} {theirs or '(missing)'}, but {own.name} has {ours or '(missing)'}"
                )
        if node.unreadable:
            faults.append(f"{node.name} cannot read the model: {node.unreadable}")
        skew = min(0.0, node.time - asked_at) + max(0.0, node.time - own.time)
        if abs(skew) > SECONDS_OF_SKEW:
            faults.append(f"the clock of {node.name} differs from that of {own.name} by {skew:+.0f} s or more")
    if faults:
        raise SettingsError("the nodes of the Ray cluster cannot run one engine: " + "; ".join(faults))
    warn_of_other_kernels({node.name: node.kernels for node in found})
