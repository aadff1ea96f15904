"""The summary page of a GPU benchmark: the largest losses first, then failures, bars, and skipped items.

With `--save`, the fastest implementation of each class of shapes is also written to the table that `measured.py` reads.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from moeserve.bench.gpu.parts import PROCESS_OF, Row
from moeserve.bench.harness import plain_parser, read_jsonl, show

MOST_LOSSES = 12


def current_rows(lines: Sequence[Row]) -> list[Row]:
    """Return the rows of each item's last run that has a result; and of processes, those of a part's last run."""
    by_item: dict[tuple[str, str], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    last_run: dict[str, int] = {}
    for line in lines:
        if line["kind"] == "row":
            by_item[line["part"], line["item"]][line["run"]].append(line)
            last_run[line["part"]] = line["run"]
    rows: list[Row] = []
    for (part, item), runs in by_item.items():
        if item.startswith(PROCESS_OF):
            rows += runs.get(last_run[part], [])
        else:
            with_results = [run for run in runs.values() if any(row["status"] != "left out" for row in run)]
            rows += (with_results or list(runs.values()))[-1]
    return list({(row["part"], row["name"]): row for row in rows}.values())


def page(lines: Sequence[Row]) -> str:
    """Format the results of all runs in a file. The last line is the start or the end of a run.

    A *loss* is the idle time of the device, or a kernel's time, as a fraction of a decode step.
    """
    rows, end = current_rows(lines), lines[-1]
    losses = [
        (seconds / row["step"]["seconds"], f"{1e3 * seconds:.2f} ms: {term} in {row['name']}")
        for row in rows
        for term, seconds in row.get("step", {"terms": {}})["terms"].items()
    ]
    slow = [(row["fraction_of_bound"], f"of the bound: {row['name']}") for row in rows if "fraction_of_bound" in row]
    bars = [(row["bar"]["is_met"], f"{row['name']}: {bar_text(row['bar'])}") for row in rows if "bar" in row]
    text = ["the time of decode steps:"] if losses else []
    text += [f"  {share:4.0%}, {loss}" for share, loss in sorted(losses, reverse=True)[:MOST_LOSSES]]
    text += ["farthest from their bounds:"] if slow else []
    text += [f"  {share:4.0%} {each}" for share, each in sorted(slow)[:MOST_LOSSES]]
    text += [line for is_met, line in bars if not is_met]
    failed, left_out = ([row["name"] for row in rows if row["status"] == each] for each in ("failed", "left out"))
    left_out += [row["name"] for row in rows if "left_out" in row]
    return "\n".join(
        [
            *text,
            f"{end['environment']['gpu']['name']}, commit {end['commit']}, seed {end['seed']}, {len(rows)} results",
            f"failed: {', '.join(failed) or 'nothing'}",
            f"bars: {sum(is_met for is_met, _ in bars)} of {len(bars)} met",
            f"left out: {', '.join(left_out) or 'nothing'}",
        ]
    )


def row_text(row: Row) -> str:
    """Format a row for a terminal: its own lines, then its errors."""
    lines = [*row.get("lines", ()), *([bar_text(row["bar"])] if "bar" in row else ())]
    lines += [f"wrong: {each}" for each in row.get("wrong", ())]
    lines += [row[key] for key in ("left_out", "reason", "error") if key in row]
    return f"  {row['status']:9} {row['name']}: " + f"\n{'':12}".join(lines)


def bar_text(bar: Row) -> str:
    verdict = "met" if bar["is_met"] else "NOT MET"
    return f"bar: {bar['figure']} {bar['least']:.3g}, reached {bar['reached']:.3g}: {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    from moeserve.ops import measured
    from moeserve.triton_kernels.tuning import file_name

    parser = plain_parser("gpu_page", __doc__)
    parser.add_argument("path", type=Path, help="file written by `run --json`")
    parser.add_argument("--save", action="store_true", help="write the fastest libraries to the table of this GPU")
    options = parser.parse_args(arguments)
    try:
        lines = [line for line in read_jsonl(options.path) if line.get("benchmark") == "gpu"]
        start = next(line for line in reversed(lines) if line["kind"] == "start")
    except (OSError, ValueError, StopIteration) as error:
        reason = error if str(error) else "it has no lines of a GPU benchmark"
        print(f"error: {options.path}: {reason}", file=sys.stderr)
        return 1
    lines = [line for line in lines if (line["identity"], line["seed"]) == (start["identity"], start["seed"])]
    show(page([*lines, start]))
    if options.save:
        path = measured.MEASURED_FOLDER / file_name(start["environment"]["gpu"]["name"])
        rows = current_rows(lines)
        found = [(key, num_rows, row["fastest"]) for row in rows for key, num_rows in row.get("choices", ())]
        measured.save_table(path, found)
        show(f"{path}: {len(found)} measurements")
    return 0


if __name__ == "__main__":
    sys.exit(main())
