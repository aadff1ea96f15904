"""One part of the run, or a share of one, in a process of its own: writes a line of JSON for each thing that it does.

A kernel that ends its process, or never ends, so takes nothing with it but its own share. What is planned, begun and
done stands in the file at once; `supervise.py` reads it.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

PartName = Literal["checks", "engine", "ranks", "kernels", "throughput"]
PART_NAMES: tuple[PartName, ...] = get_args(PartName)

Row = dict[str, Any]
Rows = Callable[[], Iterator[Row]]  # of one piece of a part, as it is done
SecondsLeft = Callable[[], float]


class Diary:
    """Lines of JSON: what is planned, begun and done."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def plan(self, names: Sequence[str]) -> None:
        self._write({"planned": list(names)})

    def begin(self, name: str) -> None:
        self._write({"begun": name})

    def tell(self, row: Row) -> None:
        self._write({"done": row})

    def end(self, name: str) -> None:
        self._write({"ended": name})

    def _write(self, line: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def work_through(pieces: Sequence[tuple[str, Rows]], diary: Diary, seconds_left: SecondsLeft) -> None:
    """Each piece, until there is no time. One that fails says so, and the next begins."""
    diary.plan([name for name, _ in pieces])
    for name, rows in pieces:
        if seconds_left() <= 0:
            diary.tell({"name": name, "status": "left out", "reason": "no time was left"})
            diary.end(name)
            continue
        diary.begin(name)
        try:
            for row in rows():
                diary.tell(row)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"[:2000]
            diary.tell({"name": name, "status": "failed", "error": told, "trace": traceback.format_exc(limit=-4)})
        diary.end(name)


def pieces_of(part: PartName, seed: int, seconds_left: SecondsLeft) -> list[tuple[str, Rows]]:
    """What a part consists of, in order. Imports what only this part needs."""
    match part:
        case "checks":
            return _checks(seed, seconds_left)
        case "engine":
            return _engine(seed)
        case "ranks":
            return _ranks(seed)
        case "kernels":
            return _kernels(seconds_left)
        case "throughput":
            return _throughput(seconds_left)


def _checks(seed: int, seconds_left: SecondsLeft) -> list[tuple[str, Rows]]:
    from moeserve.bench.gpu.checks import CHECKS, gpu_place, run_check

    def rows_of(index: int) -> Rows:
        def rows() -> Iterator[Row]:
            yield run_check(CHECKS[index], gpu_place(seed + index), seconds_left)  # as whatever else runs beside it

        return rows

    return [(check.name, rows_of(index)) for index, check in enumerate(CHECKS)]


def _engine(seed: int) -> list[tuple[str, Rows]]:
    from moeserve.bench.gpu.engine import COMPARISONS, compare

    return [(each.name, _row_of(compare, each, seed)) for each in COMPARISONS]


def _ranks(seed: int) -> list[tuple[str, Rows]]:
    from moeserve.bench.gpu.ranks import COMPARISONS, compare_ranks

    return [(each.name, _row_of(compare_ranks, each, seed)) for each in COMPARISONS]


def _row_of(compare: Callable[[Any, Any, int], Row], comparison: Any, seed: int) -> Rows:
    def rows() -> Iterator[Row]:
        yield compare(comparison, "cuda", seed)

    return rows


def _kernels(seconds_left: SecondsLeft) -> list[tuple[str, Rows]]:
    """One piece: all of it is measured with the same limits, which are measured again at the end."""
    from moeserve.bench.gpu import kernels
    from moeserve.bench.gpu.limits import ColdTimer, limits_row, measure_limits

    def rows() -> Iterator[Row]:
        limits = measure_limits()
        yield limits_row("limits before", limits)
        timer = ColdTimer()
        for item in kernels.items():  # one by one: what an item keeps is let go of when the next is asked for
            if seconds_left() <= 0:
                yield {"name": item.name, "status": "left out", "reason": "no time was left"}
                continue
            try:
                yield kernels.measure(item, timer, limits)
            except Exception as error:  # the other kernels go on
                told = f"{type(error).__name__}: {error}"[:2000]
                trace = traceback.format_exc(limit=-4)
                yield {"name": item.name, "status": "failed", "error": told, "trace": trace}
        yield limits_row("limits after", measure_limits())

    return [("times of kernels", rows)]


def _throughput(seconds_left: SecondsLeft) -> list[tuple[str, Rows]]:
    from moeserve.bench.gpu import throughput
    from moeserve.bench.gpu.limits import limits_row, measure_limits

    def rows_of(index: int) -> Rows:
        def rows() -> Iterator[Row]:
            model = throughput.MODELS[index]
            started_with = seconds_left()
            share = started_with / (len(throughput.MODELS) - index)  # what is left goes to the models that are left

            limits = measure_limits()
            yield limits_row(f"limits before {model.name}", limits)
            yield from throughput.measure(model, limits, lambda: seconds_left() - (started_with - share))

        return rows

    return [(model.name, rows_of(index)) for index, model in enumerate(throughput.MODELS)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moeserve.bench.gpu.part", description="Started by `run.py`.")
    parser.add_argument("part", choices=PART_NAMES)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="after which nothing more is begun")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="pieces I, I + N, I + 2 N ...")
    parser.add_argument("--rows", type=Path, required=True, help="file to which lines are added")
    options = parser.parse_args(arguments)
    ends_at = time.monotonic() + options.seconds

    def seconds_left() -> float:
        return ends_at - time.monotonic()

    first, step = map(int, options.share.split("/"))
    pieces = pieces_of(options.part, options.seed, seconds_left)[first::step]
    work_through(pieces, Diary(options.rows), seconds_left)


if __name__ == "__main__":
    main()
