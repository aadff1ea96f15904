"""Writes the tables and plots of docs/benchmarks.md from the rows in bench/results.

    moeserve bench report [--results FOLDER] [--document FILE]

In the document, the report replaces the text between the comments `<!-- begin NAME -->` and `<!-- end NAME -->`. If
several rows describe the same measurement, the last one is used. The report shows all rows of the folder, so results of
trial runs belong elsewhere.
"""

from __future__ import annotations

import argparse
import re
import statistics
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moeserve.bench.engines import ENGINE_NAMES, WEIGHT_FORMATS
from moeserve.bench.harness import Row, environment, number, read_jsonl, save, show
from moeserve.bench.plots import Bar, Group, bar_chart
from moeserve.errors import MoeserveError
from moeserve.machine import shown_bytes

Columns = list[tuple[str, str]]  # title, and the format of a row's cell
ORDER = (*ENGINE_NAMES, "moeserve-mxfp4", "kt-kernel")
PLOTS = "plots"  # a folder next to the document


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
    """Fill the document's tables, and draw the plots next to it. Return the paths of the written files.

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
    """Return the document with the contents of every table replaced."""
    for begin, end in re.findall(r"<!-- begin (\w+) -->|<!-- end (\w+) -->", text):
        if (begin or end) not in TABLES:
            raise ReportError(f"there is no table {begin or end!r}; the tables are {', '.join(TABLES)}")
    for name, tables in TABLES.items():
        found = rows_of(rows, name)
        shown = "\n\n".join([*tables(found), machine_line(found)]) if found else "No results yet."
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text = pattern.sub(lambda marks, shown=shown: f"{marks[1]}{shown}\n{marks[2]}", text)  # type: ignore[misc]
    return text


def show_and_save(path: Path | None, rows: Sequence[Row], machine: Row | None = None) -> None:
    """Print the tables of a benchmark's new rows, and append the rows to a file."""
    rows = [row | {"environment": machine or environment()} for row in rows]
    save(path, rows)
    for benchmark in by(rows, "benchmark"):
        found = rows_of(rows, benchmark)
        texts = [text for text in TABLES[benchmark](found) if not text.startswith("![")]
        show("\n" + "\n\n".join(texts))


def rows_of(rows: Iterable[Row], benchmark: str) -> list[Row]:
    """Return a benchmark's latest row for each combination of its keys, in the order of their first rows."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row["benchmark"] == benchmark:
            row = {**row, "kernels": row["environment"].get("kernels")}
            if benchmark == "throughput" and WEIGHT_FORMATS.keys() & row["engines"].keys():
                row = {**row, "cell": f"{row['cell']}, quantised"}
            found[tuple(str(row.get(key)) for key in KEYS[benchmark])] = row
    return list(found.values())


# The fields of a row that identify a measurement of a benchmark.
KEYS: dict[str, tuple[str, ...]] = {
    "throughput": ("model", "kernels", "cell"),
    "moe": ("shape_name", "kernels", "num_rows"),
    "latency": ("model", "engine", "requests_per_second"),
    "startup": ("model", "engine", "source", "quantization"),
    "kv_store": ("model", "engine", "conversations", "turns"),
    "disaggregated": ("model", "engine", "threads", "short_every", "long_every", "long_tokens"),
    "servers": ("model", "kernels", "workload", "clients"),
    "attention": ("name", "shape"),
    "sparse_attention": ("layer", "context", "rows", "kernels"),
    "linear_attention": ("operation", "case", "kernels"),
    "quality": ("model", "variant"),
    "collectives": ("transport", "num_ranks", "operation", "dtype", "num_bytes"),
    "parallel": (
        *("table", "num_replicas", "num_ranks", "tokens_per_rank", "dispatcher"),
        *("model", "what", "workload", "layout"),
    ),
    "executors": ("tp", "dp"),
    "rebalance": ("ranks", "tokens"),
    "scheduling": ("table", "model", "batch", "way"),
    "speculation": ("model", "way"),
}


class Cells(string.Formatter):
    """Formats figures. The format "3" stands for three significant digits; "ms" and "us" convert from seconds."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        scales = {"3": 1, "ms": 1e3, "us": 1e6}
        return number(value * scales[format_spec]) if format_spec in scales else format(value, format_spec)


