"""`moeserve bench`."""

from __future__ import annotations

import argparse

from moeserve.bench import commands
from moeserve.cli.parser import Parser


def add_arguments(command: Parser) -> None:
    command.usage = "moeserve bench [NAME] [flags of the benchmark]"
    names = command.add_subparsers(
        title="benchmarks", description="`moeserve bench NAME --help` lists the flags of one.", metavar="NAME"
    )
    command.set_defaults(name=None)
    for name in commands.MODULES:
        benchmark = names.add_parser(name, help=commands.summary(name), add_help=False, prefix_chars="\0")
        benchmark.add_argument("arguments", nargs=argparse.REMAINDER)
        benchmark.set_defaults(name=name)


def run(options: argparse.Namespace) -> int:
    if options.name is None:
        options.parser.print_help()
        return 0
    return commands.run(options.name, options.arguments)
