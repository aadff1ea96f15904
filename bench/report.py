"""Writes the tables and plots of docs/benchmarks.md from the rows in bench/results. Measures nothing.

    moeserve bench report [--results FOLDER] [--document FILE]

In the document a table stands between two comments, `<!-- begin NAME -->` and `<!-- end NAME -->`, and what stands
there is replaced. Where several rows tell of the same thing, the last one counts. Rows of small runs belong in other
folders: all that are found are shown.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeserve.bench.engines import ENGINE_NAMES, FORMATS_OF
from moeserve.bench.harness import read_jsonl
from moeserve.bench.plots import Bar, Group, bar_chart
from moeserve.bench.tables import markdown, number
from moeserve.errors import MoeserveError
from moeserve.machine import shown_bytes

Row = Mapping[str, Any]
ORDER = (*ENGINE_NAMES, "kt-kernel")
PLOTS = "plots"  # a folder beside the document


class ReportError(MoeserveError, ValueError):
    """The document or the results are not where they should be, or not as they should be."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="moeserve bench report", description="Writes tables and plots from results.")
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="folder of JSON lines")
    parser.add_argument("--document", type=Path, default=Path("docs/benchmarks.md"))
    options = parser.parse_args(arguments)
    for path in write_report(options.results, options.document):
        print(path)


def write_report(results: Path, document: Path) -> list[Path]:
    """Fills the document's tables and draws the plots beside it. Returns what was written.

    Raises:
        ReportError: there is no such document or folder, or the document has a mark that nobody fills.
    """
    if not document.is_file() or not results.is_dir():
        missing = results if document.is_file() else document
        raise ReportError(f"{missing} does not exist; run this in the checkout, or name it")
    rows = [row for path in sorted(results.glob("*.jsonl")) for row in read_jsonl(path)]
    document.write_text(fill(document.read_text(encoding="utf-8"), rows), encoding="utf-8")
    written = [document]
    for name, image in plots(rows).items():
        path = document.parent / PLOTS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(image, encoding="utf-8")
        written.append(path)
    return written


def with_own_cell(row: Row) -> Row:
    """A comparison of quantised engines does not take the place of the same one of others."""
    if row["benchmark"] == "throughput" and FORMATS_OF.keys() & row["engines"].keys():
        return {**row, "cell": f"{row['cell']}, quantised"}
    return row


def fill(text: str, rows: Sequence[Row]) -> str:
    """The text of a document with every table made anew."""
    for begin, end in re.findall(r"<!-- begin (\w+) -->|<!-- end (\w+) -->", text):
        if (begin or end) not in TABLES:
            raise ReportError(f"there is no table {begin or end!r}; there are {', '.join(TABLES)}")
    for name, table in TABLES.items():
        found = [with_own_cell(row) for row in rows if row["benchmark"] == name]
        shown = table(found) if found else "No results yet."
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text = pattern.sub(lambda marks, shown=shown: f"{marks[1]}{shown}\n{marks[2]}", text)  # type: ignore[misc]
    return text


def throughput_tables(rows: Sequence[Row]) -> str:
    """For each model, all cells beside all engines; then what the goals ask, and what quantising brings."""
    cells = latest(rows, "model", "cell")
    tables = []
    for model in unique(row["model"] for row in cells):
        of_model = [row for row in cells if row["model"] == model]
        tables.append(f"**{model}**, tokens per second (share of the limit)\n\n{engines_table(of_model, 'cell')}")
        tables.append(image("throughput", model))
        if goals := [row for row in of_model if row["goal"]]:
            tables.append(goals_table(goals))
        if ratios := [each for row in of_model for each in row["ratios"] if each["engine"] != "moeserve"]:
            pairs = unique((each["engine"], each["baseline"]) for each in ratios)
            lines = [[row["cell"], *(ratio_of(row, *pair) for pair in pairs)] for row in of_model]
            lines = [line for line in lines if any(line[1:])]
            tables.append(markdown(["quantised, ratio", *(f"{one} / {other}" for one, other in pairs)], lines))
    return "\n\n".join([*tables, machine_line(cells)])


