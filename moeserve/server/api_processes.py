"""Several HTTP processes for one engine.

The process that starts the HTTP processes runs the engine, and forwards requests and tokens; see `engine/hub.py`. All
HTTP processes listen on one port, and the operating system distributes connections between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from moeserve.api.async_llm import AsyncLLM
from moeserve.api.startup import open_session, read_texts, start_engine
from moeserve.config.environment import environment_of_rank
from moeserve.config.settings import Settings
from moeserve.engine.hub import EngineHub
from moeserve.engine.protocol import FromHub, SharedEngine, ToHub
from moeserve.engine.remote import RemoteEngine
from moeserve.errors import SettingsError
from moeserve.machine import usable_cores
from moeserve.processes.child import Parent
from moeserve.processes.local import start_process
from moeserve.processes.supervision import WatchedProcess, end_all
from moeserve.server.engine_server import open_service
from moeserve.server.http_server import DrainingServer, announce, ends_handled_by
from moeserve.server.loading import answering_while_loading
from moeserve.server.service import Service
from moeserve.server.settings import ServerSettings
from moeserve.server.totals import Totals
from moeserve.telemetry.observer import LoadObserver

SECONDS_BETWEEN_TOTALS = 1.0

_TOTALS_DECODER = msgspec.msgpack.Decoder(Totals)


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of an HTTP process."""

    settings: ServerSettings
    engine: SharedEngine


def serve_from_processes(settings: ServerSettings, for_engine: Settings) -> None:
    """Start the engine in this process and the HTTP processes, and run them until SIGTERM or Ctrl-C.

    Raises:
        SettingsError, CheckpointError, EngineError: as for `serve`. HTTP processes that fail repeatedly are an
            EngineError.
    """
    assert settings.served_model_name is not None
    name = settings.served_model_name[0]
    with contextlib.closing(_bound(settings.host, settings.port)) as reserved, contextlib.ExitStack() as loading:
        settings = dataclasses.replace(settings, port=reserved.getsockname()[1])
        loading.enter_context(answering_while_loading(_listening(settings), settings))
        started = start_engine(for_engine, show_progress=True, reports_load=True)
        processes: list[WatchedProcess[ToHub]] = []

        def start_api_process(index: int) -> WatchedProcess[ToHub]:
            engine = SharedEngine(index=index, config=started.engine.config, num_blocks=started.engine.num_blocks)
            process = start_process(
                f"{__name__}:run",
                f"API process {index}",
                _Start(settings=settings, engine=engine),
                ToHub,
                # Use the same environment as ranks have, so that one fork server starts both.
                environment=environment_of_rank(engine.config, usable_cores()),
            )
            processes.append(process)
            return process

        try:
            hub = EngineHub(started.engine, started.observer, start_api_process, settings.api_server_count)

            def hand_over() -> None:
                """Stop answering while the model is loading, as soon as an HTTP process listens."""
                hub.has_listener.wait()
                loading.close()
                if not hub.has_ended:
                    announce(f"serving {name}", settings, reserved)

            handing_over = threading.Thread(target=hand_over)
            handing_over.start()
            try:
                with _draining_on_signals(hub):
                    hub.run()
            finally:
                hub.has_listener.set()
                handing_over.join()
        finally:
            end_all([process for process in processes if not process.channel.is_closed])
            started.observer.close()
            started.engine.shutdown()


def run(parent: Parent) -> None:
    """Run an HTTP process."""
    start = parent.config(_Start)
    drains: SimpleQueue[bool] = SimpleQueue()  # values of `Drain.at_once`
    engine = RemoteEngine(parent.channel(FromHub), start.engine, drains.put)
    is_listening = threading.Event()
    threading.Thread(target=_send_progress, args=(engine, is_listening), daemon=True).start()
    texts = read_texts(engine.config)
    is_first = start.engine.index == 0
    # The statistics of each process cover all processes, so only one process logs them.
    settings = start.settings if is_first else dataclasses.replace(start.settings, log_stats_interval=0.0)

    def others() -> list[Totals]:
        return [_TOTALS_DECODER.decode(note) for note in list(engine.notes.values())]

    llm = AsyncLLM.of_session(open_session(engine, LoadObserver(None, None), texts), texts)
    try:
        server, service = open_service(llm, settings, others)
        with contextlib.closing(_listening(settings)) as listener:
            is_listening.set()
            threading.Thread(target=_watch, args=(server, service, engine, drains), daemon=True).start()
            server.answer(listener)
    finally:
        llm.shutdown()


def _send_progress(engine: RemoteEngine, is_listening: threading.Event) -> None:
    """Report at intervals that this process is starting. Once it listens, report this, and return."""
    engine.send_progress(listens=False)
    while not is_listening.wait(SECONDS_BETWEEN_TOTALS):
        engine.send_progress(listens=False)
    engine.send_progress(listens=True)


def _watch(server: DrainingServer, service: Service, engine: RemoteEngine, drains: SimpleQueue[bool]) -> None:
    """Send this process's totals to the other processes at intervals. Shut the server down on request or failure."""
    while True:
        try:
            at_once = drains.get(timeout=SECONDS_BETWEEN_TOTALS)
        except Empty:
            engine.send_note(msgspec.msgpack.encode(service.own_totals))
            # If the engine's thread has failed, exit, so that another process replaces this one.
            server.should_exit |= not service.llm.is_running
        else:
            server.should_exit = True
            server.force_exit |= at_once


def _listening(settings: ServerSettings) -> socket.socket:
    """Return a socket that listens on the server's port beside the sockets of other processes."""
    listener = _bound(settings.host, settings.port)
    listener.listen(2048)
    return listener


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address that several processes can share."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise SettingsError(f"cannot listen on {host}, port {port}: {error}") from None
    return bound


@contextlib.contextmanager
def _draining_on_signals(hub: EngineHub) -> Iterator[None]:
    """On the first SIGTERM or Ctrl-C, let requests in flight finish. On the second, end them at once."""
    num_signals = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal num_signals
        num_signals += 1
        hub.drain(at_once=num_signals > 1)

    with ends_handled_by(handle):
        yield