COLUMNS: dict[str, Columns] = {
    "sparse_attention": [
        ("layer", "{layer}"),
        ("kernels", "{kernels}"),
        ("tokens", "{rows}"),
        ("context", "{context}"),
        ("indexer", "{indexer}"),
        ("sparse attention", "{sparse}"),
        ("full attention", "{full}"),
    ],
    "linear_attention": [
        ("operation", "{operation}"),
        ("kernels", "{kernels}"),
        ("step", "{case}"),
        ("us per token", "{microseconds:3}"),
        ("of the limit", "{fraction_of_limit:.0%}"),
    ],
    "scheduling": [
        ("table", "{table}"),
        ("model", "{model}"),
        ("batch", "{batch}"),
        ("configuration", "{way}"),
        ("tokens/s", "{rate:3}"),
        ("ratio", "{ratio:.2f}"),
        ("idle", "{idle:.0%}"),
    ],
    "speculation": [
        ("model", "{model}"),
        ("configuration", "{way}"),
        ("tokens/s", "{rate:3}"),
        ("speed-up", "{ratio:.2f}"),
        ("speed-up by CPU time", "{processor_ratio:.2f}"),
        ("acceptance rate", "{accepted:.0%}"),
        ("steps", "{steps:.0%}"),
    ],
    "latency": [
        ("model", "{model}, {engine}"),
        ("requests/s", "{requests_per_second:g}"),
        ("first token, ms", "{first_token[median]:ms}"),
        ("p99", "{first_token[p99]:ms}"),
        ("between tokens, ms", "{between_tokens[median]:ms}"),
        ("p99", "{between_tokens[p99]:ms}"),
        ("tokens/s", "{tokens_per_second:3}"),
    ],
    "kv_store": [
        ("model", "{model}, {conversations} conversations of {turns} turns"),
        ("engine", "{engine}"),
        ("new tokens/s", "{tokens_per_second:3}"),
        ("speed-up", "{speed_up:.2f}"),
        ("computed", "{computed:.0%}"),
    ],
    "disaggregated": [
        ("model", "{model}, {threads} threads"),
        ("engine", "{engine}"),
        ("short prompts: first token, ms", "{short[median]:ms}"),
        ("p99", "{short[p99]:ms}"),
        ("speed-up", "{speed_up:.2f}"),
        ("long prompts: first token, ms", "{long[median]:ms}"),
    ],
    "servers": [
        ("clients", "{clients}, {name}"),
        ("tokens/s", "{rate:3}"),
        ("moeserve's speed-up", "{over:.2f}"),
        ("first token, ms", "{first_token[median]:ms}"),
        ("p99", "{first_token[p99]:ms}"),
        ("between tokens, ms", "{between_tokens[median]:ms}"),
        ("p99", "{between_tokens[p99]:ms}"),
    ],
    "startup": [
        ("model", "{model}, {gigabytes:.1f} GB"),
        ("engine", "{engine} {quantization}"),
        ("source", "{source}"),
        ("seconds", "{seconds:3}"),
        ("loading", "{loading:3}"),
        ("imports", "{imports:3}"),
        ("after `import torch`", "{beyond_torch:3}"),
    ],
    "quality": [
        ("model", "{model}"),
        ("format", "{variant}"),
        ("mean KL divergence, nats", "{mean_divergence:.4f}"),
        ("same most likely token", "{share_same:.1%}"),
        ("positions", "{num_positions}"),
    ],
    "executors": [
        ("one decode step, µs", "tp {tp}, dp {dp}"),
        ("mp", "{ways[mp][seconds]:us}"),
        ("ray, compiled graph", "{ways[ray, compiled graph][seconds]:us}"),
        ("added", "{ways[ray, compiled graph][added]:us}"),
        ("ray, plain calls", "{ways[ray, plain calls][seconds]:us}"),
        ("added", "{ways[ray, plain calls][added]:us}"),
    ],
    "agreement": [
        ("agreement of replicas", "{num_replicas}"),
        ("median, µs", "{median_us:.0f}"),
        ("p99, µs", "{p99_us:.0f}"),
    ],
    "dispatch": [
        ("dispatch and combine", "{num_ranks} ranks, {tokens_per_rank} tokens, {dispatcher}"),
        ("µs", "{median_us:.0f}"),
        ("allgather, µs", "{base[median_us]:.0f}"),
        ("speed-up", "{ratio:.2f}"),
    ],
    "serving": [
        ("serving", "{model}, {what}, {workload[batch]} requests, {layout}"),
        ("tokens/s", "{tokens_per_second:3}"),
        ("one rank", "{base[tokens_per_second]:3}"),
        ("ratio", "{ratio_to_one_rank:.2f}"),
    ],
    "rebalance": [
        ("", "{ranks} ranks, {phase}"),
        ("fullest rank / mean", "{balance:.2f}"),
        ("step p50, ms", "{steps[p50]:ms}"),
        ("step p99, ms", "{steps[p99]:ms}"),
        ("speed-up over no redundancy", "{gains[0]:.2f}"),
        ("speed-up over before", "{gains[1]:.2f}"),
    ],
}