def goals_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        goal = row["goal"]
        own = row["engines"]["moeserve"]
        lines.append([
            row["cell"],
            goal["best_peer"],
            ratio_of(row, "moeserve", goal["best_peer"]),
            f"{goal['ratio']}",
            f"{own['fraction_of_limit']:.0%}",
            f"{goal['reached']:.2f}",
            ", ".join(goal["without"]),
        ])  # fmt: skip
    of_limit = rows[0]["goal"]["of_limit"]
    head = ["cell", "best peer", "moeserve / best peer", "goal", "of the limit", "reached", "without"]
    says = [f"*reached*: moeserve's rate over goal x best peer, or over {of_limit} of the limit where that is lower."]
    if reasons := unique(reason for row in rows for reason in row["goal"]["without"].items()):
        told = "; ".join(f"{name} ({reason})" for name, reason in reasons)
        says.append(f"*without*: peers that were not measured, one of which might have been the best: {told}.")
    return "\n\n".join([markdown(head, lines), *says])


def moe_tables(rows: Sequence[Row]) -> str:
    """For each shape, numbers of rows beside engines."""
    cells = latest(rows, "shape_name", "num_rows")
    tables = []
    for shape_name in unique(row["shape_name"] for row in cells):
        of_shape = [row for row in cells if row["shape_name"] == shape_name]
        shape = of_shape[0]["shape"]
        sizes = f"{shape['num_experts']} x {shape['hidden']} x {shape['width']}, top-{shape['top_k']}"
        tables.append(
            f"**{shape_name}**, {sizes}: rows per second (share of the limit)\n\n{engines_table(of_shape, 'num_rows')}"
        )
        tables.append(image("moe", shape_name))
    return "\n\n".join([*tables, machine_line(cells)])


def latency_table(rows: Sequence[Row]) -> str:
    last = latest(rows, "model", "engine", "requests_per_second")
    waits = list(itertools.product(("first_token", "between_tokens"), ("median", "p99")))
    head = ["model", "requests/s", "first token, ms", "99 %", "between tokens, ms", "99 %", "tokens/s"]
    lines = [
        [
            f"{row['model']}, {row['engine']}",
            f"{row['requests_per_second']:g}",
            *(f"{row[wait][which] * 1e3:.0f}" for wait, which in waits),
            number(row["tokens_per_second"]),
        ]
        for row in last
    ]  # fmt: skip
    return f"{markdown(head, lines)}\n\n{machine_line(last)}"


def startup_table(rows: Sequence[Row]) -> str:
    last = latest(rows, "model", "engine", "source", "quantization")
    head = ["model", "engine", "from", "seconds", "of these loading", "imports before"]
    lines = [
        [
            f"{row['model']}, {row['checkpoint_bytes'] / 1e9:.1f} GB",
            " ".join(filter(None, (row["engine"], row["quantization"]))),
            row["source"],
            number(row["seconds"]),
            "" if row["loading"] is None else number(row["loading"]),
            "" if row["imports"] is None else number(row["imports"]),
        ]
        for row in last
    ]
    return f"{markdown(head, lines)}\n\n{machine_line(last)}"


def parallel_tables(rows: Sequence[Row]) -> str:
    """Agreement, dispatch and serving, those of them that were measured."""
    tables = []
    if agreements := latest([row for row in rows if row["table"] == "agreement"], "num_replicas"):
        lines = [[str(row["num_replicas"]), f"{row['median_us']:.0f}", f"{row['p99_us']:.0f}"] for row in agreements]
        tables.append(markdown(["replicas that agree", "median, µs", "99 %, µs"], lines))
    of_dispatch = [row for row in rows if row["table"] == "dispatch"]
    if dispatches := latest(of_dispatch, "num_ranks", "tokens_per_rank", "dispatcher"):
        lines = [
            [
                f"{row['num_ranks']} ranks, {row['tokens_per_rank']} tokens, {row['dispatcher']}",
                f"{row['median_us']:.0f}",
                f"{row['exchanging']:.0%}",
                shown_bytes(round(row["bytes_sent_per_rank"])),
                f"{row['ratio']:.2f}",
            ]
            for row in dispatches
        ]
        tables.append(markdown(["dispatch and combine", "median, µs", "exchanging", "sent", "speed-up"], lines))
    served = [{**row, "requests": row["workload"]["batch"]} for row in rows if row["table"] == "serving"]
    if servings := latest(served, "model", "what", "requests", "layout"):
        lines = [
            [
                f"{row['model']}, {row['what']}, {row['requests']} requests, {row['layout']}",
                number(row["tokens_per_second"]),
                f"{row['ratio_to_one_rank']:.2f}",
            ]
            for row in servings
        ]
        tables.append(markdown(["serving", "tokens/s", "of one rank"], lines))
    return "\n\n".join([*tables, machine_line(rows)])


