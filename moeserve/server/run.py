"""Run the server: start the engine, listen, and finish requests before the end."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn

from moeserve.api import default_model
from moeserve.api.async_llm import AsyncLLM
from moeserve.config.settings import DEFAULT_LOAD_WINDOW
from moeserve.errors import SettingsError
from moeserve.models import registry
from moeserve.server.app import build_app
from moeserve.server.keys import Keys
from moeserve.server.service import Service
from moeserve.server.settings import ServerSettings


def serve(settings: ServerSettings, engine_settings: Mapping[str, Any]) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Args:
        engine_settings: arguments of `AsyncLLM`.

    Raises:
        SettingsError: a setting of the server or the engine cannot be used.
        CheckpointError, EngineError: as `LLM`.
    """
    keys = Keys.read(settings.api_key or (), settings.api_key_file)
    listener = _listen(settings)  # before the model is loaded: the port may be in use
    with contextlib.closing(listener):
        llm = AsyncLLM(**_with_expert_load(_in_own_processes(engine_settings)))
        try:
            names = settings.served_model_name or [_name(engine_settings.get("model"))]
            service = Service(llm, names, max_waiting=settings.max_waiting, parser=settings.answer_parser)
            app = build_app(service, settings, keys)
            config = uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
            )
            scheme = "http" if settings.ssl_certfile is None else "https"
            host, port = listener.getsockname()[:2]
            print(f"serving {names[0]} at {scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1", file=sys.stderr)
            with _ends_without_error():
                _DrainingServer(config, service, settings.drain_timeout).run(sockets=[listener])
        finally:
            llm.shutdown()


class _DrainingServer(uvicorn.Server):
    """Answers requests in flight before it closes connections."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._service, self._drain_timeout_s = service, drain_timeout_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.drain(self._drain_timeout_s)
        await super().shutdown(sockets)


@contextlib.contextmanager
def _ends_without_error() -> Any:
    """Ignore the signals that uvicorn raises again after it has handled them, so that the process exits with 0."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(settings: ServerSettings) -> socket.socket:
    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        raise SettingsError("TLS needs both ssl_certfile and ssl_keyfile")
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(settings, name)
        if path is not None and not Path(path).is_file():
            raise SettingsError(f"{name}={path!r} is no file")
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise SettingsError(f"cannot listen on {settings.host}, port {settings.port}: {error}") from None


def _in_own_processes(engine_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's settings, with a single rank in a process too: it then shares no interpreter with HTTP."""
    if engine_settings.get("executor", "auto") == "auto" and not _has_several_ranks(engine_settings):
        return {**engine_settings, "executor": "mp"}
    return dict(engine_settings)


def _with_expert_load(engine_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's settings, by which it reports the load of experts now and then if the model has experts."""
    folder = engine_settings.get("model")
    facts = default_model.FACTS if folder is None else registry.read_facts(folder)
    window = {"expert_load_window": DEFAULT_LOAD_WINDOW} if facts.num_sparse_layers else {}
    return {**window, **engine_settings}


def _has_several_ranks(engine_settings: Mapping[str, Any]) -> bool:
    names = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
    return any(engine_settings.get(name, 1) != 1 for name in names)


def _name(model: str | None) -> str:
    return default_model.NAME if model is None else Path(model).resolve().name