def throughput_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table for each model: all cells with all engines and the goals."""
    goals: Columns = [("moeserve / best peer (goal)", "{best}"), ("reached", "{reached:.2f}")]
    for model, cells in by_title(rows, "model").items():
        yield f"**{model}**, tokens per second (share of the limit)"
        yield engines_table([row | goal_cells(row) for row in cells], ("cell", "{cell}"), goals)
        yield image("throughput", model)
    if reasons := unique(reason for row in rows if row["goal"] for reason in row["goal"]["without"].items()):
        listed = "; ".join(f"{name} ({reason})" for name, reason in reasons)
        yield f"Peers that were not measured in some cells: {listed}."


def goal_cells(row: Row) -> Row:
    goal = row["goal"]
    if not goal:
        return {"best": None, "reached": None}
    pair = ("moeserve", goal["best_peer"])
    ratio = next(each["median"] for each in row["ratios"] if (each["engine"], each["baseline"]) == pair)
    return {"best": f"{ratio:.2f} {goal['best_peer']} ({goal['ratio']})", "reached": goal["reached"]}


def moe_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table for each shape: all numbers of rows with all engines."""
    for name, cells in by_title(rows, "shape_name").items():
        sizes = "{num_experts} x {hidden} x {width}, top-{top_k}".format(**cells[0]["shape"])
        yield f"**{name}**, {sizes}: rows per second (share of the limit)"
        yield engines_table(cells, ("rows", "{num_rows}"), [])
        yield image("moe", name)


def engines_table(rows: Sequence[Row], first: tuple[str, str], last: Columns) -> str:
    """Return a table with a column for each engine."""
    names = in_order({name for row in rows for name in row["engines"]})
    shown = [row | {"rates": {name: engine_cell(row, name) for name in names}} for row in rows]
    return table(shown, [first, *((name, f"{{rates[{name}]}}") for name in names), *last])


def engine_cell(row: Row, name: str) -> str | None:
    """Return the rate of an engine and its share of the limit; None if it was not measured."""
    figure = row["engines"].get(name)
    return f"{number(figure['rate'])} ({figure['fraction_of_limit']:.0%})" if figure else None


def servers_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table for each model: all servers by number of clients, with moeserve's median speed-up over them."""
    for model, cells in by_title(rows, "model").items():
        yield f"**{model}**"
        yield table(
            [row | {"name": name, "over": None} | each for row in cells for name, each in servers(row)],
            COLUMNS["servers"],
        )


def servers(row: Row) -> Iterator[tuple[str, Row]]:
    own = row["engines"].get("moeserve")
    for name, figure in row["engines"].items():
        rates = [] if own is None or name == "moeserve" else zip(own["rounds"], figure["rounds"], strict=True)
        over = [mine["rate"] / other["rate"] for mine, other in rates]
        yield name, figure | ({"over": statistics.median(over)} if over else {})


def startup_tables(rows: Sequence[Row]) -> Iterator[str]:
    shown = [{"beyond_torch": None} | row | {"gigabytes": row["checkpoint_bytes"] / 1e9} for row in rows]
    yield table(shown, COLUMNS["startup"])


