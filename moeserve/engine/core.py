"""The engine of one rank, in the process that uses it: schedule, execute, commit."""

from __future__ import annotations

import contextlib

from moeserve.config.settings import EngineConfig
from moeserve.engine.base import fit_to_cache, log_lowered_length, new_scheduler
from moeserve.errors import EngineError
from moeserve.executor.uniproc import UniprocExecutor
from moeserve.interrupts import interrupts_allowed
from moeserve.protocol import Request, RequestUpdate
from moeserve.scheduling.lockstep import alone
from moeserve.telemetry.expert_load import LoadWindow


class EngineCore:
    """See `Engine`."""

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        self.executor = UniprocExecutor(config, show_progress=show_progress)
        self.config = fit_to_cache(config, self.executor.num_blocks)
        log_lowered_length(config, self.config)
        self.scheduler = new_scheduler(self.config, self.executor.num_blocks)
        self._undelivered: list[RequestUpdate] = []  # ended outside a step: the next one returns them
        self._loads: list[LoadWindow] = []  # not returned by `take_loads` yet
        self._steps_since_load = 0
        self._is_open = True

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        self._require_open()
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        update = self.scheduler.abort(request_id)
        if update is not None:
            self._undelivered.append(update)

    def step(self, *, interruptible: bool = True) -> list[RequestUpdate]:
        """Run one step. Return new tokens and ends of its requests.

        Args:
            interruptible: a deferred Ctrl-C is raised during the step and ends all requests.

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
            collects_load = 0 < self.config.expert_load_window <= self._steps_since_load
            self._steps_since_load = 1 if collects_load else self._steps_since_load + 1
            with interrupts_allowed() if interruptible else contextlib.nullcontext():
                agreement = alone(
                    plan.step, plan.num_tokens, is_decode_only=plan.is_decode_only, collects_load=collects_load
                )
                result = self.executor.execute(plan, agreement)
            self._loads += [] if result.load is None else [result.load]
            return updates + self.scheduler.commit(plan, result)
        except BaseException as error:
            # The state of the scheduler and its cache is unknown after a failed step, so a new one replaces it.
            request_ids = self.scheduler.live_request_ids
            self.scheduler = new_scheduler(self.config, self.executor.num_blocks)
            cause = (
                f"a step failed, and its requests ended ({len(request_ids)} in all): {type(error).__name__}: {error}"
            )
            ended = [RequestUpdate(request_id=name, finish_reason="abort", error=cause) for name in request_ids]
            self._undelivered = updates + ended
            if not isinstance(error, Exception):
                raise
            raise EngineError(cause) from error

    def collect_load(self) -> None:
        self._require_open()
        result = self.executor.execute(None, alone(0, 0, collects_load=True))
        assert result.load is not None
        self._loads.append(result.load)
        self._steps_since_load = 0

    def take_loads(self, *, wait: bool = False) -> list[LoadWindow]:
        loads, self._loads = self._loads, []
        return loads

    def shutdown(self) -> None:
        self._undelivered += self.scheduler.abort_all()
        self._is_open = False
        self.executor.shutdown()

    def _require_open(self) -> None:
        if not self._is_open:
            raise EngineError("the engine was shut down; make a new one")
