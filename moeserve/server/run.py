"""`serve`: starts the engine and the HTTP server, in one process or in several."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
from collections.abc import Mapping
from typing import Any

from moeserve.api import default_model
from moeserve.api.async_llm import AsyncLLM
from moeserve.api.startup import start_engine
from moeserve.config.settings import Settings
from moeserve.config.validation import parse_settings
from moeserve.parsers.families import find_parser
from moeserve.server.api_processes import serve_from_processes
from moeserve.server.engine_server import open_service
from moeserve.server.http_server import announce, listen
from moeserve.server.keys import Keys
from moeserve.server.loading import answering_while_loading
from moeserve.server.settings import ServerSettings
from moeserve.server.tracing import check_tracing

logger = logging.getLogger(__name__)


def serve(settings: ServerSettings, engine_settings: Mapping[str, Any]) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Args:
        engine_settings: arguments of `AsyncLLM`.

    Raises:
        SettingsError: a setting of the server or the engine cannot be used.
        CheckpointError, EngineError: as for `LLM`.
    """
    Keys.read(settings.api_key or (), settings.api_key_file, settings.admin_key or ())
    check_tracing(settings.otlp_traces_endpoint)
    find_parser(settings.parser_name, model_type="", chat_template=None)  # raise errors before the model is loaded
    settings.read_chat_template()
    with contextlib.closing(listen(settings)) as listener:  # if the port is in use, raise the error before loading
        for_engine = _in_own_processes(parse_settings(engine_settings))
        settings.check_rl(for_engine.model.rl)
        if settings.rl_without_key:
            logger.warning(
                "rl_without_key: every program that reaches %s:%d can pause the engine and replace its weights, with "
                "/pause, /update_weights and the other routes for trainers",
                *listener.getsockname()[:2],
            )
        if settings.served_model_name is None:
            name = default_model.model_name(for_engine.model.model)
            settings = dataclasses.replace(settings, served_model_name=[name])
        if settings.api_server_count == 1:
            with answering_while_loading(listener.dup(), settings):
                started = start_engine(for_engine, show_progress=True, reports_load=True)
                llm = AsyncLLM.of_session(started.open_session(), started.texts)
            _serve_here(llm, settings, listener)
            return
    if settings.response_store:
        logger.warning(
            "each of the %d API processes stores its own responses, so clients find them only over the same "
            "connection (previous_response_id, item_reference); use one process where that matters",
            settings.api_server_count,
        )
    serve_from_processes(settings, for_engine)


def _serve_here(llm: AsyncLLM, settings: ServerSettings, listener: socket.socket) -> None:
    """Serve HTTP in this process until SIGTERM or Ctrl-C. Then shut down the engine."""
    try:
        server, service = open_service(llm, settings)
        server.answer(listener, lambda: announce(f"serving {service.model_names[0]}", settings, listener))
    finally:
        llm.shutdown()


def _in_own_processes(settings: Settings) -> Settings:
    """Return the engine's settings, changed so that even a single rank runs in its own process, with its own GIL."""
    parallel = settings.parallel
    if parallel.executor != "auto" or parallel.num_ranks != 1:
        return settings
    return dataclasses.replace(settings, parallel=dataclasses.replace(parallel, executor="mp"))
