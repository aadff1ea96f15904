"""The engine of one replica whose ranks are actors: agrees with the other engines, and gives its ranks their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moeserve.distributed.connect import Rendezvous, connect
from moeserve.distributed.mesh import Mesh
from moeserve.engine.process import drive, ready
from moeserve.engine.protocol import EngineMessage
from moeserve.executor.ray import RayExecutor, RemoteProcess
from moeserve.protocol import ReplicaMessage
from moeserve.worker.protocol import RankStart


class EngineProcess(RemoteProcess):
    """In an actor beside the replica's first rank. Computes nothing, so it needs no core and no GPU."""

    SAYS = EngineMessage

    def serve(self, encoded: Sequence[bytes], ranks: Sequence[Any], show_progress: bool) -> None:
        """Returns when all replicas have agreed to shut down.

        Args:
            encoded: a `RankStart` for each rank of the replica.
            ranks: their actors.
        """
        channel = self._channel_of(ReplicaMessage)
        with self._heard_out():
            starts = [msgspec.msgpack.decode(data, type=RankStart) for data in encoded]
            first = starts[0]
            engines = connect(
                Mesh(tp=1, dp=first.config.data_parallel_size),
                first.dp_index,
                Rendezvous(
                    first.store_host,
                    first.store_port,
                    first.config.collective_timeout,
                    key=f"{first.store_key}/engines",
                ),
            )
            executor = RayExecutor(starts, ranks, show_progress=show_progress)
            replica, user = ready(channel, first, executor.num_blocks)
            drive(replica, user, engines.dp, executor)
            executor.shutdown()
        self._leave()
