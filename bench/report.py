"""Writes the tables and plots of docs/benchmarks.md from the rows in bench/results.

    moeserve bench report [--results FOLDER] [--document FILE]

In the document a table stands between the comments `<!-- begin NAME -->` and `<!-- end NAME -->`, and is replaced.
Where several rows describe the same measurement, the last one counts. All rows of the folder are shown, so results of
trial runs belong elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeserve.bench.engines import ENGINE_NAMES, WEIGHT_FORMATS
from moeserve.bench.harness import number, read_jsonl
from moeserve.bench.plots import Bar, Group, bar_chart
from moeserve.errors import MoeserveError
from moeserve.machine import shown_bytes

Row = Mapping[str, Any]
ORDER = (*ENGINE_NAMES, "kt-kernel")
PLOTS = "plots"  # a folder beside the document


class ReportError(MoeserveError, ValueError):
    """The document or the results are missing, or the document names an unknown table."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="moeserve bench report", description="Write the tables and plots of docs/benchmarks.md from results."
    )
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="folder of JSON lines")
    parser.add_argument("--document", type=Path, default=Path("docs/benchmarks.md"))
    options = parser.parse_args(arguments)
    for path in write_report(options.results, options.document):
        print(path)


def write_report(results: Path, document: Path) -> list[Path]:
    """Fill the document's tables and draw the plots beside it. Return the paths of the written files.

    Raises:
        ReportError: the document or the folder does not exist, or the document names an unknown table.
    """
    if not document.is_file() or not results.is_dir():
        missing = results if document.is_file() else document
        raise ReportError(f"{missing} does not exist; run this in the checkout, or use --results and --document")
    rows = [row for path in sorted(results.glob("*.jsonl")) for row in read_jsonl(path)]
    document.write_text(fill(document.read_text(encoding="utf-8"), rows), encoding="utf-8")
    written = [document]
    for name, image in plots(rows).items():
        path = document.parent / PLOTS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(image, encoding="utf-8")
        written.append(path)
    return written


def fill(text: str, rows: Sequence[Row]) -> str:
    """Return the document with every table replaced."""
    for begin, end in re.findall(r"<!-- begin (\w+) -->|<!-- end (\w+) -->", text):
        if (begin or end) not in TABLES:
            raise ReportError(f"there is no table {begin or end!r}; the tables are {', '.join(TABLES)}")
    for name, table in TABLES.items():
        found = rows_of(rows, name)
        shown = table(found) if found else "No results yet."
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text = pattern.sub(lambda marks, shown=shown: f"{marks[1]}{shown}\n{marks[2]}", text)  # type: ignore[misc]
    return text


def rows_of(rows: Iterable[Row], benchmark: str) -> list[Row]:
    """Return the rows of a benchmark. Comparisons with quantised engines get cells of their own."""
    found: list[Row] = [row for row in rows if row["benchmark"] == benchmark]
    if benchmark != "throughput":
        return found
    return [
        {**row, "cell": f"{row['cell']}, quantised"} if WEIGHT_FORMATS.keys() & row["engines"].keys() else row
        for row in found
    ]


def throughput_tables(rows: Sequence[Row]) -> str:
    """For each model, all cells with all engines and the goals."""
    cells = latest(rows, "model", "cell")
    tables = []
    for model, of_model in by(cells, "model").items():
        names = in_order({name for row in of_model for name in row["engines"]})
        lines = [
            [row["cell"], *(shown_rate(row["engines"].get(name)) for name in names), *goal_cells(row)]
            for row in of_model
        ]
        head = ["cell", *names, "moeserve / best peer (goal)", "reached"]
        tables.append(f"**{model}**, tokens per second (share of the limit)\n\n{markdown(head, lines)}")
        tables.append(image("throughput", model))
    if reasons := unique(reason for row in cells if row["goal"] for reason in row["goal"]["without"].items()):
        listed = "; ".join(f"{name} ({reason})" for name, reason in reasons)
        tables.append(f"Peers that were not measured in some cells: {listed}.")
    return "\n\n".join([*tables, machine_line(cells)])


