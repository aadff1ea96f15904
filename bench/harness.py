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
import re
import shutil
import statistics
import subprocess
import textwrap
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


def make_parser(name: str, doc: str | None, *, rounds: int | None, threads: bool = True) -> argparse.ArgumentParser:
    """Return a parser of `moeserve bench NAME` with the options that all benchmarks have.

    Args:
        doc: docstring of the benchmark's module, shown by --help.
        rounds: default of --rounds; None if the benchmark has no rounds.
    """
    parser = plain_parser(name, doc)
    parser.add_argument("--json", type=Path, help="append the results to this file, one JSON object per line")
    if rounds is not None:
        parser.add_argument("--rounds", type=at_least(1), default=rounds, help=f"measurements (default: {rounds})")
    if threads:
        parser.add_argument("--threads", type=at_least(1), default=usable_cores(), help="default: all usable cores")
    return parser


def plain_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of `moeserve bench NAME` without options, which shows a docstring, wrapped to the terminal."""
    width = shutil.get_terminal_size().columns - 2
    description = ""
    for item in re.split(r"\n(?=\n|- )", (doc or "").strip()):
        indent, text = "  " if item.startswith("- ") else "", " ".join(item.split())
        description += "\n" * item.startswith("\n") + textwrap.fill(text, width, subsequent_indent=indent) + "\n"
    formatter = argparse.RawDescriptionHelpFormatter
    prog = f"moeserve bench {name}"
    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=formatter, allow_abbrev=False)


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
    processor, flags = _processor()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        **processor,
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


def _processor() -> tuple[Row, set[str]]:
    """Return the processor's name, family and model numbers, and its instruction set flags.

    Names may be those of a cloud's hypervisor, which has one name for several generations. All but the name are known
    only on Linux, and the numbers only of x86-64.
    """
    cpuinfo = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    name = fields.get("model name") or platform.processor() or platform.machine()
    numbers = {"cpu_family": fields.get("cpu family"), "cpu_model": fields.get("model")}
    return {"cpu": name} | {key: int(value) if value else None for key, value in numbers.items()}, set(flags.split())
