"""`EngineHub`: one engine that several processes share.

The hub's process owns the engine and restarts it. Each other process tokenizes, detokenizes and serves its clients
through a `RemoteEngine`; the hub forwards its requests and their updates unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from moeserve.controls import ControlResult
from moeserve.engine.base import EngineClient
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
    Starting,
    ToHub,
    Updates,
)
from moeserve.errors import EngineError, MoeserveError
from moeserve.processes.channel import frame
from moeserve.processes.failures import as_error, root_cause
from moeserve.processes.supervision import ProcessPoll, WatchedProcess
from moeserve.processes.wake_up import WakeUp
from moeserve.protocol import AbortRequest, AddRequest, RequestUpdate
from moeserve.telemetry.observer import LoadObserver

logger = logging.getLogger(__name__)

# Seconds between reports of the engine's state, and between checks of an idle engine.
SECONDS_BETWEEN_CHECKS = 0.25
# A process that exits unexpectedly is replaced, unless this many have done so within a minute.
MAX_FAILURES_PER_MINUTE = 3
# Processes send something about once per second. A process that was silent for this long is stopped or stuck, and is
# killed.
SECONDS_OF_SILENCE = 6.0
SECONDS_TO_START = 30.0  # maximum time until the first message, before which a process imports modules


class EngineHub:
    """Forwards requests of several processes to an engine, and returns its updates."""

    def __init__(
        self,
        engine: EngineClient,
        observer: LoadObserver,
        start_process: Callable[[int], WatchedProcess[ToHub]],
        num_processes: int,
    ) -> None:
        """
        Args:
            start_process: starts a process that shares the engine, given its `SharedEngine.index`.
        """
        self._engine, self._observer = engine, observer
        self._start_process = start_process
        self._processes: dict[int, WatchedProcess[ToHub]] = {}  # running processes by index
        self._num_started = 0
        self._in_flight: dict[str, None] = {}  # requests that have not ended
        self._for_engine: deque[AddRequest | AbortRequest | Scale | RunControl] = deque()
        self._has_messages = threading.Event()
        self._has_ended = threading.Event()
        self._listener_wake_up = WakeUp()
        self._failure: BaseException | None = None
        self._failure_times: deque[float] = deque(maxlen=MAX_FAILURES_PER_MINUTE)
        self._drain: Drain | None = None  # set once shutdown is requested
        self._sent_drain: Drain | None = None
        self._silence_s: dict[int, float] = {}  # time since the last message of each process that was not killed
        self._heard: set[int] = set()  # processes that have sent a message
        self.has_listener = threading.Event()  # set once one of the processes listens
        self._notes: dict[int, Note] = {}  # the last note of each process, also of processes that have exited
        self._state: EngineState | None = None  # as last sent
        self._state_sent_s = 0.0
        for _ in range(num_processes):
            self._add_process()

    @property
    def has_ended(self) -> bool:
        """True once all processes have exited."""
        return self._has_ended.is_set()

    def drain(self, *, at_once: bool = False) -> None:
        """Request all processes to exit, either after their requests or at once. A signal handler may call this."""
        self._drain = Drain(at_once)

    def run(self) -> None:
        """Run the engine until all processes have exited.

        Raises:
            EngineError: too many of the processes failed.
        """
        listener = threading.Thread(target=self._listen, name="hub", daemon=True)
        listener.start()
        while not self._has_ended.is_set():
            self._step()
        listener.join()
        if self._failure is not None:
            raise self._failure

    # The following methods run in the engine's thread.

    def _step(self) -> None:
        while self._for_engine:
            self._pass_on(self._for_engine.popleft())
        with contextlib.suppress(EngineError):  # the engine has ended all requests; `refusal` gives the reason
            self._send(self._engine.step())
        for window in self._engine.take_loads():
            self._observer.observe(window)
            self._send_all(Load(window))
        if not self._engine.has_work:
            self._has_messages.wait(SECONDS_BETWEEN_CHECKS)
        self._has_messages.clear()

    def _pass_on(self, message: AddRequest | AbortRequest | Scale | RunControl) -> None:
        if isinstance(message, AbortRequest):
            self._engine.abort(message.request_id)
            return
        if isinstance(message, Scale):
            self._scale(message)
            return
        if isinstance(message, RunControl):
            self._run_control(message)
            return
        names = [each.request_id for each in message.requests]
        try:
            self._engine.add(message.request, message.samples)
            self._in_flight.update(dict.fromkeys(names))
        except EngineError as error:
            self._send([RequestUpdate(request_id=name, finish_reason="abort", error=str(error)) for name in names])

    def _scale(self, message: Scale) -> None:
        try:
            change = self._engine.scale(message.data_parallel_size)
        except MoeserveError as error:
            self._send_to(message.sender, Scaled(str(error), type(error).__name__))
            return

        def answer(change: Future[None]) -> None:
            error = change.exception()
            self._send_to(message.sender, Scaled() if error is None else Scaled(str(error), type(error).__name__))

        change.add_done_callback(answer)

    def _run_control(self, message: RunControl) -> None:
        def send(result: ControlResult | None, error: BaseException | None) -> None:
            is_paused, weights = self._engine.is_paused, self._engine.weights
            kind = "" if error is None else type(error).__name__
            self._send_to(
                message.sender, ControlRan(message.ticket, is_paused, weights, result, str(error or ""), kind)
            )

        def answer(ended: Future[ControlResult]) -> None:
            error = ended.exception()
            send(ended.result() if error is None else None, error)

        try:
            self._engine.control(message.command).add_done_callback(answer)
        except MoeserveError as error:
            send(None, error)

    def _send(self, updates: Sequence[RequestUpdate]) -> None:
        by_process: dict[int, list[RequestUpdate]] = {}
        for update in updates:
            if update.finish_reason is not None:
                self._in_flight.pop(update.request_id, None)
            by_process.setdefault(_owner(update.request_id), []).append(update)
        for index, concerned in by_process.items():
            self._send_to(index, Updates(concerned))

    def _send_to(self, index: int, message: FromHub) -> None:
        """Send a message to a process if it is running. Any thread may call this."""
        process = self._processes.get(index)
        if process is not None:
            process.channel.send(message)
            if process.channel.has_unsent:
                self._listener_wake_up.wake()

    def _send_all(self, message: FromHub) -> None:
        data = frame(message)
        for process in list(self._processes.values()):
            process.channel.send_frame(data)

    # The following methods run in the listener's thread.

    def _listen(self) -> None:
        """Receive messages of the processes, report to them, and replace failed processes, until all have exited."""
        try:
            leaving: set[int] = set()  # processes that have sent their last message
            while self._processes:
                index_of = {process: index for index, process in self._processes.items()}
                poll = ProcessPoll(list(index_of), self._listener_wake_up.fd)
                while not any(process.has_ended for process in index_of):
                    began_s = time.monotonic()
                    for process in poll.ready(SECONDS_BETWEEN_CHECKS):
                        if self._receive(process, index_of[process]):
                            leaving.add(index_of[process])
                    self._listener_wake_up.take()
                    self._kill_silent(index_of, time.monotonic() - began_s)
                    self._report()
                for process, index in index_of.items():
                    if process.has_ended:
                        has_left = self._receive(process, index) or index in leaving
                        self._remove(index, has_left=has_left and self._sent_drain is not None)
        except BaseException as error:
            self._failure = error
        self._has_ended.set()
        self._engine.cancel_restart()
        self._wake()

    def _kill_silent(self, index_of: dict[WatchedProcess[ToHub], int], seconds: float) -> None:
        """Kill the processes that have sent nothing for too long.

        Args:
            seconds: time since the last call. It counts up to twice the interval of checks, so that a pause of this
                process, or of the machine, is not taken for silence of other processes.
        """
        for process, index in index_of.items():
            if index not in self._silence_s:
                continue
            self._silence_s[index] += min(seconds, 2 * SECONDS_BETWEEN_CHECKS)
            is_starting = index not in self._heard and self._sent_drain is None
            most = SECONDS_TO_START if is_starting else SECONDS_OF_SILENCE
            if self._silence_s[index] > most:
                logger.error("%s sent nothing for %g s; it is killed", process.name, most)
                del self._silence_s[index]
                process.handle.kill()

    def _receive(self, process: WatchedProcess[ToHub], index: int) -> bool:
        """Handle the messages of a process. Return True if it has sent its last message."""
        messages = process.receive()
        has_left = False
        for message in messages:
            if isinstance(message, Note):
                self._notes[message.sender] = message
                self._send_all(message)
            elif isinstance(message, Leave):
                has_left = True
            elif isinstance(message, Listening):
                self.has_listener.set()
            elif not isinstance(message, Starting):
                self._for_engine.append(message)
        if messages:
            self._silence_s[index] = 0.0
            self._heard.add(index)
            self._wake()
        return has_left

    def _remove(self, index: int, *, has_left: bool) -> None:
        """Remove a process that has exited, and replace it if the exit was unexpected."""
        process = self._processes.pop(index)
        self._silence_s.pop(index, None)
        self._heard.discard(index)
        if not has_left:
            self._for_engine += [AbortRequest(name) for name in list(self._in_flight) if _owner(name) == index]
            self._wake()
            cause = root_cause(process.failures())
            self._failure_times.append(time.monotonic())
            if self._sent_drain is None and not self._fails_often():
                logger.error("%s; another one replaces it", cause)
                self._add_process()
            else:
                self._failure = self._failure or as_error(cause, "the server ended")
                self.drain(at_once=True)
        process.close()

    def _fails_often(self) -> bool:
        return len(self._failure_times) == MAX_FAILURES_PER_MINUTE and time.monotonic() - self._failure_times[0] < 60

    def _add_process(self) -> None:
        """Start a process, and send it the current state and notes."""
        process = self._start_process(self._num_started)
        for note in self._notes.values():
            process.channel.send(note)
        if self._state is not None:
            process.channel.send(self._state)
        self._processes[self._num_started] = process
        self._silence_s[self._num_started] = 0.0
        self._num_started += 1

    def _report(self) -> None:
        """Send the engine's state if it has changed, and the request to exit."""
        engine, last, now = self._engine, self._state, time.monotonic()
        is_urgent = last is None or (last.refusal, last.has_failed) != (engine.refusal, engine.has_failed)
        if is_urgent or now - self._state_sent_s >= SECONDS_BETWEEN_CHECKS:
            self._state = EngineState(
                refusal=engine.refusal,
                has_failed=engine.has_failed,
                replica_stats=list(engine.replica_stats),
                num_blocks=engine.num_blocks,
                is_paused=engine.is_paused,
                weights=engine.weights,
            )
            self._state_sent_s = now
            if self._state != last:
                self._send_all(self._state)
        if self._drain != self._sent_drain and self._drain is not None:
            self._sent_drain = self._drain
            self._send_all(self._drain)

    def _wake(self) -> None:
        self._has_messages.set()
        self._engine.wake()


def _owner(request_id: str) -> int:
    """Return the index of the process that sent a request: see `RemoteEngine`."""
    return int(request_id.partition("/")[0])
