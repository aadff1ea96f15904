"""Checks and measures everything that needs a GPU, in less than eight minutes.

    python -m moeserve.bench.gpu.run [--json PATH] [--only checks|engine|ranks|kernels|throughput] [--seconds 480]

- *checks*: every kernel against float64 on new random inputs (`checks.py`).
- *engine*: greedy tokens against transformers' on this GPU (`engine.py`).
- *ranks*, where there are several GPUs: the same on two ranks, by each dispatcher (`ranks.py`).
- *kernels*: times under graph replay beside this GPU's measured limits, torch and transformers (`kernels.py`).
- *throughput*: tokens per second of whole models with random weights (`throughput.py`).

It needs one GPU, torch, triton and transformers; no network, and no compiler but Triton's. Each part has a share of the
time, and runs in processes of its own. What was left out for time is said. The exit code is 1 if anything failed; a bar
that is not met fails nothing.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeserve.bench.gpu.part import PART_NAMES, PartName
from moeserve.bench.gpu.report import row_text, summary_text
from moeserve.bench.gpu.supervise import RANKS, Done, budget, parts_for, run_part
from moeserve.bench.harness import at_least, save
from moeserve.machine import installed_version

DEFAULT_SECONDS = 480
START_SECONDS = 15  # of the whole, for what is around the parts
LEAST_VERSIONS = {"torch": (2, 11), "triton": (3, 5), "transformers": (5, 0)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.gpu.run", description="Checks and measures everything that needs a GPU."
    )
    parser.add_argument("--json", type=Path, help="append the result to this file, as one line of JSON")
    parser.add_argument("--only", choices=PART_NAMES, help="default: all parts")
    parser.add_argument("--seconds", type=at_least(30), default=DEFAULT_SECONDS, help="for all of it")
    parser.add_argument("--seed", type=at_least(0), help="of random inputs; default: a new one")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    if reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 1

    num_gpus = count_gpus()
    if options.only == RANKS.name and num_gpus < 2:
        print(f"error: --only {RANKS.name} compares two GPUs with one, and torch sees {num_gpus}", file=sys.stderr)
        return 1

    from moeserve.bench.gpu.limits import gpu_environment

    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    environment = gpu_environment()
    print(f"{environment['gpu']['name']}, driver {environment['gpu']['driver']}, {environment['versions']}")
    print(f"seed {seed}", flush=True)
    ends_at = started + options.seconds - min(START_SECONDS, options.seconds / 10)
    done = run_parts(options.only, num_gpus, ends_at, seed)
    row = result_row(done, environment, seed, options.seconds, time.monotonic() - started)
    print(f"\n{summary_text(row)}")
    save(options.json, [row])
    return 0 if row["passed"] else 1


def run_parts(only: PartName | None, num_gpus: int, ends_at: float, seed: int) -> list[Done]:
    """One part after another; whatever becomes of one, the next one runs."""
    chosen = [part for part in parts_for(num_gpus) if only in (None, part.name)]
    done = []
    for index, part in enumerate(chosen):
        seconds = budget(part, chosen[index + 1 :], ends_at - time.monotonic())
        print(f"\n{part.name}: {seconds:.0f} s at most", flush=True)
        done.append(run_part(part, seconds, seed, lambda row: print(row_text(row), flush=True)))
    return done


def result_row(
    done: Sequence[Done], environment: Mapping[str, Any], seed: int, seconds_allowed: float, seconds: float
) -> dict[str, Any]:
    """The one line of JSON, complete in itself."""
    return {
        "benchmark": "gpu",
        "passed": not any(part.failed for part in done),
        "seed": seed,
        "seconds_allowed": seconds_allowed,
        "seconds": seconds,
        "left_out": [row["name"] for part in done for row in part.left_out],
        "parts": [
            {"part": part.part, "budget": part.budget, "seconds": part.seconds, "rows": part.rows} for part in done
        ],
        "environment": dict(environment),
    }


def why_not() -> str | None:
    """Why nothing can be measured here, in one sentence; None if it can."""
    for name, least in LEAST_VERSIONS.items():
        version = installed_version(name)
        wanted = ".".join(map(str, least))
        if not version:
            return f"{name} is not installed; the GPU benchmark needs {name} >= {wanted}"
        if version_numbers(version) < least:
            return f"{name} {version} is too old; the GPU benchmark needs {name} >= {wanted}"
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU to check or measure: torch sees none (torch.cuda.is_available())"
    return None


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def version_numbers(version: str) -> tuple[int, ...]:
    """Of "2.11.0+cu130": (2, 11)."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0,)


if __name__ == "__main__":
    sys.exit(main())
