"""`Generation`: the processes of all replicas from start to exit, and the engine's state that concerns them."""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable

from moeserve.config.engine_config import EngineConfig
from moeserve.engine.base import stats_at_start
from moeserve.engine.launcher import WorkerGroup
from moeserve.engine.protocol import Ready, ReplicaFaulted
from moeserve.errors import EngineError, MoeserveError
from moeserve.models.checkpoint.file_hashes import require_same
from moeserve.processes.failures import FailureReport, as_error, root_cause
from moeserve.processes.supervision import Watched, wait_for_messages
from moeserve.protocol import ReplicaStats, Shutdown
from moeserve.scheduling.replica_choice import DPRouter

# Seconds for the replicas to finish their step and agree to shut down.
SECONDS_TO_END = 5.0
# Interval, in seconds, between checks during start-up whether the engine is to shut down.
SECONDS_BETWEEN_LOOKS = 0.2
# Seconds for ranks that have loaded the model to name those that have not.
SECONDS_TO_NAME_A_RANK = 10.0


class Generation:
    """A worker group that loads the model and then serves, with the router of its replicas.

    An engine that changes the number of its replicas briefly has two generations: one serves while the other loads. The
    processes are terminated when this object is deleted.
    """

    def __init__(self, config: EngineConfig, group: WorkerGroup) -> None:
        """
        Args:
            group: processes that were started with this config.
        """
        self.config, self.group = config, group
        self.end = weakref.finalize(self, group.end)  # terminates the processes at once
        self.index_of: dict[Watched, int]
        self.num_blocks = 0  # KV cache blocks of each rank; set, like the next four, once all ranks have loaded
        self.chunk_size: int | None = None  # most tokens of a step; None: that of the config
        self.file_hashes = config.weights.file_hashes  # hashes of the checkpoint's files
        self.replica_stats: list[ReplicaStats] = []
        self.router: DPRouter
        self.epoch = 0  # number of recoveries
        self.lost: set[int] = set()  # replicas that have lost ranks since all were ready
        self.begin_to_load()

    def take_ready(self) -> bool:
        """Handle messages of loading processes. Return True if all replicas have loaded the model and none has failed.

        Raises:
            EngineError: loading takes too long.
            WeightsChangedError: replicas have read different files.
        """
        for replica in self.group.replicas if self._loading else ():
            for message in replica.receive():
                # A replica that is ready may send an empty delivery. Messages from earlier epochs are dropped.
                if isinstance(message, Ready) and message.epoch == self.epoch:
                    require_same(self.file_hashes or message.file_hashes, message.file_hashes)
                    self.num_blocks, self.file_hashes = message.num_blocks, message.file_hashes
                    self.chunk_size = message.chunk_size
                    del self._loading[replica.name]
                if isinstance(message, ReplicaFaulted):
                    self.note_fault(self.index_of[replica], message)
        if self._loading:
            seconds = time.monotonic() - self.began_s
            if seconds >= self.config.failure.load_timeout + SECONDS_TO_NAME_A_RANK:
                raise EngineError(
                    f"{', '.join(self._loading)}: the model was not loaded within "
                    f"{self.config.failure.load_timeout} s; raise load_timeout if it needs more"
                )
            return False
        if self.group.has_failed:  # a replica that was ready before the others
            return False
        num_replicas = len(self.group.replicas)
        self.replica_stats = [stats_at_start(self.num_blocks)] * num_replicas
        if self.epoch:
            self.router = self.router.restarted([None if each in self.lost else each for each in range(num_replicas)])
            self.lost.clear()
        else:
            self.router = DPRouter(
                num_replicas,
                self.num_blocks,
                self.config.cache.block_size,
                enable_prefix_caching=self.config.cache.enable_prefix_caching,
                salt=secrets.token_bytes(32),
            )
        return True

    def note_fault(self, replica: int, message: ReplicaFaulted) -> None:
        """Note that a replica waits for a recovery, unless another recovery has begun since."""
        if message.epoch == self.epoch:
            self.faults += message.reports
            if message.has_lost_ranks:
                self.lost.add(replica)

    def wait_until_ready(self, is_cancelled: Callable[[], bool]) -> None:
        """Wait until all replicas have loaded the model.

        Raises:
            CheckpointError, SettingsError: raised by a rank.
            EngineError: a process failed, loading takes too long, or the wait was cancelled.
        """
        while not self.take_ready():
            if self.group.has_failed:
                raise self.loading_failure()
            if is_cancelled():
                raise EngineError("the engine was shut down while it restarted")
            wait_for_messages(self.group.members, SECONDS_BETWEEN_LOOKS)

    def loading_failure(self) -> MoeserveError:
        """Return the error of a process that failed while loading. Waits briefly to find the root cause."""
        return as_error(root_cause(self.group.collect_failures()), "while the model was loaded")

    def begin_to_load(self) -> None:
        """Expect `Ready` of all replicas of the group."""
        self._loading = {replica.name: None for replica in self.group.replicas}
        self.index_of = {replica: index for index, replica in enumerate(self.group.replicas)}
        self.began_s = time.monotonic()
        self.faults: list[FailureReport] = []  # failures that replicas reported while they wait for a recovery

    def shut_down(self) -> None:
        """Make the replicas agree to shut down, and wait until all processes have exited."""
        self.end.detach()
        for replica in self.group.replicas:
            replica.send(Shutdown())
        self.group.end(SECONDS_TO_END)


def with_limits_of(running: EngineConfig, num_blocks: int, config: EngineConfig) -> EngineConfig:
    """Return the config of another number of replicas, with the maximum request length of the running engine.

    On CPUs, an unset KV cache size is measured again. It must hold at least an equal share of the running engine's
    blocks, and a request of maximum length.

    Args:
        num_blocks: blocks of the running engine's KV cache on each rank.
    """
    num_cache_blocks = None
    if config.cache.kv_cache_memory is None and config.compute.device == "cpu":
        share = num_blocks * running.parallel.data_parallel_size // config.parallel.data_parallel_size
        num_cache_blocks = max(share, -(-running.schedule.max_model_len // config.cache.block_size))
    return config.changed(
        schedule={"max_model_len": running.schedule.max_model_len, "max_model_len_may_shrink": False},
        cache={"num_cache_blocks": num_cache_blocks},
    )
