"""The benchmarks by name, as `moeserve bench NAME` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

CommandName = Literal["throughput", "latency", "moe", "dispatch", "startup", "report"]


def run(name: CommandName, arguments: Sequence[str]) -> None:
    """Runs one benchmark; each reads its arguments itself. Only that one is imported."""
    match name:
        case "throughput":
            from moeserve.bench import throughput

            throughput.main(arguments)
        case "latency":
            from moeserve.bench import latency

            latency.main(arguments)
        case "moe":
            from moeserve.bench import moe

            moe.main(arguments)
        case "dispatch":
            from moeserve.bench import parallel

            parallel.main(arguments)
        case "startup":
            from moeserve.bench import startup

            startup.main(arguments)
        case "report":
            from moeserve.bench import report

            report.main(arguments)
