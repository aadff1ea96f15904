"""Prints recorded rows as tables, and writes the table and the chart of docs/benchmarks.md.

Without names, the document's text between the comments `<!-- begin throughput -->` and `<!-- end throughput -->` is
replaced. If several rows describe the same cell, the last one is used. All rows of the folder are shown, so results of
trial runs belong elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeserve.bench.engines import ENGINE_NAMES, WEIGHT_FORMATS
from moeserve.bench.harness import Row, environment, number, plain_parser, read_jsonl, save, show
from moeserve.bench.plots import Panel, save_bars
from moeserve.errors import MoeserveError

TABLE = re.compile(r"(<!-- begin throughput -->\n).*(<!-- end throughput -->)", re.DOTALL)
CHART = "plots/throughput.svg"  # next to the document; "-dark" is added for dark pages
KINDS = {"decode", "prefill"}
# Facts of a row that tables leave out: long, or the same in all rows
NOT_SHOWN = {"benchmark", "environment", "settings", "version", "limits", "workload", "goal", "goals"}


class ReportError(MoeserveError, ValueError):
    """The document, its comments or the results are missing."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = plain_parser("report", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="print the rows of these files of results instead")
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="folder of JSON lines")
    parser.add_argument("--document", type=Path, default=Path("docs/benchmarks.md"))
    options = parser.parse_args(arguments)
    for name in options.names:
        rows = read_results(options.results / f"{name}.jsonl")
        show("\n\n".join([*tables(rows), *machines(rows)]))
    if not options.names:
        for path in write_report(options.results / "throughput.jsonl", options.document):
            show(str(path))


def read_results(path: Path) -> list[Row]:
    if not path.is_file():
        raise ReportError(f"{path} does not exist; run this in the checkout, or use --results")
    return read_jsonl(path)


