"""What all benchmarks share: facts about the machine, fair rounds between measured limits, and rows on disk.

Knows no model and no engine. Machines drift, some from one second to the next. So a benchmark measures the limit, the
peers and moeserve in one run and in turns, takes fractions and ratios within a round, and reports their medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from moeserve.bench.limits import LimitProbe, MachineLimits, mean_limits
from moeserve.machine import installed_version, usable_cores

ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")

Sample = TypeVar("Sample")  # one measurement: mostly a number


@dataclass(frozen=True)
class Round:
    """One rate, measured between two measurements of the machine's limits."""

    rate: float
    before: MachineLimits
    after: MachineLimits

    @property
    def limits(self) -> MachineLimits:
        return mean_limits([self.before, self.after])


def add_options(parser: argparse.ArgumentParser, *, rounds: int, threads: bool = True) -> None:
    """The options that all benchmarks have."""
    parser.add_argument("--rounds", type=at_least(1), default=rounds)
    if threads:
        parser.add_argument("--threads", type=at_least(1), default=usable_cores())
    parser.add_argument("--json", type=Path, help="append the results to this file, one JSON object per line")


def at_least(least: int) -> Callable[[str], int]:
    """What reads an option that is a number."""

    def read(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    read.__name__ = "int"  # which argparse names where the text is no number
    return read


def environment() -> dict[str, Any]:
    """The machine and the versions behind a figure, ready for JSON. Memory is in bytes, the date in UTC.

    The load is the number of threads that wanted a core, on average over the last minute.
    """
    model, flags = _processor()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": model,
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed_version(name) or None for name in ("moeserve", "torch", "transformers")},
    }


def interleave(measures: Mapping[str, Callable[[], Sample]], num_rounds: int) -> dict[str, list[Sample]]:
    """Takes every measure once per round, so that a slow minute of the machine hits all of them alike.

    Every second round runs in reverse order, so that none always follows the same other one.

    Returns:
        The samples of each measure, in the order they were taken.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in measures}
    for round_index in range(num_rounds):
        names = list(measures) if round_index % 2 == 0 else list(measures)[::-1]
        for name in names:
            samples[name].append(measures[name]())
    return samples


def interleave_with_limits(
    measures: Mapping[str, Callable[[], float]], num_rounds: int, probe: LimitProbe
) -> dict[str, list[Round]]:
    """Like `interleave`, with the limits measured before the first rate, between any two, and after the last."""
    before = probe.measure()

    def between(measure: Callable[[], float]) -> Callable[[], Round]:
        def run() -> Round:
            nonlocal before
            rate = measure()
            taken = Round(rate, before, probe.measure())
            before = taken.after
            return taken

        return run

    return interleave({name: between(measure) for name, measure in measures.items()}, num_rounds)


def figures(rounds: Sequence[Round], limit_rate: Callable[[MachineLimits], float]) -> dict[str, Any]:
    """What a row says of one engine: medians, and each round.

    Args:
        limit_rate: the rate of one who wastes nothing on a machine with these limits.
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


def ratio(engines: Mapping[str, Mapping[str, Any]], name: str, baseline: str) -> dict[str, Any]:
    """How many times as fast as the baseline an engine is, both as `figures` tells of them.

    Within a round the limits may have changed between the two. `median_of_fractions` compares what each made of the
    limits of its own moment.
    """
    pairs = list(zip(engines[name]["rounds"], engines[baseline]["rounds"], strict=True))
    ratios = [own["rate"] / other["rate"] for own, other in pairs]
    return {
        "engine": name,
        "baseline": baseline,
        "median": statistics.median(ratios),
        "median_of_fractions": statistics.median(
            own["fraction_of_limit"] / other["fraction_of_limit"] for own, other in pairs
        ),
        "rounds": ratios,
    }


def ratio_of_medians(samples: Sequence[float], baseline: Sequence[float]) -> float:
    """How many times the baseline's median the samples' median is."""
    return statistics.median(samples) / statistics.median(baseline)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends each row to the file as one line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, in their order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _processor() -> tuple[str, set[str]]:
    """Name and instruction set flags of the processor. Only Linux tells the flags."""
    cpuinfo = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name") or platform.processor() or platform.machine(), set(flags.split())