def attention_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table for each kind and batch: the kernel's time by context, its speed-up, and its share of the limit."""

    def line(row: Row) -> str:
        shape = row["shape"]
        kind = "latent" if shape["latent_size"] else "grouped-query"
        step = f"batch {shape['batch']}" if shape["num_rows"] == 1 else "prefill"
        return f"{kind}, {shape['num_heads']} heads of {shape['head_size']}, {step}"

    yield pivot(
        [row | {"line": line(row), "column": row["shape"]["context_len"]} for row in rows if row["name"] == "C++"],
        "{median_us:3} ({ratio:.0f}x, {fraction_of_limit:.0%})",
        lambda context: f"context {context}",
    )


def collectives_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table for each collective: the times through shared memory by size, and the speed-up over gloo."""
    yield pivot(
        [
            row | {"line": f"{row['num_ranks']} ranks, {row['operation']}, {row['dtype']}", "column": row["num_bytes"]}
            for row in rows
            if row["transport"] != "gloo"
        ],
        "{median_us:3} ({ratio_to_gloo:.0f}x)",
        shown_bytes,
    )


def parallel_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the tables of agreement, dispatch and serving that have rows."""
    tables = by(rows, "table")
    bases = {
        "dispatch": ("dispatcher", "allgather", ("num_ranks", "tokens_per_rank")),
        "serving": ("layout", "one rank", ("model", "what", "workload")),
    }
    for name, found in tables.items():
        yield table(beside(found, *bases[name]) if name in bases else found, COLUMNS[name])


def beside(rows: Sequence[Row], key: str, base: str, same: Sequence[str]) -> list[Row]:
    """Return the rows whose `key` is not `base`, each with the row of `base` that has the same other values."""
    bases = {tuple(str(row[each]) for each in same): row for row in rows if row[key] == base}
    return [row | {"base": bases[tuple(str(row[each]) for each in same)]} for row in rows if row[key] != base]


def rebalance_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table for each number of ranks: steps without rebalancing, and before, during and after a change."""
    phases = [
        row | {"phase": phase, "steps": row[phase], "balance": row["max_over_mean"].get(phase), "gains": [None, None]}
        for row in rows
        for phase in ("without", "before", "during", "after")
    ]
    for row in phases:
        if row["phase"] == "after":
            row["gains"] = [row["gain_over_without"], row["gain"]]
    yield table(phases, COLUMNS["rebalance"])


def sparse_attention_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table, and the plots of the time per token of a prompt."""
    cells = []
    for row in rows:
        found = {
            name: f"{number(own)} us ({row['fractions'][name]:.0%})" if row["fractions"][name] else f"{number(own)} us"
            for name, own in row["microseconds"].items()
        }
        cells.append(row | {"indexer": "", "full": ""} | found)
    yield table(cells, COLUMNS["sparse_attention"])
    for name in sparse_attention_plots(rows):
        yield f"![time per token of a prompt at growing contexts]({PLOTS}/{name})"


def sparse_attention_plots(rows: Sequence[Row]) -> dict[str, str]:
    """Return images of the time per token of a prompt at growing contexts, one for each instruction set."""
    images = {}
    for kernels, found in by((row for row in rows if row["rows"] > 1), "kernels").items():
        groups = []
        for context, of_context in by(found, "context").items():
            bars = [
                Bar(f"{row['short']}, {operation}", own[name], f"{number(own[name])} us")
                for row, own in ((row, row["microseconds"]) for row in of_context)
                for name, operation in (("indexer", "indexer"), ("sparse", "attention"))
                if name in own
            ]
            groups.append(Group(f"context of {context} tokens", tuple(bars)))
        title = f"Time per token of a prompt in one layer, one thread ({kernels})"
        images[f"sparse-attention-{kernels}.svg"] = bar_chart(title, groups)
    return images


TABLES: dict[str, Callable[[Sequence[Row]], Iterable[str]]] = {
    "throughput": throughput_tables,
    "moe": moe_tables,
    "latency": lambda rows: [table(rows, COLUMNS["latency"])],
    "startup": startup_tables,
    "kv_store": lambda rows: [table(rows, COLUMNS["kv_store"])],
    "disaggregated": lambda rows: [table(rows, COLUMNS["disaggregated"])],
    "servers": servers_tables,
    "attention": attention_tables,
    "sparse_attention": sparse_attention_tables,
    "linear_attention": lambda rows: [table(rows, COLUMNS["linear_attention"])],
    "quality": lambda rows: [table(rows, COLUMNS["quality"])],
    "collectives": collectives_tables,
    "parallel": parallel_tables,
    "executors": lambda rows: [table(rows, COLUMNS["executors"])],
    "rebalance": rebalance_tables,
    "scheduling": lambda rows: [table(rows, COLUMNS["scheduling"])],
    "speculation": lambda rows: [table(rows, COLUMNS["speculation"])],
}


