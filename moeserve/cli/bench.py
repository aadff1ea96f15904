"""`moeserve bench`."""

from __future__ import annotations

import argparse
from typing import get_args

from moeserve.bench import commands
from moeserve.cli.parser import Parser


def add_arguments(command: Parser) -> None:
    names = get_args(commands.CommandName)
    command.add_argument("name", choices=names, metavar="NAME", help=f"the benchmark [{', '.join(names)}]")
    command.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its flags; see `moeserve bench NAME --help`"
    )


def run(options: argparse.Namespace) -> None:
    commands.run(options.name, options.arguments)