def goal_cells(row: Row) -> list[str]:
    goal = row["goal"]
    if not goal:
        return ["", ""]
    peer = goal["best_peer"]
    ratio = next(each["median"] for each in row["ratios"] if (each["engine"], each["baseline"]) == ("moeserve", peer))
    return [f"{ratio:.2f} {peer} ({goal['ratio']})", f"{goal['reached']:.2f}"]


def moe_tables(rows: Sequence[Row]) -> str:
    """For each shape: numbers of rows with all engines."""
    cells = latest(rows, "shape_name", "num_rows")
    tables = []
    for shape_name, of_shape in by(cells, "shape_name").items():
        shape = of_shape[0]["shape"]
        sizes = f"{shape['num_experts']} x {shape['hidden']} x {shape['width']}, top-{shape['top_k']}"
        names = in_order({name for row in of_shape for name in row["engines"]})
        lines = [[str(row["num_rows"]), *(shown_rate(row["engines"].get(name)) for name in names)] for row in of_shape]
        table = markdown(["rows", *names], lines)
        tables.append(f"**{shape_name}**, {sizes}: rows per second (share of the limit)\n\n{table}")
        tables.append(image("moe", shape_name))
    return "\n\n".join([*tables, machine_line(cells)])


def latency_table(rows: Sequence[Row]) -> str:
    waits = list(itertools.product(("first_token", "between_tokens"), ("median", "p99")))
    head = ["model", "requests/s", "first token, ms", "99%", "between tokens, ms", "99%", "tokens/s"]
    return simple_table(
        latest(rows, "model", "engine", "requests_per_second"),
        head,
        lambda row: [
            f"{row['model']}, {row['engine']}",
            f"{row['requests_per_second']:g}",
            *(f"{row[wait][which] * 1e3:.0f}" for wait, which in waits),
            number(row["tokens_per_second"]),
        ],
    )


def startup_table(rows: Sequence[Row]) -> str:
    return simple_table(
        latest(rows, "model", "engine", "source", "quantization"),
        ["model", "engine", "source", "seconds", "of these loading", "imports before"],
        lambda row: [
            f"{row['model']}, {row['checkpoint_bytes'] / 1e9:.1f} GB",
            " ".join(filter(None, (row["engine"], row["quantization"]))),
            row["source"],
            number(row["seconds"]),
            "" if row["loading"] is None else number(row["loading"]),
            "" if row["imports"] is None else number(row["imports"]),
        ],
    )


def quality_table(rows: Sequence[Row]) -> str:
    return simple_table(
        latest(rows, "model", "variant"),
        ["model", "instead of bf16", "mean KL divergence, nats", "same most likely token", "positions"],
        lambda row: [
            row["model"],
            row["variant"],
            f"{row['mean_divergence']:.4f}",
            f"{row['share_same']:.1%}",
            str(row["num_positions"]),
        ],
    )


def attention_table(rows: Sequence[Row]) -> str:
    """For each kind and batch: the kernel's time by context, its speed-up over torch, and its share of the limit."""
    found = latest([{**row, "at": str(row["shape"])} for row in rows if row["name"] == "C++"], "at")
    found = [{**row, "kind": attention_kind(row["shape"]), "context": row["shape"]["context_len"]} for row in found]
    return pivot(
        found,
        ("kind",),
        "context",
        lambda row: f"{number(row['median_us'])} ({row['ratio']:.0f}x, {row['fraction_of_limit']:.0%})",
        lambda context: f"context {context}",
    )


def attention_kind(shape: Row) -> str:
    kind = "latent" if shape["latent_size"] else "grouped-query"
    step = f"batch {shape['batch']}" if shape["num_rows"] == 1 else "prefill"
    return f"{kind}, {shape['num_heads']} heads of {shape['head_size']}, {step}"


