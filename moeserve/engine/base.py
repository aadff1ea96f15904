"""The interface of an engine, and functions that all engines and replicas share."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec

from moeserve.config.allocation import refusing_what_cannot_be_allocated
from moeserve.config.engine_config import EngineConfig
from moeserve.controls import Command, ControlResult, WeightState
from moeserve.engine.protocol import Ready
from moeserve.errors import EngineError, RequestError
from moeserve.kv.connector import ITEM_FILE_ENDING, FolderTier, HostTier, KVConnector
from moeserve.models.checkpoint.file_hashes import require_same
from moeserve.private_folder import secret_of
from moeserve.protocol import ReplicaStats, Request, RequestUpdate, Sample
from moeserve.scheduling.replica import Replica
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.telemetry.expert_load import LoadWindow
from moeserve.worker.protocol import Loaded, sampling_rank

logger = logging.getLogger(__name__)

SALT_BYTES = 32


class EngineClient(Protocol):
    """An engine in this or another process. It accepts requests, and each `step` returns updates of some requests.

    Only one thread at a time may use an engine, except for `wake`.
    """

    @property
    def config(self) -> EngineConfig:
        """The config, with the limits that memory allows and the current number of replicas."""
        ...

    @property
    def replica_stats(self) -> list[ReplicaStats]:
        """The load of each replica, as last reported."""
        ...

    @property
    def num_blocks(self) -> int:
        """The number of KV cache blocks of each rank."""
        ...

    @property
    def refusal(self) -> str:
        """The reason why requests are refused.

        Empty while requests are accepted, even if they restart a failed engine.
        """
        ...

    @property
    def has_failed(self) -> bool:
        """True from a failure until a restart has succeeded."""
        ...

    @property
    def has_work(self) -> bool:
        """True if a request or control has not ended, an end was not returned yet, or a change of replicas runs."""
        ...

    def add(self, request: Request, samples: Sequence[Sample] = ()) -> None:
        """Queue a request, and further samples of it. Their ids must differ from those of all unfinished requests.

        Raises:
            RequestError: the request can never run. Nothing has changed.
            EngineError: the engine was shut down, or has failed for good.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request if it is still running. A later `step` returns its end."""
        ...

    def step(self) -> list[RequestUpdate]:
        """Return updates with new tokens or finish reasons.

        If any request is in flight, wait for the first update or for `wake`.

        A failed request ends with an update that carries an error. A deferred Ctrl-C is raised during the wait, and
        does not change the state.

        Raises:
            EngineError: the engine was shut down or has failed for good, and the ends of all requests were returned.
        """
        ...

    def wake(self) -> None:
        """End the wait of `step`, or else of the next `step` that would wait. Any thread may call this."""
        ...

    def cancel_restart(self) -> None:
        """Make a restart after a failure fail soon, because the engine is to shut down. Any thread may call this."""
        ...

    @property
    def is_paused(self) -> bool:
        """True from the end of a `Pause` to the end of a `Resume`."""
        ...

    @property
    def weights(self) -> WeightState:
        """The version of the weights, and whether requests are served with them."""
        ...

    def control(self, command: Command) -> Future[ControlResult]:
        """Start to run a command on all replicas, between two steps. Calls of `step` advance it.

        Returns:
            A future with the result. Its exception is an EngineError if the engine fails or ends before the result
            exists.

        Raises:
            EngineError: the engine was shut down, or has failed.
            WeightUpdateError: the weights cannot be updated now.
            RequestError: the engine sleeps, or cannot sleep; or a value of the command cannot be sent to ranks.
        """
        ...

    def collect_load(self) -> None:
        """Request all ranks' expert loads since the last collection. `take_loads` returns them.

        Raises:
            EngineError: the engine was shut down, or has failed.
        """
        ...

    def take_loads(self, *, wait: bool = False) -> list[LoadWindow]:
        """Return the windows of expert loads that no earlier call returned.

        Args:
            wait: wait for the window that `collect_load` has requested.

        Raises:
            EngineError: the engine has failed while waiting.
        """
        ...

    def scale(self, data_parallel_size: int) -> Future[None]:
        """Start to change the number of replicas. Calls of `step` advance the change; requests continue meanwhile.

        Returns:
            A future that is done when the change is over. Its exception is a ScaleError if the number was not changed.

        Raises:
            SettingsError: this engine, model or machine does not support that number.
            ScalingInProgressError: an earlier change is not over.
            EngineError: the engine was shut down, or has failed.
        """
        ...

    def shutdown(self) -> None:
        """End all requests and exit all processes. May be called twice."""
        ...


class Ownership:
    """Refuses the use of an engine in a fork of the process that made it, where its threads do not exist."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_owner(self) -> bool:
        return os.getpid() == self._pid

    def require(self) -> None:
        if not self.is_owner:
            raise EngineError(
                f"this engine belongs to process {self._pid} and cannot be used in a fork of it, such as this process "
                f"({os.getpid()}); make a new LLM here"
            )


def require_new(request_ids: Iterable[str], in_flight: Container[str]) -> None:
    """Raise RequestError if the id of a request is in use."""
    for request_id in request_ids:
        if request_id in in_flight:
            raise RequestError(f"request {request_id!r} is still being served; give each request its own id")


