"""What an engine promises to the API, and what every engine does with its config. Knows no text."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Protocol

from moeserve.config.settings import EngineConfig
from moeserve.protocol import Request, RequestUpdate
from moeserve.scheduling.scheduler import Scheduler, SchedulerConfig
from moeserve.telemetry.expert_load import LoadWindow


class Engine(Protocol):
    """Requests go in by `add`; each `step` returns the news of those that moved. One thread at a time may use it."""

    config: EngineConfig  # with the max_model_len that the KV cache allows

    @property
    def has_work(self) -> bool:
        """Whether there is a request whose end was not returned."""
        ...

    def add(self, request: Request) -> None:
        """Queues a request. Its id is no other's.

        Raises:
            RequestError: it can never run. Nothing has changed.
            EngineError: the engine was shut down, or has failed for good.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request, if there is such a request. A later step tells of it."""
        ...

    def step(self) -> list[RequestUpdate]:
        """New tokens, and ends, of requests. Waits for some while there are requests.

        A request that fails ends with an update that carries an error.

        Raises:
            EngineError: a step failed, or the engine was shut down or has failed for good and told of all ends.
        """
        ...

    def collect_load(self) -> None:
        """Has all ranks tell what their experts were given since they last did. `take_loads` has it soon.

        Raises:
            EngineError: the engine was shut down, or has failed for good.
        """
        ...

    def take_loads(self, *, wait: bool = False) -> list[LoadWindow]:
        """What the experts were given, in windows that no earlier call returned.

        Args:
            wait: until the one is there that was asked for.

        Raises:
            EngineError: it fails meanwhile.
        """
        ...

    def shutdown(self) -> None:
        """Ends all requests, and whatever runs them. May be called twice."""
        ...


def new_scheduler(config: EngineConfig, num_blocks: int) -> Scheduler:
    """A scheduler without requests, with a secret of its own."""
    return Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        secrets.token_bytes(32),
    )


def fit_to_cache(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """Lowers max_model_len to what the cache holds, where the user left it open."""
    capacity = num_blocks * config.block_size
    if config.max_model_len <= capacity:
        return config
    assert config.max_model_len_may_shrink, "the worker refuses a cache smaller than a max_model_len that was given"
    return dataclasses.replace(config, max_model_len=capacity)


def shrinkage(before: EngineConfig, after: EngineConfig) -> str:
    """What to tell the user of `fit_to_cache`. Empty: nothing."""
    if before.max_model_len == after.max_model_len:
        return ""
    return (
        f"max_model_len lowered from {before.max_model_len} to {after.max_model_len}, what the KV cache holds; "
        "raise kv_cache_memory for more"
    )
