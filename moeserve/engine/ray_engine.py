"""The engine of one replica whose ranks are actors, and the engine of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from moeserve.config.engine_config import EngineConfig
from moeserve.engine.process import serve
from moeserve.engine.protocol import EngineMessage
from moeserve.engine.replicas import Replicas
from moeserve.executor.ray.actors import ActorProcess
from moeserve.executor.ray.cluster import Cluster
from moeserve.executor.ray.executor import RayExecutor
from moeserve.executor.ray.worker_group import start_ray_group
from moeserve.protocol import ReplicaMessage
from moeserve.worker.protocol import RankStart


class EngineActor(ActorProcess):
    """The engine of one replica. It computes nothing, so it needs no core and no GPU."""

    OUTGOING = EngineMessage

    def serve(self, encoded: Sequence[bytes], ranks: Sequence[Any], show_progress: bool) -> None:
        """Serve until all replicas have agreed to shut down.

        Args:
            encoded: the start messages of the ranks, encoded by msgspec.
            ranks: the actors of these ranks.
        """
        channel = self._open_channel(ReplicaMessage)
        try:
            with self._reporting_failures():
                starts = [msgspec.msgpack.decode(data, type=RankStart) for data in encoded]
                executor = RayExecutor(starts, ranks, show_progress=show_progress)
                self._is_serving = True
                serve(channel, starts[0], executor)
                executor.shutdown()
        finally:
            self._exit()  # no process waits for the result of this call


def ray_replicas(
    config: EngineConfig, cluster: Cluster, config_of: Callable[[int], EngineConfig], *, show_progress: bool
) -> Replicas:
    """Return an engine on the nodes of a Ray cluster, which restarts after a failure and closes the cluster."""
    return Replicas(
        config,
        lambda config: start_ray_group(config, cluster, EngineActor, show_progress=show_progress),
        config_of=config_of,
        close=cluster.close,
    )
