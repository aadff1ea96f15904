"""The command line. Each subcommand is one file of this package, imported only when it is used."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Collection, Sequence

from moeserve.cli.completion import SHELLS, completion_script
from moeserve.cli.encoding import accept_all_text, use_utf8_in_ascii_locale
from moeserve.cli.parser import Parser
from moeserve.cli.sources import add_sources
from moeserve.errors import MoeserveError
from moeserve.processes.interpreter import working_folder
from moeserve.processes.logs import start_log
from moeserve.processes.streams import open_closed_streams

COMMANDS = {
    "generate": "Generate text for a prompt and print it as it is generated.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Serve a model over HTTP, with OpenAI's API.",
    "inspect": "Describe a checkpoint and the memory it needs, without loading it.",
    "verify": "Compare a model's tokens and log-probabilities with those of transformers.",
    "plan": "List the parallel layouts of a checkpoint, and estimate their performance on given hardware.",
    "simulate": "Simulate serving recorded traffic on given hardware, in virtual time.",
    "viz": "Show recorded loads of experts and ranks as a table or a picture.",
    "quantize": "Write a copy of a checkpoint in 4 bits, which loads without a setting.",
    "upcycle": "Convert a dense Llama-style checkpoint into a Mixtral one.",
    "launch": "Start a Ray cluster on several hosts and run a command on it.",
    "bench": "Run a benchmark.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, or 1 after an error that was reported. An invalid command line exits with status 2.
    """
    if arguments is None:
        use_utf8_in_ascii_locale()
    open_closed_streams()
    accept_all_text()
    os.chdir(working_folder())  # libraries fail in a folder that was deleted
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    named = [argument for argument in arguments if not argument.startswith("-")]
    options, unknown = _parser(named[:1]).parse_known_args(arguments)
    if options.print_completion is not None:
        return _print_completion(options.print_completion)
    if "parser" not in options:
        _parser(()).error(f"a command is missing: {', '.join(COMMANDS)}; see --help")
    command: Parser = options.parser
    if unknown:
        command.refuse(next((argument for argument in unknown if argument.startswith("-")), unknown[0]))
    start_log(logging.INFO if options.verbose else logging.WARNING)
    try:
        if command.settings:
            add_sources(options, command.settings)
        return int(options.run(options) or 0)
    except MoeserveError as error:
        if options.verbose:
            logging.exception("failed")
        print(f"moeserve: {command.as_flags(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of standard output has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _print_completion(shell: str) -> int:
    """Print a shell's script, and return the exit status."""
    try:
        print(completion_script(_parser(COMMANDS), shell))
    except MoeserveError as error:
        print(f"moeserve: {error}", file=sys.stderr)
        return 1
    return 0


def _parser(chosen: Collection[str]) -> Parser:
    """Return a parser that lists all commands, and has the flags of the chosen commands."""
    from moeserve import __version__

    parser = Parser(prog="moeserve", description="Inference engine for mixture-of-experts language models.")
    parser.add_argument("--version", action="version", version=f"moeserve {__version__}")
    parser.add_argument("--verbose", "-v", action="store_true", help=argparse.SUPPRESS)  # may also precede the command
    parser.add_argument(
        "--print-completion",
        choices=SHELLS,
        metavar="SHELL",
        help=f"print the script for completion in a shell [{', '.join(SHELLS)}]",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command: Parser = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(parser=command)
        if name in chosen:
            command.add_argument(
                "--verbose", "-v", action="store_true", default=argparse.SUPPRESS, help="log what the engine does"
            )
            module = importlib.import_module(f"moeserve.cli.{name}")
            command.set_defaults(run=module.run)
            module.add_arguments(command)
    return parser
