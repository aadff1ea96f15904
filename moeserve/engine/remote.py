"""`RemoteEngine`: a client of the engine in the hub's process, which several processes share. See `engine/hub.py`."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from moeserve.controls import Command, ControlResult, WeightState
from moeserve.engine.base import require_encodable, require_new, require_sendable, stats_at_start
from moeserve.engine.protocol import (
    ControlRan,
    Drain,
    EngineState,
    FromHub,
    Leave,
    Listening,
    Load,
    Note,
    RunControl,
    Scale,
    Scaled,
    SharedEngine,
    Starting,
    Updates,
)
from moeserve.errors import (
    EngineError,
    MoeserveError,
    RequestError,
    ScaleError,
    ScalingInProgressError,
    SettingsError,
    StaleWeightsError,
    WeightUpdateError,
)
from moeserve.interrupts import interrupts_allowed
from moeserve.processes.channel import Channel
from moeserve.processes.wake_up import WakeUp
from moeserve.protocol import AbortRequest, AddRequest, ReplicaStats, Request, RequestUpdate, Sample
from moeserve.telemetry.expert_load import LoadWindow

# Errors of `Engine.scale` and `Engine.control` by class name; other names become an EngineError.
_ERRORS: dict[str, type[MoeserveError]] = {
    kind.__name__: kind for kind in (RequestError, ScaleError, ScalingInProgressError, SettingsError, WeightUpdateError)
}


class RemoteEngine:
    """An `EngineClient` of the engine in the hub's process. If that process fails, this process exits too."""

    def __init__(self, channel: Channel[FromHub], engine: SharedEngine, on_drain: Callable[[bool], None]) -> None:
        """
        Args:
            channel: the channel to the hub.
            on_drain: called with `Drain.at_once`, in the thread that uses the engine, when the hub sends `Drain`.
        """
        # Each process has its own seed, so that requests without a seed differ between processes.
        self.config = engine.config.changed(weights={"seed": (engine.config.weights.seed + engine.index) % 2**64})
        self.num_blocks = engine.num_blocks
        self.replica_stats: list[ReplicaStats] = [
            stats_at_start(engine.num_blocks)
        ] * self.config.parallel.data_parallel_size
        self.has_failed = False
        self.is_paused = False
        self.weights = WeightState()
        self.notes: dict[int, bytes] = {}  # the last note of each other process
        self._refusal = ""
        self._index = engine.index
        self._channel = channel
        self._on_drain = on_drain
        self._wake_up = WakeUp()
        self._in_flight: set[str] = set()
        self._undelivered: list[RequestUpdate] = []  # received, but not yet returned by `step`
        self._loads: list[LoadWindow] = []  # not yet returned by `take_loads`
        self._change: Future[None] | None = None  # the pending change of the number of replicas
        self._controls: dict[int, Future[ControlResult]] = {}  # controls that have not ended, by ticket
        self._num_controls = 0
        self._is_shut_down = False

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._undelivered or self._change or self._controls)

    @property
    def refusal(self) -> str:
        return "the engine was shut down; make a new one" if self._is_shut_down else self._refusal

    def add(self, request: Request, samples: Sequence[Sample] = ()) -> None:
        if self.refusal:
            raise EngineError(self.refusal)
        if self.weights.refusal:
            raise StaleWeightsError(self.weights.refusal)
        request_ids = [request.request_id, *(sample.request_id for sample in samples)]
        require_new(request_ids, self._in_flight)
        require_encodable(request)
        named = msgspec.structs.replace(request, request_id=self._global_id(request.request_id))
        self._channel.send(AddRequest(named, [Sample(self._global_id(each.request_id), each.seed) for each in samples]))
        self._in_flight.update(request_ids)

    def abort(self, request_id: str) -> None:
        if request_id in self._in_flight:
            self._channel.send(AbortRequest(self._global_id(request_id)))

    def step(self) -> list[RequestUpdate]:
        self._receive()
        while not self._undelivered and self.has_work and not self._wake_up.take():
            self._wait()
            self._receive()
        updates, self._undelivered = self._undelivered, []
        if not updates and not self._in_flight and self.refusal:
            raise EngineError(self.refusal)
        return updates

    def wake(self) -> None:
        self._wake_up.wake()

    def cancel_restart(self) -> None:
        """Do nothing: the hub decides whether the engine is restarted."""

    def collect_load(self) -> None:
        """Always raises EngineError: the hub's process collects expert loads for all processes."""
        raise EngineError("expert loads are collected by the process that runs the engine")

    def take_loads(self, *, wait: bool = False) -> list[LoadWindow]:
        loads, self._loads = self._loads, []
        return loads

    def scale(self, data_parallel_size: int) -> Future[None]:
        if self.refusal:
            raise EngineError(self.refusal)
        if self._change is not None:
            raise ScalingInProgressError("the number of replicas is being changed already; try again when that is over")
        self._change = Future()
        self._change.set_running_or_notify_cancel()
        self._channel.send(Scale(self._index, data_parallel_size))
        return self._change

    def control(self, command: Command) -> Future[ControlResult]:
        require_sendable(command)
        if self.refusal:
            raise EngineError(self.refusal)
        ended: Future[ControlResult] = Future()
        ended.set_running_or_notify_cancel()
        self._num_controls += 1
        self._controls[self._num_controls] = ended
        self._channel.send(RunControl(self._index, self._num_controls, command))
        return ended

    def send_note(self, body: bytes) -> None:
        """Send a note to all other processes. Any thread may call this."""
        self._channel.send(Note(self._index, body))

    def send_progress(self, *, listens: bool) -> None:
        """Send that this process is starting, or that it listens. Any thread may call this."""
        self._channel.send(Listening() if listens else Starting())

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            for request_id in self._in_flight:
                self._channel.send(AbortRequest(self._global_id(request_id)))
                self._undelivered.append(RequestUpdate(request_id=request_id, finish_reason="abort"))
            self._in_flight.clear()
            self._end_change(EngineError("the server ends"))
            for ended in self._controls.values():
                ended.set_exception(EngineError("the server ends"))
            self._controls.clear()
            self._channel.send(Leave())
            self._channel.flush()

    def _global_id(self, request_id: str) -> str:
        """Return an id that is unique over all processes: it begins with the index of this process."""
        return f"{self._index}/{request_id}"

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.has_unsent else 0))
        poll.register(self._wake_up.fd, select.POLLIN)
        with interrupts_allowed():
            poll.poll()

    def _receive(self) -> None:
        for message in [] if self._is_shut_down else self._channel.receive():
            match message:
                case Updates():
                    self._undelivered += map(self._own, message.updates)
                case EngineState():
                    self._refusal, self.has_failed = message.refusal, message.has_failed
                    self.replica_stats, self.num_blocks = message.replica_stats, message.num_blocks
                    self.is_paused, self.weights = message.is_paused, message.weights
                    parallel = {"data_parallel_size": len(message.replica_stats)}
                    self.config = self.config.changed(parallel=parallel)
                case Scaled():
                    kind = _ERRORS.get(message.kind, EngineError)
                    self._end_change(kind(message.error) if message.error else None)
                case ControlRan():
                    self.is_paused, self.weights = message.is_paused, message.weights
                    ended = self._controls.pop(message.ticket)
                    if message.result is None:
                        ended.set_exception(_ERRORS.get(message.kind, EngineError)(message.error))
                    else:
                        ended.set_result(message.result)
                case Load():
                    self._loads.append(message.window)
                case Note() if message.sender != self._index:
                    self.notes[message.sender] = message.body
                case Drain():
                    self._on_drain(message.at_once)

    def _end_change(self, error: MoeserveError | None) -> None:
        change, self._change = self._change, None
        if change is not None:
            change.set_exception(error) if error is not None else change.set_result(None)

    def _own(self, update: RequestUpdate) -> RequestUpdate:
        _, _, request_id = update.request_id.partition("/")
        if update.finish_reason is not None:
            self._in_flight.discard(request_id)
        return msgspec.structs.replace(update, request_id=request_id)
