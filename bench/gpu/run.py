"""Checks and measures everything that needs a GPU, in less than eight minutes.

    python -m moeserve.bench.gpu.run [--json PATH] [--only checks|engine|ranks|kernels|throughput] [--seconds 480]

- *checks*: every operation of our kernels beside torch in float32, on new random inputs (`checks.py`).
- *engine*: greedy tokens beside those of transformers on this GPU (`engine.py`).
- *ranks*, with several GPUs: the same on two ranks, with each dispatcher.
- *kernels*: times under graph replay beside the measured limits of this GPU, torch and transformers (`kernels.py`).
- *throughput*: tokens per second of whole models with random weights (`throughput.py`).

Each part has a share of the time and processes of its own (`supervise.py`). What is left out for lack of time is
reported. The exit code is 1 if anything has failed; a missed bar fails nothing.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from moeserve.bench.gpu.supervise import PART_NAMES, RANKS, PartName, PartResult, budget, parts_for, run_part
from moeserve.bench.harness import at_least, make_parser, save, show
from moeserve.machine import installed_version

DEFAULT_SECONDS = 480
RESERVED_SECONDS = 15  # for what happens before and after the parts
LEAST_VERSIONS = {"torch": (2, 11), "triton": (3, 5), "transformers": (5, 0)}
FIGURE_NAMES = {
    "fraction_of_memory_bound": "of the memory bound",
    "operations_per_second": "TFLOP/s",
    "times_transformers": "x transformers",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("gpu.run", "Check and measure everything that needs a GPU.", rounds=None, threads=False)
    parser.add_argument("--only", choices=PART_NAMES, help="run one part (default: all)")
    parser.add_argument("--seconds", type=at_least(30), default=DEFAULT_SECONDS, help="time for all parts together")
    parser.add_argument("--seed", type=at_least(0), help="seed of random inputs (default: a new one)")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    if reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    num_gpus = count_gpus()
    if options.only == RANKS.name and num_gpus < 2:
        print(f"error: --only {RANKS.name} needs two GPUs, and torch sees {num_gpus}", file=sys.stderr)
        return 1

    from moeserve.bench.gpu.limits import gpu_environment

    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    environment = gpu_environment()
    show(f"{environment['gpu']['name']}, driver {environment['gpu']['driver']}, {environment['versions']}\nseed {seed}")
    ends_at = started + options.seconds - min(RESERVED_SECONDS, options.seconds / 10)
    results = run_parts(options.only, num_gpus, ends_at, seed)
    row = result_row(results, environment, seed, options.seconds, time.monotonic() - started)
    show(f"\n{summary_text(row)}")
    save(options.json, [row])
    return 0 if row["passed"] else 1


def run_parts(only: PartName | None, num_gpus: int, ends_at: float, seed: int) -> list[PartResult]:
    """Run one part after another, whatever becomes of each."""
    chosen = [part for part in parts_for(num_gpus) if only in (None, part.name)]
    results = []
    for index, part in enumerate(chosen):
        seconds = budget(part, chosen[index + 1 :], ends_at - time.monotonic())
        show(f"\n{part.name}: {seconds:.0f} s at most")
        results.append(run_part(part, seconds, seed, lambda row: show(row_text(row))))
    return results


def result_row(
    results: Sequence[PartResult], environment: Mapping[str, Any], seed: int, seconds_allowed: float, seconds: float
) -> dict[str, Any]:
    """Return the complete result, which becomes one line of JSON."""
    rows = [row for part in results for row in part.rows]
    return {
        "benchmark": "gpu",
        "passed": not any(row["status"] == "failed" for row in rows),
        "seed": seed,
        "seconds_allowed": seconds_allowed,
        "seconds": seconds,
        "left_out": [row["name"] for row in rows if row["status"] == "left out" or "left_out" in row],
        "parts": [
            {"part": part.part, "budget": part.budget, "seconds": part.seconds, "rows": part.rows} for part in results
        ],
        "environment": dict(environment),
    }


def why_not() -> str | None:
    """Return the reason why nothing can be measured here, in one sentence; None if it can."""
    for name, least in LEAST_VERSIONS.items():
        version = installed_version(name)
        needed = f"the GPU benchmark needs {name} >= {'.'.join(map(str, least))}"
        if not version:
            return f"{name} is not installed; {needed}"
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < least:
            return f"{name} {version} is too old; {needed}"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU (torch.cuda.is_available())"
    return None


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def row_text(row: Mapping[str, Any]) -> str:
    """Format a row for a terminal, with its bars and comparisons."""
    lines = [f"  {row['status']:9} {row['name']}: {_figures(row)}"]
    lines += [bar_text(bar) for bar in row.get("bars", ())]
    for name, other in row.get("others", {}).items():
        if "error" in other:
            lines.append(f"{name}: not measured ({other['error']})")
        else:
            lines.append(
                f"{name}: {other['seconds'] * 1e6:,.1f} us, ours is {other['times_as_fast']:.2f} times as fast"
            )
    if other := row.get("transformers"):
        rate = f"{other['rate']:,.0f} tokens/s" if "rate" in other else other["error"]
        lines.append(f"transformers: {rate}")
    lines += [*row.get("notes", ()), *(f"wrong: {each}" for each in row.get("wrong", ()))]
    lines += [row[key] for key in ("left_out", "reason", "error") if key in row]
    return f"\n{'':12}".join(lines)


def _figures(row: Mapping[str, Any]) -> str:
    match row:
        case {"error_ratio": ratio, "num_cases": num_cases, "worst": worst}:
            return f"{num_cases} cases, worst {ratio:.3g} of the tolerance ({worst})"
        case {"equal_tokens": share}:
            difference = row.get("max_logprob_difference")
            more = "" if difference is None else f", log-probabilities differ by up to {difference:.3g}"
            return f"{share:.1%} of the tokens equal{more}"
        case {"limits": limits}:
            fp8 = "none" if limits["fp8_rate"] is None else f"{limits['fp8_rate'] / 1e12:.0f}"
            rates = f"{limits['bf16_rate'] / 1e12:.0f} TFLOP/s in bf16, {fp8} in fp8"
            return f"{limits['copy_bandwidth'] / 1e9:,.0f} GB/s copied, {rates}"
        case {"rate": rate, "num_layers": num_layers}:
            layers = f"{num_layers} of {row['layers_of_the_published']} layers"
            return f"{layers}, {rate:,.0f} tokens/s, {row['fraction_of_bound']:.0%} of the bound"
        case {"seconds": seconds}:
            rates = f"{row['bytes_per_second'] / 1e9:,.0f} GB/s, {row['operations_per_second'] / 1e12:,.1f} TFLOP/s"
            return f"{seconds * 1e6:,.1f} us, {rates}, {row['fraction_of_bound']:.0%} of the bound"
    return "no figures"


def bar_text(bar: Mapping[str, Any]) -> str:
    def shown(value: float | None) -> str:
        if value is None:
            return "nothing"
        figure = bar["figure"]
        number = f"{value / 1e12:.0f}" if figure == "operations_per_second" else f"{value:.2f}"
        return f"{number} {FIGURE_NAMES[figure]}"

    return f"bar: {shown(bar['least'])}, reached {shown(bar['reached'])}: {'met' if bar['is_met'] else 'NOT MET'}"


def summary_text(row: Mapping[str, Any]) -> str:
    """Format the end of a run: failures, bars, and what was left out."""
    rows = [each for part in row["parts"] for each in part["rows"]]
    failed = [each["name"] for each in rows if each["status"] == "failed"]
    bars = [bar for each in rows for bar in each.get("bars", ())]
    lines = [f"{row['environment']['gpu']['name']}, seed {row['seed']}, {row['seconds']:.0f} s"]
    lines.append(f"failed: {', '.join(failed) or 'nothing'}")
    lines.append(f"bars: {sum(bar['is_met'] for bar in bars)} of {len(bars)} met")
    lines.append(f"left out for lack of time: {', '.join(row['left_out']) or 'nothing'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
