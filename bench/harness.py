"""What all benchmarks share: facts about the machine, its limits, fair rounds, and rows on disk.

Knows no model and no engine. Machines drift, so a benchmark measures the limit, the peer and moeserve in one run,
in turns, and reports ratios beside the figures.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from moeserve.machine import usable_cores

ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")

Sample = TypeVar("Sample")  # one measurement: mostly a number


@dataclass(frozen=True)
class MachineLimits:
    """What the machine can do with `num_threads` threads, as far as torch can show it."""

    read_bandwidth: float  # GB/s, 1e9 bytes
    matmul_rate: float  # bf16 GFLOP/s, a multiply-add counts two
    num_threads: int


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
        "versions": {name: _version(name) for name in ("moeserve", "torch", "transformers")},
    }


def measure_limits(*, buffer_bytes: int = 1 << 30, matmul_size: int = 4096, num_passes: int = 5) -> MachineLimits:
    """Measures memory reads and bf16 products with torch's current number of threads.

    A limit is what the machine can do, so each figure is the best of all passes, not the median.

    - Reading: a float32 buffer of `buffer_bytes` is summed, and its two halves are multiplied in a dot product.
      Both read every byte once and write nothing; the faster one counts. The buffer must be larger than the caches.
    - Products: torch's bf16 linear of `matmul_size` / 4 rows with a square weight of `matmul_size`.

    Other code may read a little faster than torch does, so a fraction of this limit can pass 1.
    """
    return MachineLimits(
        read_bandwidth=_read_bandwidth(buffer_bytes, num_passes),
        matmul_rate=_matmul_rate(matmul_size, num_passes),
        num_threads=torch.get_num_threads(),
    )


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


def ratio_of_medians(samples: Sequence[float], baseline: Sequence[float]) -> float:
    """How many times the baseline's median the samples' median is."""
    return statistics.median(samples) / statistics.median(baseline)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends each row to the file as one line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _read_bandwidth(buffer_bytes: int, num_passes: int) -> float:
    buffer = torch.ones(buffer_bytes // 8 * 2)  # not zeros: untouched pages would all be one page of zeros
    first_half, second_half = buffer.chunk(2)
    seconds = min(
        _best_seconds(buffer.sum, num_passes),
        _best_seconds(lambda: torch.dot(first_half, second_half), num_passes),
    )
    return buffer.nbytes / seconds / 1e9


def _matmul_rate(size: int, num_passes: int) -> float:
    num_rows = max(1, size // 4)
    rows = torch.ones(num_rows, size, dtype=torch.bfloat16)
    weight = torch.ones(size, size, dtype=torch.bfloat16)
    seconds = _best_seconds(lambda: torch.nn.functional.linear(rows, weight), num_passes)
    return 2 * num_rows * size**2 / seconds / 1e9


def _best_seconds(work: Callable[[], object], num_passes: int) -> float:
    work()  # the first pass touches pages and starts threads
    return min(_seconds(work) for _ in range(num_passes))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
