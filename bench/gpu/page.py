"""The summary page of a GPU benchmark: the largest losses first, then failures, bars, and skipped items.

    python -m moeserve.bench.gpu.page PATH [--save]

With `--save`, the fastest implementation of each class of shapes is also written to the table that `measured.py` reads.

A *loss* is the part of a step's time that exceeds its bound, caused by one kernel or by the idle device. Losses are
sorted by their fraction of the step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeserve.bench.harness import read_jsonl, show

Row = dict[str, Any]
MOST_LOSSES = 12


@dataclass(frozen=True)
class Loss:
    """Time of a step that exceeds the bound."""

    row: str
    term: str
    seconds: float
    share: float  # of the step
    bound: float

    @property
    def text(self) -> str:
        bound = f", {1e3 * self.bound:.2f} ms is its bound" if self.bound else ""
        return f"{self.share:4.0%} of a step: {1e3 * self.seconds:.2f} ms, {self.term} in {self.row}{bound}"


def losses(rows: Sequence[Row]) -> list[Loss]:
    """Return the losses of all steps whose kernels were timed, the largest fraction first."""
    found = []
    for row in rows:
        step = row.get("step", {})
        for term, seconds in step.get("terms", {}).items():
            bound = step["bounds"].get(term, 0.0)
            found.append(Loss(row["name"], term, seconds - bound, (seconds - bound) / step["seconds"], bound))
    return sorted(found, key=lambda loss: -loss.share)


def page(result: Row, rows: Sequence[Row]) -> str:
    bars: list[Row] = [bar for row in rows for bar in row.get("bars", ())]
    slowest = sorted((row for row in rows if "fraction_of_bound" in row), key=lambda row: row["fraction_of_bound"])
    return "\n".join(
        [
            *(["largest losses:"] if losses(rows) else []),
            *(f"  {loss.text}" for loss in losses(rows)[:MOST_LOSSES]),
            *(["farthest from their bounds:"] if slowest else []),
            *(f"  {row['fraction_of_bound']:4.0%} of the bound: {row['name']}" for row in slowest[:MOST_LOSSES]),
            f"{result['environment']['gpu']['name']}, seed {result['seed']}, {result['seconds']:.0f} s",
            f"failed: {', '.join(result['failed']) or 'nothing'}",
            f"bars: {sum(bar['is_met'] for bar in bars)} of {len(bars)} met",
            f"left out: {', '.join(result['left_out']) or 'nothing'}",
        ]
    )


def row_text(row: Row) -> str:
    """Format a row for a terminal: its own lines, then its errors."""
    lines = [*row.get("lines", ()), *(bar_text(bar) for bar in row.get("bars", ()))]
    lines += [f"wrong: {each}" for each in row.get("wrong", ())]
    lines += [row[key] for key in ("left_out", "reason", "error") if key in row]
    return f"  {row['status']:9} {row['name']}: " + f"\n{'':12}".join(lines)


def bar_text(bar: Row) -> str:
    reached = "nothing" if bar["reached"] is None else f"{bar['reached']:.3g}"
    return f"bar: {bar['figure']} {bar['least']:.3g}, reached {reached}: {'met' if bar['is_met'] else 'NOT MET'}"


def main(arguments: Sequence[str] | None = None) -> None:
    from moeserve.ops.libraries import measured
    from moeserve.triton_kernels.tuning import file_name

    parser = argparse.ArgumentParser(prog="python -m moeserve.bench.gpu.page", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="file written by `run --json`; the last completed run is shown")
    parser.add_argument("--save", action="store_true", help="write the fastest libraries to the table of this GPU")
    options = parser.parse_args(arguments)
    lines = read_jsonl(options.path)
    end = next(line for line in reversed(lines) if line["kind"] == "end")
    rows = [line for line in lines if line["kind"] == "row" and line["seed"] == end["seed"]]
    rows = list({(row["part"], row["name"]): row for row in rows}.values())
    show(page(end, rows))
    if options.save:
        path = measured.MEASURED_FOLDER / file_name(end["environment"]["gpu"]["name"])
        found = [(key, num_rows, row["fastest"]) for row in rows for key, num_rows in row.get("choices", ())]
        measured.save_table(path, found)
        show(f"{path}: {len(found)} measurements")


if __name__ == "__main__":
    main()