def require_encodable(request: Request) -> None:
    """Raise RequestError if a request cannot be sent to another process."""
    try:
        msgspec.msgpack.encode(msgspec.structs.replace(request, prompt_token_ids=[]))
    except UnicodeEncodeError as error:
        raise RequestError(f"request {request.request_id!r} has a text that is not valid Unicode: {error}") from None


def require_sendable(command: Command) -> None:
    """Raise RequestError unless ranks would read a command as it is; one that they cannot read would end them."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command)
    except (UnicodeEncodeError, OverflowError, TypeError, msgspec.ValidationError) as error:
        name = type(command).__name__
        raise RequestError(f"the command {name} has a value that cannot be sent to the ranks: {error}") from None


def stats_at_start(num_blocks: int) -> ReplicaStats:
    """Return the load of a replica without requests."""
    return ReplicaStats(num_free_blocks=num_blocks, num_waiting=0, num_running=0, num_rounds=0)


def new_scheduler(config: EngineConfig, loaded: Sequence[Loaded]) -> Scheduler:
    """Return a scheduler without requests.

    The prefix cache has a new random salt, or the salt of the folder that its blocks are stored in.

    Args:
        loaded: the reports of the replica's ranks, in order.

    Raises:
        SettingsError: the folder cannot be used; memory is exhausted.
    """
    schedule = config.schedule
    connector: KVConnector | None = None
    salt = secrets.token_bytes(SALT_BYTES)
    store = loaded[sampling_rank(config)].store  # the folder of each rank has its own part of the same items
    if store.folder is not None:
        assert config.store.kv_folder is not None, "a rank has opened a folder"
        folder = Path(store.folder)
        # Unlike Path.exists, this is False for a folder that cannot be read.
        connector = FolderTier(lambda name: os.path.exists(folder / f"{name}{ITEM_FILE_ENDING}"))
        salt = secret_of("kv_folder", Path(config.store.kv_folder))
    elif store.num_host_places:
        connector = HostTier(store.num_host_places)
    with refusing_what_cannot_be_allocated(config):
        return Scheduler(
            SchedulerConfig(
                num_blocks=loaded[0].num_blocks,
                block_size=config.cache.block_size,
                max_num_seqs=schedule.max_num_seqs,
                max_num_batched_tokens=schedule.max_num_batched_tokens,
                max_prefill_tokens=schedule.max_prefill_tokens,
                max_model_len=schedule.max_model_len,
                enable_prefix_caching=config.cache.enable_prefix_caching,
                plans_ahead=schedule.async_scheduling,
                num_batches=1 if schedule.async_scheduling else schedule.max_concurrent_batches,
                num_lookahead_tokens=schedule.num_lookahead_tokens,
                other_groups=tuple(facts.group for facts in loaded[0].other_groups),
                routes=config.experts.routes,
                longest_turn_wait=schedule.longest_turn_wait,
                recomputes_drafts=config.cache.redoes_drafts,
            ),
            salt,
            connector,
            [rank.address for rank in loaded if rank.address],
        )


def ready_of(loaded: Sequence[Loaded], epoch: int = 0) -> Ready:
    """Return the `Ready` message of a replica, which says that its ranks have loaded the model.

    Args:
        loaded: as for `new_scheduler`.

    Raises:
        WeightsChangedError: files have changed between the starts of two ranks.
    """
    for rank in loaded:
        require_same(loaded[0].file_hashes, rank.file_hashes)
    return Ready(loaded[0].num_blocks, loaded[0].file_hashes, loaded[0].chunk_size, epoch)


def new_replica(
    config: EngineConfig, loaded: Sequence[Loaded], index: int = 0, scheduler: Scheduler | None = None
) -> Replica:
    """Return the loop of a replica without requests.

    Args:
        loaded: as for `new_scheduler`.
        index: index of the replica.
        scheduler: a scheduler without requests, whose cached prefixes the ranks have; None: a new scheduler.
    """
    fitted = fit_to_cache(with_chunk_size(config, loaded[0].chunk_size), loaded[0].num_blocks)
    return Replica(
        scheduler or new_scheduler(fitted, loaded),
        index=index,
        num_replicas=fitted.parallel.data_parallel_size,
        max_rounds=fitted.schedule.max_concurrent_batches,
        load_window=fitted.telemetry.expert_load_window,
    )


def with_chunk_size(config: EngineConfig, chunk_size: int | None) -> EngineConfig:
    """Return the config with the max_num_batched_tokens that its ranks have chosen; None: the same."""
    return config if chunk_size is None else config.changed(schedule={"max_num_batched_tokens": chunk_size})


def fit_to_cache(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """Return the config with max_model_len lowered to the capacity of the KV cache, unless the user has set it."""
    capacity = num_blocks * config.cache.block_size
    if config.schedule.max_model_len <= capacity:
        return config
    assert config.schedule.max_model_len_may_shrink, (
        "the worker refuses a cache smaller than a max_model_len that was given"
    )
    return config.changed(schedule={"max_model_len": capacity})


def log_lowered_length(before: EngineConfig, after: EngineConfig) -> None:
    """Log a warning if `fit_to_cache` has lowered max_model_len."""
    if before.schedule.max_model_len != after.schedule.max_model_len:
        logger.warning(
            "max_model_len lowered from %d to %d, the capacity of the KV cache; raise kv_cache_memory for more",
            before.schedule.max_model_len,
            after.schedule.max_model_len,
        )