def write_report(results: Path, document: Path) -> list[Path]:
    """Write the document's table, and the chart next to it. Return the paths of the written files.

    Raises:
        ReportError: a file or the comments in the document do not exist.
        SettingsError: matplotlib is not installed.
    """
    rows = cells_of(read_results(results))
    if not document.is_file() or not TABLE.search(document.read_text(encoding="utf-8")):
        raise ReportError(f"{document} does not exist, or has no comments 'begin throughput' and 'end throughput'")
    document.write_text(fill(document.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return [document, *save_bars(document.parent / CHART, panels(rows), "share of the machine's limit", "{x:.0%}")]


def fill(text: str, rows: Sequence[Row]) -> str:
    """Return the document with its table replaced."""
    shown = "\n\n".join([throughput_table(rows), *machines(rows)])
    return TABLE.sub(lambda marks: f"{marks[1]}{shown}\n{marks[2]}", text)


def show_and_save(path: Path | None, rows: Sequence[Row], machine: Row | None = None) -> None:
    """Print the tables of a benchmark's new rows, and append the rows to a file."""
    rows = [row | {"environment": machine or environment()} for row in rows]
    save(path, rows)
    show("\n" + "\n\n".join(tables(rows)))


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table for each set of columns: one line for each row, or for each engine of a row.

    Rows of throughput have the table of the document.
    """
    cells = cells_of(row for row in rows if row["benchmark"] == "throughput")
    if cells:
        yield throughput_table(cells)
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        if row["benchmark"] == "throughput":
            continue
        others = flat({name: value for name, value in row.items() if name != "engines"})
        for name, figure in row.get("engines", {"": {}}).items():
            line = others | ({"engine": name} if name else {}) | flat(figure)
            found.setdefault(tuple(line), []).append(line)
    for columns, lines in found.items():
        yield markdown(columns, [list(line.values()) for line in lines])


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the words and numbers in a row as text. Names of nested ones are joined; lists are left out."""
    cells: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix} {key}".strip().replace("_", " ")
        if isinstance(value, dict) and key not in NOT_SHOWN:
            cells |= flat(value, name)
        elif not isinstance(value, (list, dict)) and key not in NOT_SHOWN:
            cells[name] = "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
    return cells


def cells_of(rows: Iterable[Row]) -> list[Row]:
    """Return the latest row for each model, instruction set and cell, in the order of their first rows."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        is_quantised = bool(WEIGHT_FORMATS.keys() & row["engines"].keys())
        row = {**row, "isa": isa_of(row), "cell": row["cell"] + (", quantised" if is_quantised else "")}
        found[row["model"], row["isa"], row["cell"]] = row
    return list(found.values())


def isa_of(row: Row) -> str:
    """Return the instruction set of moeserve's kernels. Early rows have only the processor's."""
    machine = row["environment"]
    ordered = {"amx_bf16": "amx", "avx512_bf16": "avx512_bf16", "avx512f": "avx512", "avx2": "avx2"}
    return machine.get("kernels") or next((name for flag, name in ordered.items() if flag in machine["isa"]), "torch")


def throughput_table(rows: Sequence[Row]) -> str:
    """Return a table of all cells: tokens per second of all engines, with the share of the limit, and the goal."""
    names = [name for name in ENGINE_NAMES if any(name in row["engines"] for row in rows)]
    lines = [
        [row["model"], row["isa"], row["cell"], *(engine_cell(row, name) for name in names), *goal_cells(row)]
        for row in rows
    ]
    return markdown(["model", "kernels", "cell", *names, "moeserve / best peer (goal)", "reached"], lines)


def engine_cell(row: Row, name: str) -> str:
    figure = row["engines"].get(name)
    return f"{number(figure['rate'])} ({figure['fraction_of_limit']:.0%})" if figure else ""


def goal_cells(row: Row) -> tuple[str, str]:
    """Return our ratios to the best peers, and the fractions of the goals reached, one for each of our engines."""
    goals = row.get("goals") or ({"moeserve": row["goal"]} if row.get("goal") else {})  # early rows have one, for bf16
    medians = {(each["engine"], each["baseline"]): each["median"] for each in row["ratios"]}
    found = [
        f"{medians[name, goal['best_peer']]:.2f} {goal['best_peer']} ({goal['ratio']})" for name, goal in goals.items()
    ]
    return "; ".join(found), "; ".join(f"{goal['reached']:.2f}" for goal in goals.values())


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Return the shares of the limit of engines in bf16, for models of which both decode and prefill were measured."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if "quantised" not in row["cell"]:
            cells = found.setdefault(f"{row['model']}, {row['isa']}", {})
            cells[row["cell"]] = {
                name: each["fraction_of_limit"] for name, each in row["engines"].items() if name not in WEIGHT_FORMATS
            }
    return [Panel(title, cells) for title, cells in found.items() if {each.split(",")[0] for each in cells} >= KINDS]


def machines(rows: Iterable[Row]) -> list[str]:
    """Return a line for each set of versions: the versions, and the day, machine and commit of each run with them."""
    runs: dict[str, dict[str, None]] = {}
    for row in rows:
        machine = row["environment"]
        versions = [f"{name} {version}" for name, version in machine["versions"].items() if version]
        peers = [each["version"] for name, each in row.get("engines", {}).items() if not name.startswith("moeserve")]
        commit = f"commit {machine['commit']}" if machine.get("commit") else "commit not recorded"
        cpu = f"{machine['cpu']} ({isa_of(row)})"
        if machine.get("cpu_family"):
            cpu = f"{machine['cpu']} (family {machine['cpu_family']}, model {machine['cpu_model']}, {isa_of(row)})"
        run = f"{machine['date'][:10]}, {cpu}, {machine['threads']} threads, {commit}"
        runs.setdefault(", ".join(dict.fromkeys([*versions, *peers])), {})[run] = None
    return ["\n".join(f"{versions}: {'; '.join(of_versions)}." for versions, of_versions in runs.items())]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a table whose first column is text and whose other columns are numbers."""
    rule = [":--", *(["--:"] * (len(head) - 1))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))
