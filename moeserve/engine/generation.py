"""`Generation`: the processes of all replicas from their start to their end, and what the engine knows of them."""

from __future__ import annotations

import dataclasses
import secrets
import time
import weakref
from collections.abc import Callable

from moeserve.config.settings import EngineConfig
from moeserve.engine.base import stats_at_start
from moeserve.engine.protocol import EngineMessage, Ready
from moeserve.errors import EngineError, MoeserveError
from moeserve.processes.failures import as_error, root_cause
from moeserve.processes.supervision import WatchedProcess, wait_for_messages
from moeserve.processes.worker_group import WorkerGroup
from moeserve.protocol import ReplicaStats, Shutdown
from moeserve.scheduling.dp_router import DPRouter

# Time for the replicas to finish their step and agree to end. Seconds.
SECONDS_TO_END = 5.0
# Interval in which a start looks whether the engine is to end. Seconds.
SECONDS_BETWEEN_LOOKS = 0.2
# Time for ranks that have loaded the model to name those that have not. Seconds.
SECONDS_TO_NAME_A_RANK = 10.0


class Generation:
    """A worker group that loads the model and then serves, with the router of its replicas.

    An engine that changes the number of its replicas has two for a while: one serves, the other loads. The processes
    are ended when the object is no longer used.
    """

    def __init__(self, config: EngineConfig, group: WorkerGroup) -> None:
        """
        Args:
            group: processes that were started with this config.
        """
        self.config, self.group = config, group
        self.end = weakref.finalize(self, group.end)  # at once
        self.index_of: dict[WatchedProcess[EngineMessage], int] = {
            engine: index for index, engine in enumerate(group.engines)
        }
        self.num_blocks = 0  # of the KV cache of each rank; this and the next two are known once all have loaded
        self.replica_stats: list[ReplicaStats] = []
        self.router: DPRouter
        self._loading = {engine.name: None for engine in group.engines}
        self._deadline = time.monotonic() + config.load_timeout + SECONDS_TO_NAME_A_RANK

    def take_ready(self) -> bool:
        """Take the messages of processes that load the model. Return True once all replicas have, and none has failed.

        Raises:
            EngineError: it takes too long.
        """
        for engine in self.group.engines if self._loading else ():
            for message in engine.receive():
                if isinstance(message, Ready):  # a replica that is ready may send an empty delivery
                    self.num_blocks = message.num_blocks
                    del self._loading[engine.name]
        if self._loading:
            if time.monotonic() >= self._deadline:
                raise EngineError(
                    f"{', '.join(self._loading)}: the model was not loaded within {self.config.load_timeout} s; raise "
                    "load_timeout if it needs more"
                )
            return False
        if self.group.has_failed:  # one that was ready before others
            return False
        num_replicas = len(self.group.engines)
        self.replica_stats = [stats_at_start(self.num_blocks)] * num_replicas
        self.router = DPRouter(
            num_replicas,
            self.num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            salt=secrets.token_bytes(32),
        )
        return True

    def wait_until_ready(self, is_cancelled: Callable[[], bool]) -> None:
        """Return when all replicas have loaded the model.

        Raises:
            CheckpointError, SettingsError: found by a rank.
            EngineError: a process failed, it takes too long, or it was cancelled.
        """
        while not self.take_ready():
            if self.group.has_failed:
                raise self.loading_failure()
            if is_cancelled():
                raise EngineError("the engine was shut down while it restarted")
            wait_for_messages(self.group.members, SECONDS_BETWEEN_LOOKS)

    def loading_failure(self) -> MoeserveError:
        """Return the error of a process that has failed while it loaded. Waits a moment for the first cause."""
        return as_error(root_cause(self.group.collect_failures()), "while the model was loaded")

    def shut_down(self) -> None:
        """Let the replicas agree to end, and return when all processes have ended."""
        self.end.detach()
        for engine in self.group.engines:
            engine.channel.send(Shutdown())
        self.group.end(SECONDS_TO_END)


def with_limits_of(running: EngineConfig, num_blocks: int, config: EngineConfig) -> EngineConfig:
    """Return the config of another number of replicas, with the longest requests that a running engine accepts.

    On CPUs, a KV cache that was measured is measured again. The share of the old one is then the least, if it fits.

    Args:
        num_blocks: of the running engine's KV cache on each rank.
    """
    num_cache_blocks = None
    if config.kv_cache_memory is None and config.device == "cpu":
        share = num_blocks * running.data_parallel_size // config.data_parallel_size
        num_cache_blocks = max(share, -(-running.max_model_len // config.block_size))
    return dataclasses.replace(
        config, max_model_len=running.max_model_len, max_model_len_may_shrink=False, num_cache_blocks=num_cache_blocks
    )
