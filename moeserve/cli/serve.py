"""`moeserve serve`."""

from __future__ import annotations

import argparse
from typing import Any

from moeserve.cli.parser import Parser, add_engine_flags, engine_settings, given
from moeserve.config.validation import parse_settings
from moeserve.errors import SettingsError, missing_extra
from moeserve.executor.hosts.options import host_options
from moeserve.processes.logs import start_log
from moeserve.server.settings import RouterSettings, ServerSettings

# The server's settings that a router has too.
SETTINGS_OF_ROUTER = frozenset(
    [
        "host",
        "port",
        "max_body_bytes",
        "max_bytes_in_flight",
        "keep_alive_timeout",
        "allowed_host",
        "drain_timeout",
        "cors_origin",
        "ssl_certfile",
        "ssl_keyfile",
        "log_level",
        "log_format",
    ]
)


def add_arguments(command: Parser) -> None:
    command.usage = "moeserve serve [MODEL] [flags]\n       moeserve serve --prefill URL --decode URL [flags]"
    command.add_settings(ServerSettings, RouterSettings)
    add_engine_flags(command)


def run(options: argparse.Namespace) -> None:
    _find_model(options)
    settings, engine = ServerSettings(**given(options, ServerSettings)), engine_settings(options)
    start_log(settings.log_level.upper(), settings.log_format, force=True)
    routes = given(options, RouterSettings)
    if routes:
        others = [name for name in given(options, ServerSettings) if name not in SETTINGS_OF_ROUTER]
        _require_router(routes, [*others, *engine])
    hosts = None if routes else host_options(parse_settings(engine).parallel)
    try:
        if hosts is not None and hosts.number:
            from moeserve.executor.hosts.agent import Agent

            Agent(hosts).run()
        elif routes:
            from moeserve.server.router_server import route

            route(settings, RouterSettings(**routes))
        else:
            from moeserve.server.run import serve

            serve(settings, engine)
    except ImportError as error:
        raise missing_extra("the server needs FastAPI, uvicorn and others", "server", error) from None


def _find_model(options: argparse.Namespace) -> None:
    """Join the names of all --served-model-name flags.

    If no model is given and the last of these flags has several names, its last name is the model.
    """
    if "served_model_name" in options.on_command_line:
        groups: list[list[str]] = options.served_model_name
        if "model" not in options and len(groups[-1]) > 1:
            options.model = groups[-1].pop()
        options.served_model_name = [name for names in groups for name in names]


def _require_router(routes: dict[str, Any], others: list[str]) -> None:
    """Raise SettingsError for a router without servers, or with settings that need an engine."""
    for name in ("prefill", "decode"):
        if name not in routes:
            raise SettingsError(f"a router needs --{name} URL; give --prefill and --decode, each at least once")
    if others:
        flag = "MODEL" if others[0] == "model" else f"--{others[0].replace('_', '-')}"
        raise SettingsError(f"{flag} needs an engine; give it to the servers behind the router")
