"""`EngineHub`: one engine that several processes share.

The engine stays in one process, with restarts and all that concerns its ranks. Each of the other processes has a
`RemoteEngine`: it tokenizes, makes texts of tokens and speaks to clients, which is most of the work outside the ranks.
The hub passes requests and updates on as they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence

from moeserve.engine.base import Engine
from moeserve.engine.protocol import Drain, EngineState, FromHub, Leave, Load, Note, ToHub, Updates
from moeserve.errors import EngineError
from moeserve.processes.failures import as_error, root_cause
from moeserve.processes.supervision import ProcessPoll, WatchedProcess, collect_failures
from moeserve.protocol import AbortRequest, AddRequest, RequestUpdate
from moeserve.telemetry.observer import LoadObserver

# Interval in which the hub looks whether the engine's state has changed, and at an idle engine. Seconds.
SECONDS_BETWEEN_CHECKS = 0.25


class EngineHub:
    """Passes requests of several processes to an engine, and its updates back."""

    def __init__(self, engine: Engine, observer: LoadObserver, processes: Sequence[WatchedProcess[ToHub]]) -> None:
        """
        Args:
            processes: those that share the engine, by their `SharedEngine.index`.
        """
        self._engine, self._observer = engine, observer
        self._processes = processes
        self._for_engine: deque[AddRequest | AbortRequest] = deque()
        self._has_messages = threading.Event()
        self._has_ended = threading.Event()
        self._failure: BaseException | None = None
        self._must_drain = False

    def drain(self) -> None:
        """Tell all processes to end, soon. A signal handler may call this."""
        self._must_drain = True

    def run(self) -> None:
        """Run the engine until all processes have ended.

        Raises:
            EngineError: one of the processes failed.
        """
        listener = threading.Thread(target=self._listen, name="hub", daemon=True)
        listener.start()
        while not self._has_ended.is_set():
            self._step()
        listener.join()
        if self._failure is not None:
            raise self._failure

    def _step(self) -> None:
        while self._for_engine:
            self._pass_on(self._for_engine.popleft())
        with contextlib.suppress(EngineError):  # it has ended all requests; its refusal says why it takes no others
            self._send(self._engine.step())
        for window in self._engine.take_loads():
            self._observer.observe(window)
            self._send_all(Load(window))
        if not self._engine.has_work:
            self._has_messages.wait(SECONDS_BETWEEN_CHECKS)
        self._has_messages.clear()

    def _pass_on(self, message: AddRequest | AbortRequest) -> None:
        if isinstance(message, AbortRequest):
            self._engine.abort(message.request_id)
            return
        try:
            self._engine.add(message.request, message.samples)
        except EngineError as error:
            names = [each.request_id for each in message.requests]
            self._send([RequestUpdate(request_id=name, finish_reason="abort", error=str(error)) for name in names])

    def _send(self, updates: Sequence[RequestUpdate]) -> None:
        by_process: dict[str, list[RequestUpdate]] = {}
        for update in updates:
            by_process.setdefault(update.request_id.partition("/")[0], []).append(update)
        for index, concerned in by_process.items():
            self._processes[int(index)].channel.send(Updates(concerned))

    def _send_all(self, message: FromHub) -> None:
        for process in self._processes:
            process.channel.send(message)

    def _listen(self) -> None:
        """Receive the messages of all processes, and send them the engine's state, until they have ended."""
        try:
            running, leaving, state = list(self._processes), set(), None
            while running:
                poll = ProcessPoll(running)
                while not any(process.has_ended for process in running):
                    for process in poll.ready(SECONDS_BETWEEN_CHECKS):
                        leaving |= self._receive(process)
                    state = self._report(state)
                for process in running:
                    leaving |= self._receive(process)
                ended = [process for process in running if process.has_ended]
                if not leaving.issuperset(ended):
                    reports = collect_failures([process for process in ended if process not in leaving])
                    raise as_error(root_cause(reports), "the server ended")
                running = [process for process in running if process not in ended]
        except BaseException as error:
            self._failure = error
        self._has_ended.set()
        self._wake()

    def _receive(self, process: WatchedProcess[ToHub]) -> set[WatchedProcess[ToHub]]:
        """Take the messages of a process. Return it if it has sent its last one."""
        messages = process.receive()
        for message in messages:
            if isinstance(message, Note):
                for other in self._processes:
                    if other is not process:
                        other.channel.send(message)
            elif not isinstance(message, Leave):
                self._for_engine.append(message)
        if messages:
            self._wake()
        return {process for message in messages if isinstance(message, Leave)}

    def _report(self, last: EngineState | None) -> EngineState:
        """Send the engine's state if it differs from the last one, and the signal to end."""
        engine = self._engine
        state = EngineState(
            refusal=engine.refusal, has_failed=engine.has_failed, replica_stats=list(engine.replica_stats)
        )
        if state != last:
            self._send_all(state)
        if self._must_drain:
            self._must_drain = False
            self._send_all(Drain())
        return state

    def _wake(self) -> None:
        self._has_messages.set()
        self._engine.wake()
