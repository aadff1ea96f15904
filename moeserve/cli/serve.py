"""`moeserve serve`."""

from __future__ import annotations

import argparse

from moeserve.cli.parser import Parser, add_engine_flags, add_flags, engine_settings, given
from moeserve.errors import missing_extra
from moeserve.server.settings import ServerSettings


def add_arguments(command: Parser) -> None:
    command.usage = "moeserve serve [MODEL] [flags]"
    add_flags(command.add_argument_group(ServerSettings.__doc__), ServerSettings)
    add_engine_flags(command)


def run(options: argparse.Namespace) -> None:
    settings = engine_settings(options)
    try:
        from moeserve.server.run import serve
    except ImportError as error:
        raise missing_extra("the server needs FastAPI and uvicorn", "server", error) from None
    serve(ServerSettings(**given(options, ServerSettings)), settings)
