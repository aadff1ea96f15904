"""The engine of a single rank, which runs in the process that uses it."""

from __future__ import annotations

import select
from collections.abc import Sequence
from concurrent.futures import Future

from moeserve.config.engine_config import EngineConfig
from moeserve.engine.base import Ownership, fit_to_cache, log_lowered_length, new_scheduler, require_new, stats_at_start
from moeserve.engine.driver import Driver, StepTimeoutError
from moeserve.errors import EngineError, SettingsError
from moeserve.executor.uniproc import UniprocExecutor
from moeserve.interrupts import interrupts_allowed
from moeserve.processes.wake_up import WakeUp
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    CollectLoad,
    ReplicaMessage,
    Request,
    RequestUpdate,
    Sample,
    Shutdown,
)
from moeserve.scheduling.replica import Deliver, Replica
from moeserve.telemetry.expert_load import LoadWindow


class EngineCore:
    """An `Engine` of one rank. The replica's loop runs inside `step`, while the rank computes in a thread."""

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        self.executor = UniprocExecutor(config, show_progress=show_progress)
        self.num_blocks = self.executor.loaded[0].num_blocks
        self.config = fit_to_cache(config, self.num_blocks)
        log_lowered_length(config, self.config)
        self._replica = Replica(
            new_scheduler(self.config, self.executor.loaded),
            max_rounds=self.config.schedule.max_concurrent_batches,
            load_window=self.config.telemetry.expert_load_window,
        )
        self._ownership = Ownership()
        self._wake_up = WakeUp()
        self._inbox: list[ReplicaMessage] = []
        self._in_flight: dict[str, None] = {}  # requests whose end has not been delivered
        self._undelivered: list[RequestUpdate] = []  # not yet returned by `step`
        self._loads: list[LoadWindow] = []  # not yet returned by `take_loads`
        self._awaits_load = False
        self.replica_stats = [stats_at_start(self.num_blocks)]
        self.refusal = ""  # the reason why requests are refused
        self._driver = Driver(self._replica, self.executor, self._receive, self.config.failure.step_timeout)

    @property
    def num_free_blocks(self) -> list[int]:
        """The number of free KV cache blocks, as in `Replicas`."""
        self._end_transfers()
        return [stats.num_free_blocks for stats in self.replica_stats]

    @property
    def has_failed(self) -> bool:
        return bool(self.refusal)

    @property
    def has_work(self) -> bool:
        has_rounds = self._driver.has_rounds and not self.refusal  # rounds of a failed engine never end
        return bool(self._in_flight or self._undelivered or has_rounds)

    def add(self, request: Request, samples: Sequence[Sample] = ()) -> None:
        self._require_open()
        message = AddRequest(request, list(samples))
        request_ids = [each.request_id for each in message.requests]
        require_new(request_ids, self._in_flight)
        self._in_flight.update(dict.fromkeys(request_ids))
        self._inbox.append(message)

    def abort(self, request_id: str) -> None:
        if request_id in self._in_flight:
            self._inbox.append(AbortRequest(request_id))

    def step(self) -> list[RequestUpdate]:
        self._ownership.require()
        self._end_transfers()
        while not self._undelivered and self.has_work and not self._wake_up.take():
            self._advance()
        updates, self._undelivered = self._undelivered, []
        if not updates and not self._in_flight:
            self._require_open()
        return updates

    def wake(self) -> None:
        self._wake_up.wake()

    def cancel_restart(self) -> None:
        """Do nothing: this engine is never restarted."""

    def collect_load(self) -> None:
        self._require_open()
        self._awaits_load = True
        self._inbox.append(CollectLoad())

    def take_loads(self, *, wait: bool = False) -> list[LoadWindow]:
        was_woken = False
        while wait and self._awaits_load:
            self._require_open()
            was_woken |= self._wake_up.take()  # else every wait would return at once
            self._advance()
        if was_woken:
            self._wake_up.wake()  # restore the wake-up for the next step that waits
        loads, self._loads = self._loads, []
        return loads

    def scale(self, data_parallel_size: int) -> Future[None]:
        raise SettingsError(
            f"data_parallel_size={data_parallel_size}: replicas can be added and removed where ranks run in processes "
            "of their own; start the engine with executor='mp'"
        )

    def shutdown(self) -> None:
        if self.refusal or not self._ownership.is_owner:  # a fork of the owner does not have the thread
            return
        self._inbox.append(Shutdown())
        while self._driver.wait is not None and not self.refusal:
            self._wake_up.take()  # else every wait would return at once
            self._advance()
        self.refusal = self.refusal or "the engine was shut down; make a new one"
        self.executor.shutdown()

    def _end_transfers(self) -> None:
        """Handle the transfers of an idle engine that have ended, which may free blocks kept for another engine."""
        if not self.has_work and not self.refusal and (ended := self._driver.ended()):
            self._driver.handle([], ended, self._receive)

    def _advance(self) -> None:
        """Wait for an event, and let the replica handle it. A failure ends all requests."""
        assert self._driver.wait is not None
        try:
            ended = self._driver.ended()
            if not self._inbox and not ended:
                poll = select.poll()
                self.executor.register(poll)
                poll.register(self._wake_up.fd, select.POLLIN)
                with interrupts_allowed():
                    poll.poll(self.config.failure.step_timeout * 1000 if self._driver.has_rounds else None)
                ended = self._driver.ended()
            messages, self._inbox = self._inbox, []
            self._driver.handle(messages, ended, self._receive)
        except Exception as error:
            if isinstance(error, StepTimeoutError):
                self.executor.abandon()
            cause = f"{type(error).__name__}: {error}"
            self.refusal = f"the engine has failed and takes no requests; make a new one. The failure: {cause}"
            self._receive(self._replica.end_all_requests(cause))
            self._undelivered += [
                RequestUpdate(request_id=name, finish_reason="abort", error=cause) for name in self._in_flight
            ]
            self._in_flight = {}
            self.executor.shutdown()

    def _receive(self, delivery: Deliver) -> None:
        self._undelivered += delivery.updates
        self.replica_stats = [delivery.stats]
        for update in delivery.updates:
            if update.finish_reason is not None:
                self._in_flight.pop(update.request_id, None)
        self._loads += [] if delivery.load is None else [delivery.load]
        self._awaits_load &= not delivery.answers

    def _require_open(self) -> None:
        self._ownership.require()
        if self.refusal:
            raise EngineError(self.refusal)
