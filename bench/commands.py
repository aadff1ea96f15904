"""The benchmarks of `moeserve bench NAME`. Each module has a `main(arguments)`, which parses its own options."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Literal, get_args

CommandName = Literal["throughput", "latency", "moe", "dispatch", "startup", "serve", "report"]
COMMAND_NAMES: tuple[CommandName, ...] = get_args(CommandName)
MODULES = {"dispatch": "parallel"}  # modules whose name differs from the command's


def run(name: CommandName, arguments: Sequence[str]) -> None:
    """Run one benchmark. Only its module is imported."""
    importlib.import_module(f"moeserve.bench.{MODULES.get(name, name)}").main(arguments)
