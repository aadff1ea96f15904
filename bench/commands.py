"""The benchmarks of `moeserve bench NAME`. The module of each has a `main(arguments)` and says what it measures."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

MODULES = {
    "throughput": "throughput",
    "moe": "moe",
    "kernels": "kernels",
    "compare": "compare",
    "servers": "servers",
    "serve": "serve",
    "day": "day",
    "startup": "startup",
    "quality": "quality",
    "ranks": "ranks",
    "rebalance": "rebalance",
    "expert_memory": "expert_memory",
    "rollout_mismatch": "rollout_mismatch",
    "gpu": "gpu.run",
    "gpu_page": "gpu.page",
    "host_step": "host_step",
    "checkpoint": "checkpoints",
    "peers": "peers.install",
    "report": "report",
}


def summary(name: str) -> str:
    """Return the first line of the docstring of a benchmark's module, which is not imported."""
    path = Path(__file__).parent / f"{MODULES[name].replace('.', '/')}.py"
    return path.read_text(encoding="utf-8").removeprefix('"""').splitlines()[0].removesuffix('"""')


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one benchmark, and return its exit status. Only its module is imported."""
    return importlib.import_module(f"moeserve.bench.{MODULES[name]}").main(arguments) or 0