def plots(rows: Sequence[Row]) -> dict[str, str]:
    """Return images by file name: shares of the limit for each model and shape, and times of sparse attention."""
    images = sparse_attention_plots(rows_of(rows, "sparse_attention"))
    for benchmark, title, cell in (("throughput", "model", "{cell}"), ("moe", "shape_name", "{num_rows} rows")):
        for name, cells in by_title(rows_of(rows, benchmark), title).items():
            groups = []
            for row in cells:
                bars = [
                    Bar(engine, row["engines"][engine]["fraction_of_limit"], engine_cell(row, engine) or "")
                    for engine in in_order(row["engines"])
                ]
                groups.append(Group(cell.format_map(row), tuple(bars)))
            images[image_name(benchmark, name)] = bar_chart(f"{name}: share of the machine's limit", groups)
    return images


def image(benchmark: str, name: str) -> str:
    return f"![{name}: share of the machine's limit]({PLOTS}/{image_name(benchmark, name)})"


def image_name(benchmark: str, name: str) -> str:
    return f"{benchmark}-{name.replace(', ', '-')}.svg"


def table(rows: Sequence[Row], columns: Columns) -> str:
    lines = [[Cells().vformat(cell, (), row).strip() for _, cell in columns] for row in rows]
    return markdown([title for title, _ in columns], lines)


def pivot(rows: Sequence[Row], cell: str, title: Callable[[int], str]) -> str:
    """Return a table with a line for each value of "line" in the rows, and a column for each value of "column"."""
    values = sorted({row["column"] for row in rows})
    lines: dict[str, Row] = {}
    for row in rows:
        lines.setdefault(row["line"], {})[row["column"]] = Cells().vformat(cell, (), row)
    cells = [[name, *(found.get(value, "") for value in values)] for name, found in lines.items()]
    return markdown(["", *map(title, values)], cells)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a table whose first column is text and whose other columns are numbers."""
    rule = [":--", *(["--:"] * (len(head) - 1))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def machine_line(rows: Sequence[Row]) -> str:
    """Return one sentence for each machine, day and commit of the rows."""
    facts = []
    for row in rows:
        machine = row["environment"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
        figures = [
            figure for name, figure in row.get("engines", {}).items() if not name.startswith(("moeserve", "asyncllm"))
        ]
        peers = ", ".join(unique(map(peer_facts, figures)))
        isa = ", ".join(machine["isa"])
        if kernels := machine.get("kernels"):
            isa += f"; moeserve's kernels: {kernels}"
        commit = f"commit {machine['commit']}" if machine.get("commit") else "commit not recorded"
        facts.append(
            f"{machine['date'][:10]}, {machine['cpu']}, {machine['cores']} cores ({isa}), {machine['threads']} threads"
            f", {commit}, Python {machine['python']}, {versions}{'; peers: ' if peers else ''}{peers}."
        )
    return "\n".join(unique(facts))


def peer_facts(figure: Row) -> str:
    """Return the peer's version, with its preloaded libraries if the row records them."""
    preloaded = figure.get("settings", {}).get("preloaded")
    if preloaded is None:
        return str(figure["version"])
    return f"{figure['version']} ({' and '.join(preloaded) or 'nothing'} preloaded)"


def by(rows: Iterable[Row], key: str) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def by_title(rows: Iterable[Row], key: str) -> dict[str, list[Row]]:
    """Group rows by a model or shape, and by the instruction set of moeserve's kernels if it was recorded."""
    facts = ((row, (row[key], row["environment"].get("kernels"))) for row in rows)
    return by([row | {"title": ", ".join(filter(None, names))} for row, names in facts], "title")


def in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=ORDER.index)


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


if __name__ == "__main__":
    main()
