"""Checks and measures everything that needs a GPU.

Each part gets its share of the time, and later parts get what earlier ones leave. Items that are left out for lack of
time are reported. Each result is written at once as a line of JSON, so that an interrupted run leaves a valid file. A
run with the same file, GPU and seed continues it: items that have ended are not repeated. With `--retry`, failed items
run again, and checks that passed at another commit count. With `--rehearse`, everything runs on a CPU at small sizes.
The exit code is 1 if anything has failed; missed bars do not count as failures.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.bench.gpu.page import current_rows, page, row_text
from moeserve.bench.gpu.parts import COMMAND, PARTS, Job, Part, Row, run_part
from moeserve.bench.harness import add_choices, at_least, make_parser, save, show
from moeserve.config.environment import environment_without
from moeserve.machine import installed_version, usable_cores

SECONDS = sum(part.seconds for part in PARTS.values())
REHEARSAL_SECONDS = 900  # of each part
LEAST_VERSIONS = {"torch": (2, 11), "triton": (3, 5), "transformers": (5, 0)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("gpu", __doc__, rounds=None, threads=False)
    add_choices(parser, "--only", PARTS, "all parts")
    parser.add_argument("--seconds", type=at_least(1), help=f"time of all chosen parts (default: {SECONDS} for all)")
    parser.add_argument("--match", default="", metavar="TEXT", help="only items whose name contains TEXT")
    parser.add_argument("--retry", action="store_true", help="run failed items of the file again")
    parser.add_argument("--seed", type=at_least(0), help="of random inputs (default: the file's, or a new one)")
    parser.add_argument("--cache", type=Path, help="folder of Triton's cache (default: TRITON_CACHE_DIR, or Triton's)")
    parser.add_argument("--commit", help="the commit of installed files (default: that of this checkout)")
    parser.add_argument("--under", default="", metavar="COMMAND", help="run small checks under compute-sanitizer")
    parser.add_argument("--rehearse", action="store_true", help="run small sizes on a CPU in Triton's interpreter")
    options = parser.parse_args(arguments)
    parts = [PARTS[name] for name in options.only or PARTS]
    whole = sum(part.seconds for part in parts)
    seconds = REHEARSAL_SECONDS * len(parts) if options.rehearse else whole
    parts = [replace(part, seconds=(options.seconds or seconds) * part.seconds / whole) for part in parts]
    if reason := why_not(needs_gpu=not options.rehearse and any(part.needs_gpu for part in parts)):
        print(f"error: {reason}", file=sys.stderr)
        return 1
    if options.cache is not None:
        from moeserve.bench.gpu.launches import relocate

        relocate(options.cache)
    return run_parts(options, parts)


def run_parts(options: argparse.Namespace, parts: Sequence[Part]) -> int:
    """Run parts in their order, and return the exit code."""
    from moeserve.bench.gpu.limits import gpu_environment

    started = time.monotonic()
    environment = gpu_environment(options.commit, has_gpu=count_gpus() > 0 and not options.rehearse)
    identity, commit = [environment["gpu"]["name"], options.rehearse], environment["commit"]
    earlier = earlier_lines(options.json, identity, options.seed)
    seed = earlier[-1]["seed"] if earlier else options.seed
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    common: Row = {"benchmark": "gpu", "identity": identity, "seed": seed, "commit": commit}
    common["run"] = max((line["run"] for line in earlier), default=0) + 1
    lines: list[Row] = []

    def write(line: Row) -> None:
        lines.append(common | line)
        save(options.json, lines[-1:])

    def add(part: str, row: Row) -> None:
        write({"part": part, "kind": "finished" if "finished" in row else "row"} | row)
        if "finished" not in row:
            show(row_text(row))

    show(f"{environment['gpu']}, {environment['versions']}\nseed {seed}")
    write({"kind": "start", "environment": environment})
    job = Job("", seed, options.rehearse, options.rehearse or bool(options.under), options.match)
    later = sum(part.seconds for part in parts)
    ends_at = started + later
    # The processes of a part run `COMMAND` unless another program starts them.
    under: dict[str, Any] = {"command": [*shlex.split(options.under), *COMMAND]} if options.under else {}
    for part in parts:
        later -= part.seconds
        budget = ends_at - later - time.monotonic()
        finished = finished_items(earlier, part.name, None if options.retry and not part.is_timed else commit)
        if options.retry:
            finished -= {row["item"] for row in current_rows(earlier) if row["status"] == "failed"}
        show(
            f"\n{part.name}: {budget:.0f} s at most"
            + (f", {len(finished)} items have ended before" if finished else "")
        )
        # The interpreter is slow.
        most = max(part.item_seconds, budget) if options.rehearse else part.item_seconds
        part = replace(part, num_processes=min(part.num_processes, usable_cores()), item_seconds=most)
        of_part = replace(job, part=part.name, finished=tuple(sorted(finished)))
        environment_of_part = environment_of(of_part, options.cache)
        run_part(part, budget, of_part, functools.partial(add, part.name), environment=environment_of_part, **under)
    passed = not any(row["status"] == "failed" for row in current_rows([*earlier, *lines]))
    write({"kind": "end", "passed": passed, "seconds": time.monotonic() - started, "environment": environment})
    show(f"\n{page([*earlier, *lines])}")
    return 0 if passed else 1


def environment_of(job: Job, cache: Path | None) -> dict[str, str]:
    """Return the environment of a part's processes. Compilation uses no interpreter, and a rehearsal no GPU."""
    environment = environment_without("TRITON_INTERPRET")
    if cache is not None:  # a folder to be carried: without intermediate code it has a fiftieth of the size
        environment |= {"TRITON_CACHE_DIR": str(cache.resolve()), "TRITON_STORE_BINARY_ONLY": "1"}
    if job.on_cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": ""} | ({} if job.part == "compile" else {"TRITON_INTERPRET": "1"})
    return environment


def earlier_lines(path: Path | None, identity: list[Any], seed: int | None) -> list[Row]:
    """Return the lines of the runs in a file that this run continues: same GPU, kind of run and seed.

    A line that was cut off when the machine stopped is removed from the file.
    """
    if path is None or not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    lines = [line for line in lines if line.get("benchmark") == "gpu" and line["identity"] == identity]
    seed = lines[-1]["seed"] if lines and seed is None else seed
    return [line for line in lines if line["seed"] == seed]


def finished_items(lines: Sequence[Row], part: str, commit: str | None) -> set[str]:
    """Return the items of a part that have ended, at this commit or, with None, at any."""
    ended = (line for line in lines if line["kind"] == "finished" and line["part"] == part)
    return {line["finished"] for line in ended if commit in (None, line["commit"])}


def why_not(needs_gpu: bool) -> str | None:
    """Return the reason why the benchmark cannot run here, in one sentence; None if it can."""
    for name, least in LEAST_VERSIONS.items():
        version = installed_version(name)
        if tuple(map(int, re.findall(r"\d+", version or "")[:2])) < least:
            needed = f"the GPU benchmark needs {name} >= {'.'.join(map(str, least))}"
            return f"{name} {version} is too old; {needed}" if version else f"{name} is not installed; {needed}"
    if needs_gpu and not count_gpus():
        return "torch sees no GPU (torch.cuda.is_available())"
    return None


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    sys.exit(main())
