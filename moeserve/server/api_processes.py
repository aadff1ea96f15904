"""Several processes that speak HTTP for one engine.

The engine stays in the process that starts them, which passes requests and tokens on; see `engine/hub.py`. They all
listen on one port, and the system shares connections out between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from moeserve.api.async_llm import AsyncLLM
from moeserve.api.startup import StartedEngine, open_session, read_texts, start_engine
from moeserve.config.environment import environment_of_rank
from moeserve.config.validation import parse_settings
from moeserve.engine.hub import EngineHub
from moeserve.engine.protocol import FromHub, SharedEngine, ToHub
from moeserve.engine.remote import RemoteEngine
from moeserve.errors import SettingsError
from moeserve.machine import usable_cores
from moeserve.processes.child import Parent
from moeserve.processes.local import start_process
from moeserve.processes.supervision import WatchedProcess, end_all
from moeserve.server.http_server import DrainingServer, announce
from moeserve.server.settings import ServerSettings
from moeserve.server.totals import Totals
from moeserve.telemetry.observer import LoadObserver

SECONDS_BETWEEN_TOTALS = 1.0
SECONDS_TO_END = 5.0


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a process that speaks HTTP."""

    settings: ServerSettings
    engine: SharedEngine


def serve_from_processes(settings: ServerSettings, engine_settings: Mapping[str, Any], listener: socket.socket) -> None:
    """Start the engine here and processes that speak HTTP, and run them until SIGTERM or Ctrl-C.

    Args:
        listener: a socket with the server's address. It is closed, and the processes listen there.

    Raises:
        SettingsError, CheckpointError, EngineError: as `serve`; a process has failed.
    """
    started = start_engine(parse_settings(dict(engine_settings)), show_progress=True)
    processes: list[WatchedProcess[ToHub]] = []
    try:
        with _reserved(listener) as (host, port):
            settings = dataclasses.replace(settings, host=host, port=port)
            for index in range(settings.api_server_count):
                processes.append(_start_process(index, settings, started))
            hub = EngineHub(started.engine, started.observer, processes)
            with _draining_on_signals(hub):
                hub.run()
    finally:
        end_all(processes, patience_s=SECONDS_TO_END)
        started.observer.close()
        started.engine.shutdown()


def run(parent: Parent) -> None:
    """Serve HTTP from this process."""
    start = parent.config(_Start)
    must_end = threading.Event()
    engine = RemoteEngine(parent.channel(FromHub), start.engine, must_end.set)
    texts = read_texts(engine.config)
    llm = AsyncLLM.of_session(open_session(engine, LoadObserver(None, None), texts), texts)
    try:
        server = DrainingServer(
            llm, start.settings, lambda: [_TOTALS.decode(note) for note in list(engine.notes.values())]
        )
        with contextlib.closing(_bound(start.settings.host, start.settings.port)) as listener:
            listener.listen(2048)
            if start.engine.index == 0:
                announce(start.settings, listener)
            threading.Thread(target=_share_totals, args=(server, engine, must_end), daemon=True).start()
            server.answer(listener)
    finally:
        llm.shutdown()


_TOTALS = msgspec.msgpack.Decoder(Totals)


def _share_totals(server: DrainingServer, engine: RemoteEngine, must_end: threading.Event) -> None:
    """Send the totals of this process to the others now and then, and end the server when all are to end."""
    while not must_end.wait(SECONDS_BETWEEN_TOTALS):
        engine.send_note(msgspec.msgpack.encode(server.service.own_totals))
    server.should_exit = True


def _start_process(index: int, settings: ServerSettings, started: StartedEngine) -> WatchedProcess[ToHub]:
    engine = SharedEngine(index=index, config=started.engine.config, num_blocks=started.engine.num_blocks)
    return start_process(
        f"{__name__}:run",
        f"API process {index}",
        _Start(settings=settings, engine=engine),
        ToHub,
        environment=environment_of_rank(engine.config, usable_cores()),  # as ranks have it: then they fork together
    )


@contextlib.contextmanager
def _reserved(listener: socket.socket) -> Iterator[tuple[str, int]]:
    """Close a listener, and keep its address for several sockets that listen there."""
    host, port = listener.getsockname()[:2]
    listener.close()
    with contextlib.closing(_bound(host, port)):
        yield host, port


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket with an address that several may have."""
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
    """Let requests in flight finish after the first SIGTERM or Ctrl-C. The second one ends everything."""

    def handle(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.default_int_handler)
        hub.drain()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