def quality_table(rows: Sequence[Row]) -> str:
    """For each model and format, how far its probabilities are from bf16's."""
    last = latest(rows, "model", "variant")
    head = ["model", "instead of bf16", "mean KL divergence, nats", "same likeliest token", "positions"]
    lines = [
        [
            row["model"],
            row["variant"],
            f"{row['mean_divergence']:.4f}",
            f"{row['share_same']:.1%}",
            str(row["num_positions"]),
        ]
        for row in last
    ]
    return f"{markdown(head, lines)}\n\n{machine_line(last)}"


def attention_table(rows: Sequence[Row]) -> str:
    """For each batch and context, the C++ kernel beside torch."""
    last = latest([{**row, "at": attention_shape(row)} for row in rows], "at", "name")
    torch_us = {row["at"]: row["median_us"] for row in last if row["name"] == "torch"}
    kernel_rows = [row for row in last if row["name"] == "C++"]
    lines = [
        [
            row["at"],
            number(torch_us[row["at"]]),
            number(row["median_us"]),
            f"{row['ratio']:.1f}",
            f"{row['fraction_of_limit']:.0%}",
        ]
        for row in kernel_rows
    ]
    head = ["attention", "torch, µs", "C++, µs", "speed-up", "of the limit"]
    return f"{markdown(head, lines)}\n\n{machine_line(kernel_rows)}"


def attention_shape(row: Row) -> str:
    shape = row["shape"]
    kind = "latent" if shape.get("latent_size") else "grouped-query"
    return f"{kind}, batch {shape['batch']}, context {shape['context_len']}"


def executors_table(rows: Sequence[Row]) -> str:
    """For each layout, what a step takes with each executor."""
    last = latest(rows, "tp", "dp")
    ways = unique(way for row in last for way in row["ways"])
    head = ["one decode step, µs", *(part for way in ways for part in ([way] if way == "mp" else [way, "added"]))]
    lines = []
    for row in last:
        line = [f"tp {row['tp']}, dp {row['dp']}"]
        for way in ways:
            line.append(number(row["ways"][way]["seconds"] * 1e6))
            line += [] if way == "mp" else [number(row["ways"][way]["added"] * 1e6)]
        lines.append(line)
    return f"{markdown(head, lines)}\n\n{machine_line(last)}"


def collectives_table(rows: Sequence[Row]) -> str:
    """For each number of ranks, operation and size, both transports."""
    last = latest(rows, "num_ranks", "operation", "dtype", "num_bytes", "transport")
    gloo = {_collective(row): row for row in last if row["transport"] == "gloo"}
    head = ["ranks", "collective", "bytes", "shared memory, µs", "gloo, µs", "faster"]
    lines = [
        [
            str(row["num_ranks"]),
            f"{row['operation']}, {row['dtype']}" if row["dtype"] != "float32" else row["operation"],
            shown_bytes(row["num_bytes"]),
            number(row["median_us"]),
            number(gloo[_collective(row)]["median_us"]),
            f"{row['ratio_to_gloo']:.1f}",
        ]
        for row in last
        if row["transport"] != "gloo"
    ]
    return f"{markdown(head, lines)}\n\n{machine_line(last)}"


def _collective(row: Row) -> tuple[Any, ...]:
    return row["num_ranks"], row["operation"], row["dtype"], row["num_bytes"]


