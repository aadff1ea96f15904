"""Checks of small shapes under NVIDIA's compute-sanitizer: out-of-bounds accesses, and races in shared memory.

Each check runs in a separate process under the tool, several times slower. Each tensor has its own CUDA allocation, so
that accesses beyond its end are detected. The check fails if the tool prints an error.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from moeserve.bench.gpu.parts import Item, Row, SecondsLeft, left_out
from moeserve.config.environment import environment_without

TOOL = "compute-sanitizer"
TOOL_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
MARK = "========="
NO_MEMORY_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # makes each tensor an allocation that the tool sees
# Racecheck does not support asynchronous copies, which these kernels do not use.
TOOLS: Mapping[str, Sequence[str] | None] = {"memcheck": None, "racecheck": ("norms", "pairs", "routing", "tokens")}
NEEDS_CACHE = "graphs"  # torch refuses to capture if tensors are allocated directly by CUDA
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


def find_tool() -> str | None:
    return shutil.which(TOOL) or shutil.which(TOOL, path=os.pathsep.join(TOOL_FOLDERS))


def sanitizer_items(seed: int, seconds_left: SecondsLeft) -> Iterator[Item]:
    from moeserve.bench.gpu.cases import CASES

    executable = find_tool()
    if executable is None:
        yield TOOL, lambda: [left_out(TOOL, f"{TOOL} is not installed (CUDA toolkit)")]
        return
    for tool, names in TOOLS.items():
        for name in [each for each in CASES if each != NEEDS_CACHE] if names is None else names:
            yield f"{tool}, {name}", functools.partial(run_under, executable, tool, name, seed, seconds_left)


def run_under(executable: str, tool: str, name: str, seed: int, seconds_left: SecondsLeft) -> Iterator[Row]:
    command = [executable, "--tool", tool, "--target-processes", "application-only", "--print-limit", "20"]
    command += [sys.executable, "-m", "moeserve.bench.gpu.sanitizer", name, f"--seed={seed}"]
    environment = environment_without(NO_MEMORY_CACHING) | {NO_MEMORY_CACHING: "1"}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds_left(), env=environment
        )
    except subprocess.TimeoutExpired:
        yield left_out(f"{tool}, {name}", "no time was left")
        return
    yield verdict(ended.stdout + ended.stderr, ended.returncode)


def verdict(output: str, exit_code: int) -> Row:
    """Return the row of a run under the tool, from its output and exit code."""
    lines = [line.removeprefix(MARK).strip() for line in output.splitlines() if line.startswith(MARK)]
    summaries = [int(match[1]) for match in map(SUMMARY.search, lines) if match]
    if not summaries:
        return {"status": "failed", "error": f"it printed no summary (exit code {exit_code})", "log": output[-2000:]}
    wrong = errors_of(lines) if sum(summaries) else []
    failed = bool(sum(summaries)) or exit_code != 0
    row: Row = {"status": "failed" if failed else "passed", "num_errors": sum(summaries), "wrong": wrong}
    return row | ({"log": output[-2000:]} if failed else {"lines": ["no errors"]})


def errors_of(lines: Sequence[str]) -> list[str]:
    """Return each kind of error with its kernel: the line before a line that begins with "at" or "and"."""
    found: dict[str, None] = {}
    for error, place in itertools.pairwise(lines):
        match = re.match(r"(?:at|and|in) .*?(\w+)(?:\+0x|\()", place)
        if match:
            found[f"{error} ({match[1]})"] = None
    return list(found)[:20]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one check with small shapes in this process, which runs under the tool."""
    from moeserve.bench.gpu.items import Setting
    from moeserve.triton_kernels.device import is_interpreted

    parser = argparse.ArgumentParser(prog="python -m moeserve.bench.gpu.sanitizer", description="Run by `items.py`.")
    parser.add_argument("check")
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args(arguments)
    setting = Setting(options.seed, lambda: 1.0, on_cpu=is_interpreted())
    with setting.installed():
        row = setting.check(options.check, is_small=True)
    print(row.get("lines"), row.get("wrong"), row.get("error"), flush=True)
    return 1 if row["status"] == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
