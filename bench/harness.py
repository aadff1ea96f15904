"""The harness of all benchmarks: common options, measuring in rounds, ratios, and result rows.

The speed of machines drifts, sometimes within a second. A benchmark therefore measures everything that it compares in
one run and alternately, computes fractions and ratios within a round, and reports medians over the rounds.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from moeserve.bench.limits import LimitProbe, MachineLimits, mean_limits
from moeserve.machine import installed_version, usable_cores
from moeserve.ops.native import native_kernels

ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "asimddp", "bf16", "sve")

Row = dict[str, Any]
Sample = TypeVar("Sample")  # one measurement: usually a number


@dataclass(frozen=True)
class Round:
    """One rate, measured between two measurements of the machine's limits."""

    rate: float
    before: MachineLimits
    after: MachineLimits

    @property
    def limits(self) -> MachineLimits:
        return mean_limits([self.before, self.after])


def make_parser(module: str, description: str, *, rounds: int | None, threads: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have.

    Args:
        module: "moeserve bench NAME", or the name of the benchmark's module for `python -m`.
        rounds: default of --rounds; None if the benchmark has no rounds.
    """
    prog = module if " " in module else f"python -m moeserve.bench.{module}"
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--json", type=Path, help="append the results to this file, one JSON object per line")
    if rounds is not None:
        parser.add_argument("--rounds", type=at_least(1), default=rounds, help=f"measurements (default: {rounds})")
    if threads:
        parser.add_argument("--threads", type=at_least(1), default=usable_cores(), help="default: all usable cores")
    return parser


def add_choices(parser: argparse.ArgumentParser, flag: str, names: Iterable[str], default: str) -> None:
    """Add a repeatable option with a choice of names."""
    listed = list(names)
    help_text = f"repeatable (default: {default}) [{', '.join(listed)}]"
    parser.add_argument(flag, action="append", choices=listed, metavar="NAME", help=help_text)


def add_models(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    help_text = f"name or folder of a checkpoint, repeatable (default: {', '.join(default)})"
    parser.add_argument("--model", action="append", help=help_text)


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `minimum`."""

    def read(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is less than {minimum}")
        return number

    read.__name__ = "int"  # argparse names the type in its error for other text
    return read


def environment() -> Row:
    """Return the machine, commit and versions of a result, ready for JSON.

    The load is the average number of runnable threads over the last minute.
    """
    model, flags = _processor()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": model,
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "kernels": None if (kernels := native_kernels()) is None else kernels.isa(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: installed_version(name) or None for name in ("moeserve", "torch", "transformers")},
    }


@functools.cache
def commit() -> str | None:
    """Return the commit of this checkout, with "+changes" if files have been changed; None outside of a checkout."""
    folder = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+changes", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() if (folder / ".git").exists() else None


def interleave(
    measures: Mapping[str, Callable[[], Sample]], num_rounds: int, *, warms_up: bool = False
) -> dict[str, list[Sample]]:
    """Take every measure once per round, so that a slow period of the machine affects all of them alike.

    Every second round runs in reverse order, so that no measure always follows the same other measure.

    Args:
        warms_up: take every measure once beforehand, without counting it.

    Returns:
        The samples of each measure, in the order in which they were taken.
    """
    if warms_up:
        interleave(measures, 1)
    samples: dict[str, list[Sample]] = {name: [] for name in measures}
    for round_index in range(num_rounds):
        names = list(measures) if round_index % 2 == 0 else list(measures)[::-1]
        for name in names:
            samples[name].append(measures[name]())
    return samples


def interleave_with_limits(
    measures: Mapping[str, Callable[[], float]], num_rounds: int, probe: LimitProbe
) -> dict[str, list[Round]]:
    """Interleave rates. The machine's limits are measured before the first rate, between rates, and after the last."""
    before = probe.measure()

    def between_limits(measure: Callable[[], float]) -> Round:
        nonlocal before
        rate = measure()
        taken = Round(rate, before, probe.measure())
        before = taken.after
        return taken

    return interleave(
        {name: functools.partial(between_limits, measure) for name, measure in measures.items()}, num_rounds
    )


def interleave_beside_limits(
    measures: Mapping[str, Callable[[], float]], num_rounds: int, probe: LimitProbe
) -> tuple[dict[str, list[float]], list[MachineLimits]]:
    """Interleave measures, after a round that is not counted. Also return the machine's limits in each round."""
    limits: list[MachineLimits] = []

    def measure_limits() -> float:
        limits.append(probe.measure())
        return limits[-1].matmul_rate

    samples = interleave({**measures, "limits": measure_limits}, num_rounds, warms_up=True)
    return samples, limits[-num_rounds:]


def call_timer(
    call: Callable[[int], object], sample_seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Return a measure of the mean seconds per call, over as many calls as take about `sample_seconds`.

    Args:
        call: its argument is the index of the call within a sample.
        clock: returns seconds; `time.process_time` leaves out those in which other processes had the core.
    """

    @torch.inference_mode()
    def run(num_calls: int) -> float:
        start = clock()
        for index in range(num_calls):
            call(index)
        return (clock() - start) / num_calls

    run(1)
    num_calls = max(1, int(sample_seconds / run(2)))
    return lambda: run(num_calls)


def figures(rounds: Sequence[Round], limit_rate: Callable[[MachineLimits], float]) -> Row:
    """Return the result of one engine: medians, and the samples of each round.

    Args:
        limit_rate: returns the maximum rate on a machine with these limits.
    """
    limits = [limit_rate(each.limits) for each in rounds]
    fractions = [each.rate / limit for each, limit in zip(rounds, limits, strict=True)]
    return {
        "rate": statistics.median(each.rate for each in rounds),
        "fraction_of_limit": statistics.median(fractions),
        "rounds": [
            {**asdict(each), "limit_rate": limit, "fraction_of_limit": fraction}
            for each, limit, fraction in zip(rounds, limits, fractions, strict=True)
        ],
    }


def ratios(engines: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return the speed-up of each variant of moeserve over each other engine, from the results of `figures`."""
    found = []
    for name, baseline in ((own, other) for own in engines for other in engines):
        if name.startswith("moeserve") and not baseline.startswith("moeserve"):
            pairs = zip(engines[name]["rounds"], engines[baseline]["rounds"], strict=True)
            rounds = [own["rate"] / other["rate"] for own, other in pairs]
            found.append({"engine": name, "baseline": baseline, "median": statistics.median(rounds), "rounds": rounds})
    return found


def ratio_of_medians(samples: Sequence[float], baseline: Sequence[float]) -> float:
    return statistics.median(samples) / statistics.median(baseline)


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that is not exceeded by at least the fraction `share` of all values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def save(path: Path | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append each row to the file as one line of JSON; do nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def show(line: str) -> None:
    """Print a line at once, because lines may be minutes apart."""
    print(line, flush=True)


def number(value: float) -> str:
    """Format with three significant digits, and without decimals from 100 on."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _processor() -> tuple[str, set[str]]:
    """Return the processor's name and its instruction set flags. The flags are known only on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name") or platform.processor() or platform.machine(), set(flags.split())
