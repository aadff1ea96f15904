"""The HTTP server of a process that has an engine, or shares one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from moeserve.api.async_llm import AsyncLLM
from moeserve.errors import MoeserveError
from moeserve.server.app import build_app
from moeserve.server.http_server import DrainingServer, budget_of
from moeserve.server.keys import Keys
from moeserve.server.service import Service
from moeserve.server.settings import ServerSettings
from moeserve.server.totals import Totals
from moeserve.server.tracing import open_tracing

OTHER_CONNECTIONS = 4096  # number of connections allowed beyond those with running or waiting outputs


def open_service(
    llm: AsyncLLM, settings: ServerSettings, others: Callable[[], Iterable[Totals]] = tuple
) -> tuple[DrainingServer, Service]:
    """Return the HTTP server of a model, and its service.

    Args:
        others: see `Service`.

    Raises:
        SettingsError: a setting cannot be used.
    """
    assert settings.served_model_name is not None
    service = Service(
        llm,
        settings.served_model_name,
        max_waiting=settings.max_waiting,
        num_processes=settings.api_server_count,
        parser=settings.parser_name,
        chat_template=settings.read_chat_template(),
        trusts_templates=settings.trust_request_chat_template,
        is_strict=settings.strict_requests,
        others=others,
        tracing=open_tracing(settings.otlp_traces_endpoint),
    )
    threading.Thread(target=_render_once, args=(service,), daemon=True).start()
    budget = budget_of(settings)
    keys = Keys.read(settings.api_key or (), settings.api_key_file, settings.admin_key or ())
    app = build_app(service, settings, keys, budget)
    return DrainingServer(app, service, settings, budget, service.admission.max_outputs + OTHER_CONNECTIONS), service


def _render_once(service: Service) -> None:
    """Start the template process and compile the chat template before the first request needs it."""
    with contextlib.suppress(MoeserveError):
        service.llm.chat_prompt([{"role": "user", "content": ""}], chat_template=service.chat_template)
