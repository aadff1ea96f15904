"""`moeserve --print-completion SHELL`: a script with which a shell completes commands, flags and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from moeserve.errors import missing_extra

SHELLS = ("bash", "zsh", "tcsh")
FOLDERS, FILES = frozenset(["model", "model_folder", "tokenizer"]), frozenset(["config"])


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a parser that has the flags of all commands.

    Raises:
        SettingsError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise missing_extra("completion needs shtab", "completion", error) from None
    for action in _actions(parser):
        if action.dest in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest in FILES or action.dest.endswith(("_file", "_certfile", "_keyfile")):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
