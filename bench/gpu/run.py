"""Checks and measures everything that needs a GPU, in less than eight minutes.

    python -m moeserve.bench.gpu.run [--json PATH] [--only checks|engine|kernels|throughput|ranks] [--seconds 480]

- *checks*: every operation of our kernels beside torch in float32, on new random inputs (`checks.py`).
- *engine*: greedy tokens beside those of transformers on this GPU (`engine.py`).
- *kernels*: times under graph replay beside the measured limits of this GPU, torch and transformers (`kernels.py`).
- *throughput*: tokens per second of whole models with random weights (`throughput.py`).
- *ranks*, with several GPUs: the same on two ranks, with each dispatcher.

Each part has a share of the time and processes of its own (`parts.py`). What is left out for lack of time is reported.
Each result is written when it is there, as a line of JSON, so a run that is cut at any moment leaves a valid file. With
`--rehearse` everything runs on a CPU at small sizes (`rehearsal.py`).
The exit code is 1 if anything has failed; a missed bar fails nothing.
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
from typing import Any

from moeserve.bench.gpu.parts import PARTS, Row, run_part
from moeserve.bench.harness import at_least, make_parser, save, show
from moeserve.machine import installed_version, usable_cores

MAX_PROCESSES = 16  # of one part
RESERVED_SHARE = 0.03  # of the time, for what happens before and after the parts
LEAST_VERSIONS = {"torch": (2, 11), "triton": (3, 5), "transformers": (5, 0)}


def main(arguments: Sequence[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = make_parser("gpu.run", "Check and measure everything that needs a GPU.", rounds=None, threads=False)
    parser.add_argument("--only", choices=names, help="run one part (default: all)")
    parser.add_argument("--seconds", type=at_least(30), help="time for all parts together (default: 480, or 3600)")
    parser.add_argument("--seed", type=at_least(0), help="seed of random inputs (default: a new one)")
    parser.add_argument("--commit", help="the commit of an installed wheel (default: that of this checkout)")
    parser.add_argument("--rehearse", action="store_true", help="run small sizes on a CPU in Triton's interpreter")
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or (3600 if options.rehearse else 480)
    if reason := why_not(needs_gpu=not options.rehearse):
        print(f"error: {reason}", file=sys.stderr)
        return 1
    if not options.rehearse:
        return run_parts(options, count_gpus(), run_part)
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    from moeserve.bench.gpu.rehearsal import rehearsing

    command = [sys.executable, "-m", "moeserve.bench.gpu.parts", "--rehearse"]
    with rehearsing():
        run_small = functools.partial(run_part, command=command, environment=dict(os.environ))
        return run_parts(options, 1, run_small, max_processes=usable_cores())


def run_parts(
    options: argparse.Namespace, num_gpus: int, run: Callable[..., list[Row]], max_processes: int = MAX_PROCESSES
) -> int:
    """Run the chosen parts, and return the exit code.

    Args:
        run: see `run_part`.
        max_processes: of one part.
    """
    started = time.monotonic()
    chosen = [part for part in PARTS if options.only in (None, part.name) and part.num_gpus <= num_gpus]
    if not chosen:
        print(f"error: --only {options.only} needs two GPUs, and torch sees {num_gpus}", file=sys.stderr)
        return 1

    from moeserve.bench.gpu.limits import gpu_environment

    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    environment = gpu_environment(options.commit)
    show(f"{environment['gpu']}, {environment['versions']}\nseed {seed}")
    common: Row = {"benchmark": "gpu", "is_rehearsal": options.rehearse, "seed": seed}
    save(options.json, [common | {"kind": "start", "seconds_allowed": options.seconds, "environment": environment}])
    ends_at = started + options.seconds * (1 - RESERVED_SHARE)
    rows: list[Row] = []

    def add(part: str, row: Row) -> None:
        rows.append(row)
        save(options.json, [common | {"kind": "row", "part": part} | row])
        show(row_text(row))

    for index, part in enumerate(chosen):  # time that earlier parts did not use is shared among the later ones
        budget = max(0.0, ends_at - time.monotonic()) * part.share / sum(each.share for each in chosen[index:])
        show(f"\n{part.name}: {budget:.0f} s at most")
        part = dataclasses.replace(part, num_processes=min(part.num_processes, max_processes))
        run(part, budget, seed, functools.partial(add, part.name))
    result: Row = {
        "kind": "end",
        "passed": not any(row["status"] == "failed" for row in rows),
        "seconds": time.monotonic() - started,
        "failed": [row["name"] for row in rows if row["status"] == "failed"],
        "left_out": [row["name"] for row in rows if row["status"] == "left out" or "left_out" in row],
        "environment": environment,
    }
    show(f"\n{summary_text(common | result, rows)}")
    save(options.json, [common | result])
    return 0 if result["passed"] else 1


def why_not(needs_gpu: bool) -> str | None:
    """Return the reason why nothing can be run here, in one sentence; None if it can."""
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


def row_text(row: Row) -> str:
    """Format a row for a terminal: its own lines, and what went wrong."""
    lines = [*row.get("lines", ()), *(bar_text(bar) for bar in row.get("bars", ()))]
    lines += [f"wrong: {each}" for each in row.get("wrong", ())]
    lines += [row[key] for key in ("left_out", "reason", "error") if key in row]
    return f"  {row['status']:9} {row['name']}: " + f"\n{'':12}".join(lines)


def bar_text(bar: Row) -> str:
    reached = "nothing" if bar["reached"] is None else f"{bar['reached']:.3g}"
    return f"bar: {bar['figure']} {bar['least']:.3g}, reached {reached}: {'met' if bar['is_met'] else 'NOT MET'}"


def summary_text(result: Row, rows: Sequence[Row]) -> str:
    """Format the end of a run: failures, bars, and what was left out."""
    bars: list[dict[str, Any]] = [bar for row in rows for bar in row.get("bars", ())]
    return "\n".join(
        [
            f"{result['environment']['gpu']['name']}, seed {result['seed']}, {result['seconds']:.0f} s",
            f"failed: {', '.join(result['failed']) or 'nothing'}",
            f"bars: {sum(bar['is_met'] for bar in bars)} of {len(bars)} met",
            f"left out for lack of time: {', '.join(result['left_out']) or 'nothing'}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
