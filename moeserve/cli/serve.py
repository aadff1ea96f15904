"""`moeserve serve`."""

from __future__ import annotations

import argparse
import logging

from moeserve.cli.parser import Parser, add_flags, given
from moeserve.config.settings import Settings
from moeserve.config.vllm_names import VllmSettings
from moeserve.errors import missing_extra
from moeserve.server.settings import ServerSettings


def add_arguments(command: Parser) -> None:
    command.usage = "moeserve serve [MODEL] [flags]"
    command.add_argument("model_folder", nargs="?", metavar="MODEL", help="the same as --model")
    for group in (ServerSettings, *Settings.groups().values(), VllmSettings):
        add_flags(command.add_argument_group(group.__doc__), group)


def run(options: argparse.Namespace) -> None:
    if options.model_folder is not None and "model" in options:
        options.parser.error(f"MODEL={options.model_folder} and --model={options.model} are both given; give one")
    engine_settings = given(options, *Settings.groups().values(), VllmSettings)
    if options.model_folder is not None:
        engine_settings["model"] = options.model_folder
    try:
        from moeserve.server.run import serve
    except ImportError as error:
        raise missing_extra("the server needs FastAPI and uvicorn", "server", error) from None
    logging.getLogger("moeserve.access").setLevel(logging.INFO)
    serve(ServerSettings(**given(options, ServerSettings)), engine_settings)
