"""The loop of one replica: schedule, execute, commit. Owns the scheduler and the executor; knows no text."""

from __future__ import annotations

import dataclasses
import logging
import secrets

from moeserve.config import EngineConfig
from moeserve.errors import EngineError
from moeserve.executor.base import Executor
from moeserve.executor.uniproc import UniprocExecutor
from moeserve.messages import Request, RequestUpdate
from moeserve.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests go in by `add`; each `step` returns the news of those that moved."""

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        self.executor = _start_executor(config, show_progress=show_progress)
        self.config = _fit_to_cache(config, self.executor.num_blocks)
        self.scheduler = self._new_scheduler()
        self._undelivered: list[RequestUpdate] = []  # ends that came outside a step: the next one returns them
        self._is_open = True

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError, and changes nothing, if it can never run."""
        self._require_open()
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request at once and frees its blocks, if there is such a request. The next step tells of it."""
        update = self.scheduler.abort(request_id)
        if update is not None:
            self._undelivered.append(update)

    def step(self) -> list[RequestUpdate]:
        """Runs one step. Returns the new tokens, and the ends, of the requests that were in it.

        Raises:
            EngineError: the step failed. All requests have ended and their blocks are free; new ones may be added.
                The next call returns the ends. Or the engine was shut down, and its last ends were returned.
        """
        updates, self._undelivered = self._undelivered, []
        if not updates:
            self._require_open()
        try:
            plan = self.scheduler.schedule()
            if plan is None:
                return updates
            return updates + self.scheduler.commit(plan, self.executor.execute(plan))
        except BaseException as error:
            # Ctrl-C may come in the middle of the books being changed, so new ones are begun.
            request_ids, self.scheduler = self.scheduler.live_request_ids, self._new_scheduler()
            ended = [RequestUpdate(request_id=name, finish_reason="abort") for name in request_ids]
            self._undelivered = updates + ended
            if not isinstance(error, Exception):
                raise
            raise EngineError(
                f"a step failed and ended {len(request_ids)} requests: {type(error).__name__}: {error}"
            ) from error

    def shutdown(self) -> None:
        """Ends all requests and the executor. May be called twice."""
        self._undelivered += self.scheduler.abort_all()
        self._is_open = False
        self.executor.shutdown()

    def _require_open(self) -> None:
        if not self._is_open:
            raise EngineError("the engine was shut down; make a new one")

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            num_blocks=self.executor.num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.config.max_model_len,
            enable_prefix_caching=self.config.enable_prefix_caching,
            cache_salt=secrets.token_bytes(32),
        )


def _start_executor(config: EngineConfig, *, show_progress: bool) -> Executor:
    match config.executor:
        case "uniproc":
            return UniprocExecutor(config, show_progress=show_progress)


def _fit_to_cache(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """Lowers max_model_len to what the cache holds, where the user left it open."""
    capacity = num_blocks * config.block_size
    if config.max_model_len <= capacity:
        return config
    assert config.max_model_len_may_shrink, "the worker refuses a cache smaller than a max_model_len that was given"
    logger.warning(
        "max_model_len lowered from %d to %d, what the KV cache holds; raise kv_cache_memory for more",
        config.max_model_len,
        capacity,
    )
    return dataclasses.replace(config, max_model_len=capacity)
