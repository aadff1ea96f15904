"""The items of each part, and the process that works through its share of them. Started by `supervise.py`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from moeserve.bench.gpu.supervise import PART_NAMES, PartName, Progress, Row, append_line

Rows = Callable[[], Iterator[Row]]  # runs one item of a part
SecondsLeft = Callable[[], float]
UNUSABLE = 3  # exit code after a CUDA error, which makes later calls of the same process fail too


def items_of(part: PartName, seed: int, seconds_left: SecondsLeft) -> list[tuple[str, Rows]]:
    """Return the items of a part by name. Imports only what this part needs."""
    match part:
        case "checks":
            from moeserve.bench.gpu.check import run_check
            from moeserve.bench.gpu.checks import CHECKS
            from moeserve.bench.gpu.inputs import gpu_source

            def check_rows(index: int) -> Iterator[Row]:
                yield run_check(CHECKS[index], gpu_source(seed + index), seconds_left)

            return [(check.name, partial(check_rows, index)) for index, check in enumerate(CHECKS)]
        case "engine" | "ranks":
            from moeserve.bench.gpu.engine import COMPARISONS, RANK_COMPARISONS, compare

            comparisons = COMPARISONS if part == "engine" else RANK_COMPARISONS

            def comparison_rows(index: int) -> Iterator[Row]:
                yield compare(comparisons[index], "cuda", seed)

            return [(each.name, partial(comparison_rows, index)) for index, each in enumerate(comparisons)]
        case "kernels":
            return [("kernel times", partial(kernel_rows, seed, seconds_left))]
        case "throughput":
            from moeserve.bench.gpu.throughput import MODELS

            return [(model.name, partial(throughput_rows, index, seconds_left)) for index, model in enumerate(MODELS)]


def kernel_rows(seed: int, seconds_left: SecondsLeft) -> Iterator[Row]:
    """Time all kernels with the same limits, which are measured again at the end."""
    from moeserve.bench.gpu import kernels
    from moeserve.bench.gpu.inputs import gpu_source
    from moeserve.bench.gpu.limits import ColdTimer, limits_row, measure_limits

    limits = measure_limits()
    yield limits_row("limits before", limits)
    timer = ColdTimer()
    for item in kernels.items(gpu_source(seed), kernels.Sizes()):
        if seconds_left() <= 0:
            yield {"name": item.name, "status": "left out", "reason": "no time was left"}
        else:
            try:
                yield kernels.measure(item, timer, limits)
            except Exception as error:
                yield failure_row(item.name, error)
                if is_cuda_error(error):
                    raise
    yield limits_row("limits after", measure_limits())


def throughput_rows(index: int, seconds_left: SecondsLeft) -> Iterator[Row]:
    """Measure one model. The time that is left is shared among it and the later models."""
    from moeserve.bench.gpu import throughput
    from moeserve.bench.gpu.limits import limits_row, measure_limits

    model = throughput.MODELS[index]
    ends_with = seconds_left() * (1 - 1 / (len(throughput.MODELS) - index))
    limits = measure_limits()
    yield limits_row(f"limits before {model.name}", limits)
    yield from throughput.measure(model, limits, lambda: seconds_left() - ends_with)


def work_through(items: Sequence[tuple[str, Rows]], path: Path, seconds_left: SecondsLeft) -> None:
    """Run each item that the file does not have yet, and write its rows.

    Raises:
        SystemExit: after a CUDA error, since this process cannot use the GPU any more.
    """
    done = Progress(path)
    done.read()
    append_line(path, {"planned": [name for name, _ in items]})
    for name, rows in items:
        if name in done.begun:
            continue
        append_line(path, {"begun": name})
        error: Exception | None = None
        if seconds_left() <= 0:
            append_line(path, {"done": {"name": name, "status": "left out", "reason": "no time was left"}})
        else:
            try:
                for row in rows():
                    append_line(path, {"done": row})
            except Exception as caught:
                error = caught
                append_line(path, {"done": failure_row(name, error)})
        append_line(path, {"ended": name})
        if error is not None and is_cuda_error(error):
            sys.exit(UNUSABLE)


def failure_row(name: str, error: Exception) -> Row:
    message = f"{type(error).__name__}: {error}"[:2000]
    return {"name": name, "status": "failed", "error": message, "trace": traceback.format_exc(limit=-4)}


def is_cuda_error(error: Exception) -> bool:
    return "CUDA error" in str(error) or "CUDA driver error" in str(error)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moeserve.bench.gpu.parts", description="Run by `run.py`.")
    parser.add_argument("part", choices=PART_NAMES)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--ends-at", type=float, required=True, help="monotonic clock after which nothing is begun")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="items I, I + N, I + 2 N ...")
    parser.add_argument("--rows", type=Path, required=True, help="file to which lines are appended")
    options = parser.parse_args(arguments)

    def seconds_left() -> float:
        ends_at: float = options.ends_at
        return ends_at - time.monotonic()

    first, step = map(int, options.share.split("/"))
    work_through(items_of(options.part, options.seed, seconds_left)[first::step], options.rows, seconds_left)


if __name__ == "__main__":
    main()