def collectives_table(rows: Sequence[Row]) -> str:
    """For each collective, the times through shared memory by size, and how many times as fast as gloo they are."""
    shared = latest([row for row in rows if row["transport"] != "gloo"], "num_ranks", "operation", "dtype", "num_bytes")
    return pivot(
        [{**row, "num_ranks": f"{row['num_ranks']} ranks"} for row in shared],
        ("num_ranks", "operation", "dtype"),
        "num_bytes",
        lambda row: f"{number(row['median_us'])} ({row['ratio_to_gloo']:.0f}x)",
        shown_bytes,
    )


def parallel_tables(rows: Sequence[Row]) -> str:
    """Agreement, dispatch and serving, as far as they were measured."""
    tables = []
    if agreements := latest([row for row in rows if row["table"] == "agreement"], "num_replicas"):
        lines = [[str(row["num_replicas"]), f"{row['median_us']:.0f}", f"{row['p99_us']:.0f}"] for row in agreements]
        tables.append(markdown(["replicas that agree", "median, µs", "99%, µs"], lines))
    dispatch_rows = [row for row in rows if row["table"] == "dispatch"]
    if dispatches := latest(dispatch_rows, "num_ranks", "tokens_per_rank", "dispatcher"):
        lines = []
        for (num_ranks, num_tokens), group in by(dispatches, "num_ranks", "tokens_per_rank").items():
            of = {row["dispatcher"]: row for row in group}
            lines.append([
                f"{num_ranks} ranks, {num_tokens} tokens",
                *(f"{of[name]['median_us']:.0f}" for name in ("allgather", "all_to_all")),
                f"{of['all_to_all']['ratio']:.2f}",
            ])  # fmt: skip
        head = ["dispatch and combine", "allgather, µs", "all_to_all, µs", "speed-up"]
        tables.append(markdown(head, lines))
    served = [{**row, "requests": row["workload"]["batch"]} for row in rows if row["table"] == "serving"]
    if servings := latest(served, "model", "what", "requests", "layout"):
        lines = []
        for (model, kind, requests), group in by(servings, "model", "what", "requests").items():
            alone = next(row for row in group if row["layout"] == "one rank")
            for layout in (row for row in group if row is not alone):
                lines.append([
                    f"{model}, {kind}, {requests} requests, {layout['layout']}",
                    number(layout["tokens_per_second"]),
                    number(alone["tokens_per_second"]),
                    f"{layout['ratio_to_one_rank']:.2f}",
                ])  # fmt: skip
        tables.append(markdown(["serving", "tokens/s", "one rank", "ratio"], lines))
    return "\n\n".join([*tables, machine_line(rows)])


def executors_table(rows: Sequence[Row]) -> str:
    """For each layout, the time of a step with each executor."""
    last = latest(rows, "tp", "dp")
    executors = unique(name for row in last for name in row["ways"])
    head = [
        "one decode step, µs",
        *(part for name in executors for part in ([name] if name == "mp" else [name, "added"])),
    ]

    def line(row: Row) -> list[str]:
        cells = [f"tp {row['tp']}, dp {row['dp']}"]
        for name in executors:
            cells.append(number(row["ways"][name]["seconds"] * 1e6))
            cells += [] if name == "mp" else [number(row["ways"][name]["added"] * 1e6)]
        return cells

    return simple_table(last, head, line)


def rebalance_table(rows: Sequence[Row]) -> str:
    """For each number of ranks, steps without balancing, and before, during and after a change of placement."""
    phases = ("without", "before", "during", "after")
    last = [{**row, "phase": phase} for row in latest(rows, "ranks", "tokens") for phase in phases]

    def line(row: Row) -> list[str]:
        balance = row["max_over_mean"].get(row["phase"])
        gains = [row["gain_over_without"], row["gain"]] if row["phase"] == "after" else []
        return [
            f"{row['ranks']} ranks, {row['phase']}",
            "" if balance is None else f"{balance:.2f}",
            number(row[row["phase"]]["p50"] * 1e3),
            number(row[row["phase"]]["p99"] * 1e3),
            *([f"{gain:.2f}" for gain in gains] or ["", ""]),
        ]

    head = ["", "fullest rank / mean", "step p50, ms", "step p99, ms", "tokens/s over without", "over before"]
    return simple_table(last, head, line)


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "throughput": throughput_tables,
    "moe": moe_tables,
    "latency": latency_table,
    "startup": startup_table,
    "attention": attention_table,
    "quality": quality_table,
    "collectives": collectives_table,
    "parallel": parallel_tables,
    "executors": executors_table,
    "rebalance": rebalance_table,
}


