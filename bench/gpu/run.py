"""Checks and measures everything that needs a GPU.

    python -m moeserve.bench.gpu.run [--json PATH] [--only PART] [--seconds 480] [--cache FOLDER]

- *compile*: all kernels, in parallel (`compiled.py`). Needs no GPU: the folder may come from another machine.
- *sanitizer*: small shapes under compute-sanitizer (`sanitizer.py`).
- *checks*: every operation of our kernels against torch in float32, on new random inputs (`cases.py`).
- *engine*: greedy tokens against those of transformers on this GPU (`engine.py`).
- *kernels*: times under graph replay compared with this GPU's measured limits, torch and libraries (`kernels.py`).
- *throughput*: tokens per second of whole models with random weights, and a profile of steps (`throughput.py`).
- *ranks*, with several GPUs: tokens on two ranks, with each dispatcher and layout.

Each part has a fraction of the time and its own processes (`parts.py`). Items that are skipped for lack of time are
reported. Each result is written at once as a line of JSON, so an interrupted run leaves a valid file. A run with the
same file on the same GPU and commit continues it: completed items are not repeated. With `--rehearse`, everything runs
on a CPU at small sizes (`items.py`). The exit code is 1 if anything has failed; missed bars do not count as failures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moeserve.bench.gpu.page import page, row_text
from moeserve.bench.gpu.parts import PARTS, PROCESS_OF, Part, Row, run_part
from moeserve.bench.harness import at_least, make_parser, read_jsonl, save, show
from moeserve.machine import installed_version, usable_cores

MAX_PROCESSES = 16  # maximum processes of a part
RESERVED_SHARE = 0.03  # fraction of the time for work before and after the parts
LEAST_VERSIONS = {"torch": (2, 11), "triton": (3, 5), "transformers": (5, 0)}


def main(arguments: Sequence[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = make_parser("gpu.run", "Check and measure everything that needs a GPU.", rounds=None, threads=False)
    parser.add_argument("--only", choices=names, help="run one part (default: all)")
    parser.add_argument("--seconds", type=at_least(30), help="time for all parts together (default: 480, or 3600)")
    parser.add_argument("--seed", type=at_least(0), help="of random inputs (default: the file's, or a new one)")
    parser.add_argument("--cache", type=Path, help="folder of Triton's cache (default: TRITON_CACHE_DIR, or Triton's)")
    parser.add_argument("--commit", help="the commit of an installed wheel (default: that of this checkout)")
    parser.add_argument("--rehearse", action="store_true", help="run small sizes on a CPU in Triton's interpreter")
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or (3600 if options.rehearse else 480)
    if reason := why_not(needs_gpu=not options.rehearse and options.only != "compile"):
        print(f"error: {reason}", file=sys.stderr)
        return 1
    if options.cache is not None:
        from moeserve.bench.gpu.compiled import relocate

        relocate(options.cache)
        os.environ["TRITON_CACHE_DIR"] = str(options.cache.resolve())
    if not options.rehearse:
        return run_parts(options, count_gpus(), run_part, min(MAX_PROCESSES, usable_cores()))
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    from moeserve.bench.gpu.items import rehearsing

    command = [sys.executable, "-m", "moeserve.bench.gpu.parts", "--rehearse"]

    def run_small(part: Part, budget: float, seed: int, report: Callable[[Row], None], finished: Sequence[str]) -> None:
        environment = None if part.name == "compile" else dict(os.environ)
        run_part(part, budget, seed, report, finished, command, environment)

    with rehearsing():
        return run_parts(options, 1, run_small, usable_cores())


def run_parts(options: argparse.Namespace, num_gpus: int, run: Callable[..., None], max_processes: int) -> int:
    """Run the chosen parts, and return the exit code.

    Args:
        run: see `run_part`.
        max_processes: maximum processes of a part.
    """
    started = time.monotonic()
    chosen = [part for part in PARTS if options.only in (None, part.name) and part.num_gpus <= num_gpus]
    if not chosen:
        print(f"error: --only {options.only} needs two GPUs, and torch sees {num_gpus}", file=sys.stderr)
        return 1

    from moeserve.bench.gpu.limits import gpu_environment

    environment = gpu_environment(options.commit, has_gpu=num_gpus > 0)
    identity = [environment["commit"], environment["gpu"]["name"], options.rehearse]
    earlier = earlier_lines(options.json, identity, options.seed)
    seed = earlier[0]["seed"] if earlier else options.seed
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    # A process that could not start is tried again.
    rows = [line for line in earlier if line["kind"] == "row" and not line["name"].startswith(PROCESS_OF)]
    finished = {(line["part"], line["finished"]) for line in earlier if line["kind"] == "finished"}
    show(f"{environment['gpu']}, {environment['versions']}\nseed {seed}")
    if finished:
        show(f"continued: {len(finished)} items have ended before")
    common: Row = {"benchmark": "gpu", "identity": identity, "seed": seed}
    save(options.json, [common | {"kind": "start", "seconds_allowed": options.seconds, "environment": environment}])
    ends_at = started + options.seconds * (1 - RESERVED_SHARE)

    def add(part: str, row: Row) -> None:
        if "finished" in row:
            save(options.json, [common | {"kind": "finished", "part": part} | row])
            return
        line = common | {"kind": "row", "part": part} | row
        rows.append(line)
        save(options.json, [line])
        show(row_text(row))

    for index, part in enumerate(chosen):  # later parts share the time that earlier parts left
        budget = max(0.0, ends_at - time.monotonic()) * part.share / sum(each.share for each in chosen[index:])
        show(f"\n{part.name}: {budget:.0f} s at most")
        part = dataclasses.replace(part, num_processes=min(part.num_processes, max_processes))
        names = [name for its_part, name in finished if its_part == part.name]
        run(part, budget, seed, functools.partial(add, part.name), names)
    rows = last_rows(rows)
    result: Row = {
        "kind": "end",
        "passed": not any(row["status"] == "failed" for row in rows),
        "seconds": time.monotonic() - started,
        "failed": [row["name"] for row in rows if row["status"] == "failed"],
        "left_out": [row["name"] for row in rows if row["status"] == "left out" or "left_out" in row],
        "environment": environment,
    }
    show(f"\n{page(common | result, rows)}")
    save(options.json, [common | result])
    return 0 if result["passed"] else 1


def earlier_lines(path: Path | None, identity: list[Any], seed: int | None) -> list[Row]:
    """Return the lines of the runs in a file that this run continues: same commit, GPU, kind of run and seed."""
    if path is None or not path.exists():
        return []
    lines = [line for line in read_jsonl(path) if line.get("benchmark") == "gpu" and line["identity"] == identity]
    seed = lines[-1]["seed"] if lines and seed is None else seed
    return [line for line in lines if line["seed"] == seed]


def last_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the last row of each name in a part. A later run may have a result that an earlier run skipped."""
    return list({(row["part"], row["name"]): row for row in rows}.values())


def why_not(needs_gpu: bool) -> str | None:
    """Return the reason why the benchmark cannot run here, in one sentence; None if it can."""
    for name, least in LEAST_VERSIONS.items():
        version = installed_version(name)
        needed = f"the GPU benchmark needs {name} >= {'.'.join(map(str, least))}"
        if not version:
            return f"{name} is not installed; {needed}"
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < least:
            return f"{name} {version} is too old; {needed}"
    import torch

    if not needs_gpu:
        versions = [tuple(map(int, re.findall(r"\d+", installed_version(name))[:2])) for name in ("triton", "numpy")]
        is_wrong = versions[0] < (3, 7) and versions[1] >= (2, 4)
        return "Triton's interpreter needs numpy < 2.4 before triton 3.7" if is_wrong else None
    if not torch.cuda.is_available():
        return "torch sees no GPU (torch.cuda.is_available())"
    return None


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