def rebalance_table(rows: Sequence[Row]) -> str:
    """For each number of ranks, steps without balancing, and before, while and after experts moved."""
    last = latest(rows, "ranks", "tokens")
    head = ["", "fullest rank / mean", "step p50, ms", "step p99, ms", "tokens/s over without", "over before"]
    lines = []
    for row in last:
        for when in ("without", "before", "during", "after"):
            balance = row["max_over_mean"].get(when)
            gains = [row["gain_over_without"], row["gain"]] if when == "after" else []
            lines.append(
                [
                    f"{row['ranks']} ranks, {when}",
                    "" if balance is None else f"{balance:.2f}",
                    number(row[when]["p50"] * 1e3),
                    number(row[when]["p99"] * 1e3),
                    *([f"{gain:.2f}" for gain in gains] or ["", ""]),
                ]
            )
    return f"{markdown(head, lines)}\n\n{machine_line(last)}"


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
    """Images by the name of their file: shares of the limit, one image for each model, and one for each shape."""
    images = {}
    for benchmark, of_what, cell in (("throughput", "model", "cell"), ("moe", "shape_name", "num_rows")):
        cells = latest([with_own_cell(row) for row in rows if row["benchmark"] == benchmark], of_what, cell)
        for name in unique(row[of_what] for row in cells):
            groups = [
                Group(
                    f"{row[cell]} rows" if cell == "num_rows" else row[cell],
                    tuple(
                        Bar(engine, row["engines"][engine]["fraction_of_limit"], shown_rate(row["engines"][engine]))
                        for engine in in_order(row["engines"])
                    ),
                )
                for row in cells
                if row[of_what] == name
            ]
            images[image_name(benchmark, name)] = bar_chart(f"{name}: share of the machine's limit", groups)
    return images


def image(benchmark: str, name: str) -> str:
    return f"![{name}: share of the machine's limit]({PLOTS}/{image_name(benchmark, name)})"


def image_name(benchmark: str, name: str) -> str:
    return f"{benchmark}-{name}.svg"


def engines_table(rows: Sequence[Row], cell: str) -> str:
    """One line for each row, one column for each engine of any row, and the limit of bf16 weights."""
    names = in_order({name for row in rows for name in row["engines"]})
    lines = []
    for row in rows:
        shown = [shown_rate(row["engines"][name]) if name in row["engines"] else "" for name in names]
        lines.append([str(row[cell]), *shown])
    return markdown([cell.replace("num_", ""), *names], lines)


def shown_rate(figure: Row) -> str:
    return f"{number(figure['rate'])} ({figure['fraction_of_limit']:.0%})"


def ratio_of(row: Row, engine: str, baseline: str) -> str:
    """As measured in the row, or nothing."""
    found = [each for each in row["ratios"] if (each["engine"], each["baseline"]) == (engine, baseline)]
    return f"{found[0]['median']:.2f}" if found else ""


def machine_line(rows: Sequence[Row]) -> str:
    """Where and when the rows were measured; one sentence for each machine and day."""
    facts = []
    for row in rows:
        machine = row["environment"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
        peers = unique(peer_facts(figure) for figure in row.get("engines", {}).values())
        peers = [peer for peer in peers if peer.split()[0] != "moeserve"]
        isa = ", ".join(machine["isa"])
        where = f"{machine['cpu']}, {machine['cores']} cores ({isa}), {machine['threads']} threads"
        told = "; ".join([versions, *([f"peers: {', '.join(peers)}"] if peers else [])])
        facts.append(f"{machine['date'][:10]}, {where}, Python {machine['python']}, {told}.")
    return "\n".join(unique(facts))


def peer_facts(figure: Row) -> str:
    """A version, and what was preloaded where the row tells that something was, or was not."""
    preloaded = figure.get("settings", {}).get("preloaded")
    if preloaded is None:
        return str(figure["version"])
    return f"{figure['version']} ({' and '.join(preloaded) or 'nothing'} preloaded)"


def latest(rows: Iterable[Row], *keys: str) -> list[Row]:
    """The last row for each combination of these, in the order in which they first came."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found[tuple(row[key] for key in keys)] = row
    return list(found.values())


def in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=ORDER.index)


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


if __name__ == "__main__":
    main()