def plots(rows: Sequence[Row]) -> dict[str, str]:
    """Return images by file name: shares of the limit, one image for each model and each shape."""
    images = {}
    for benchmark, title, cell in (("throughput", "model", "cell"), ("moe", "shape_name", "num_rows")):
        for name, cells in by(latest(rows_of(rows, benchmark), title, cell), title).items():
            groups = [
                Group(
                    f"{row[cell]} rows" if cell == "num_rows" else row[cell],
                    tuple(
                        Bar(engine, row["engines"][engine]["fraction_of_limit"], shown_rate(row["engines"][engine]))
                        for engine in in_order(row["engines"])
                    ),
                )
                for row in cells
            ]
            images[image_name(benchmark, name)] = bar_chart(f"{name}: share of the machine's limit", groups)
    return images


def image(benchmark: str, name: str) -> str:
    return f"![{name}: share of the machine's limit]({PLOTS}/{image_name(benchmark, name)})"


def image_name(benchmark: str, name: str) -> str:
    return f"{benchmark}-{name}.svg"


def simple_table(rows: Sequence[Row], head: Sequence[str], line: Callable[[Row], list[str]]) -> str:
    return f"{markdown(head, [line(row) for row in rows])}\n\n{machine_line(rows)}"


def pivot(
    rows: Sequence[Row],
    keys: Sequence[str],
    column: str,
    cell: Callable[[Row], str],
    title: Callable[[Any], str],
) -> str:
    """Return a table with a line for each combination of the keys and a column for each value of `column`."""
    values = sorted({row[column] for row in rows})
    lines = []
    for group in latest(rows, *keys):
        found = {row[column]: cell(row) for row in rows if all(row[key] == group[key] for key in keys)}
        lines.append([", ".join(group[key] for key in keys), *(found.get(value, "") for value in values)])
    return f"{markdown(['', *map(title, values)], lines)}\n\n{machine_line(rows)}"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a table whose first column is text and whose other columns are numbers."""
    rule = [":--", *(["--:"] * (len(head) - 1))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def shown_rate(figure: Row | None) -> str:
    return f"{number(figure['rate'])} ({figure['fraction_of_limit']:.0%})" if figure else ""


def machine_line(rows: Sequence[Row]) -> str:
    """Return one sentence for each machine, day and commit of the rows."""
    facts = []
    for row in rows:
        machine = row["environment"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
        peers = unique(peer_facts(figure) for figure in row.get("engines", {}).values())
        peers = [peer for peer in peers if peer.split()[0] != "moeserve"]
        where = (
            f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['isa'])}), {machine['threads']} threads"
        )
        commit = f"commit {machine['commit']}" if machine.get("commit") else "commit not recorded"
        software = "; ".join([versions, *([f"peers: {', '.join(peers)}"] if peers else [])])
        facts.append(f"{machine['date'][:10]}, {where}, {commit}, Python {machine['python']}, {software}.")
    return "\n".join(unique(facts))


def peer_facts(figure: Row) -> str:
    """Return the peer's version, with the preloaded libraries if the row has recorded them."""
    preloaded = figure.get("settings", {}).get("preloaded")
    if preloaded is None:
        return str(figure["version"])
    return f"{figure['version']} ({' and '.join(preloaded) or 'nothing'} preloaded)"


def latest(rows: Iterable[Row], *keys: str) -> list[Row]:
    """Return the last row for each combination of values, in the order of their first rows."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found[tuple(row[key] for key in keys)] = row
    return list(found.values())


def by(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """Group rows by the values of the keys: a single value, or a tuple of them."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys), []).append(row)
    return groups


def in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=ORDER.index)


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


if __name__ == "__main__":
    main()
