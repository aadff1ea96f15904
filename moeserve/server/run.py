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
from moeserve.config.settings import DEFAULT_LOAD_WINDOW
from moeserve.config.validation import parse_settings
from moeserve.models import registry
from moeserve.models.model_files import find_model
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
    find_parser(settings.parser_name, model_type="", chat_template=None)  # fail before the model is loaded
    settings.read_chat_template()
    with contextlib.closing(listen(settings)) as listener:  # fail before loading if the port is in use
        engine_settings = _with_expert_load(_in_own_processes(engine_settings))
        if settings.served_model_name is None:
            settings = dataclasses.replace(
                settings, served_model_name=[default_model.model_name(engine_settings.get("model"))]
            )
        if settings.api_server_count == 1:
            with answering_while_loading(listener.dup(), settings):
                llm = AsyncLLM(**engine_settings)
            _serve_here(llm, settings, listener)
            return
    if settings.response_store:
        logger.warning(
            "each of the %d API processes stores its own responses, so clients find them only over the same "
            "connection (previous_response_id, item_reference); use one process where that matters",
            settings.api_server_count,
        )
    serve_from_processes(settings, engine_settings)


def _serve_here(llm: AsyncLLM, settings: ServerSettings, listener: socket.socket) -> None:
    """Serve HTTP in this process until SIGTERM or Ctrl-C, and then shut down the engine."""
    try:
        server, service = open_service(llm, settings)
        announce(f"serving {service.model_names[0]}", settings, listener)
        server.answer(listener)
    finally:
        llm.shutdown()


def _in_own_processes(engine_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's settings, changed to run a single rank in a process, where it does not share HTTP's GIL."""
    parallel = parse_settings(engine_settings).parallel
    chooses_mp = parallel.executor == "auto" and parallel.num_ranks == 1
    return {**engine_settings, "executor": "mp"} if chooses_mp else dict(engine_settings)


def _with_expert_load(engine_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's settings, with periodic load windows if the model has experts."""
    model = parse_settings(engine_settings).model
    facts = default_model.FACTS
    if model.model is not None:
        files = find_model(model.model, revision=model.revision, download_dir=model.download_dir)
        facts = registry.read_facts(files.describe(), hf_overrides=model.hf_overrides)
    window = {"expert_load_window": DEFAULT_LOAD_WINDOW} if facts.num_sparse_layers else {}
    return {**window, **engine_settings}
