"""The report: the table between comments, the last row of each cell, bars to scale."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moeserve import cli
from moeserve.bench import report
from moeserve.bench.harness import read_jsonl, save
from moeserve.bench.plots import COLOURS, Panel, save_bars, save_lines

MACHINE = {
    "date": "2026-01-02T03:04:05+00:00", "cpu": "A CPU", "cores": 2, "threads": 2, "isa": ["avx2"], "python": "3.11",
    "commit": "0123abc",
    "versions": {"moeserve": "0.1.0", "torch": "2.13"},
}  # fmt: skip
SETTINGS = {"vllm": {"threads": 2, "preloaded": ["libtcmalloc.so", "libiomp5.so"]}}
WITHOUT = {"llama.cpp-bf16": "not installed; run: something"}


QUANTISED_AND_8 = [
    [
        "some-model",
        "avx2",
        "decode, batch 1, quantised",
        "40.0 (40%)",
        "70.0 (70%)",
        "20.0 (20%)",
        "2.00 vllm (1.15)",
        "0.97",
    ],
    ["some-model", "avx2", "decode, batch 8", "50.0 (50%)", "", "80.0 (80%)", "0.62 vllm (1.15)", "0.97"],
]


def throughput_row(cell: str, rates: dict[str, float], limit: float = 100.0) -> dict[str, Any]:
    return {
        "benchmark": "throughput",
        "model": "some-model",
        "cell": cell,
        "engines": {
            name: {
                "version": f"{name} 1.0",
                "settings": SETTINGS.get(name, {}),
                "rate": rate,
                "fraction_of_limit": rate / limit,
            }
            for name, rate in rates.items()
        },
        "ratios": [
            {"engine": "moeserve", "baseline": "vllm", "median": rates["moeserve"] / rates["vllm"]},
        ],
        "goal": {"best_peer": "vllm", "ratio": 1.15, "of_limit": 0.85, "reached": 0.97, "without": WITHOUT},
        "environment": MACHINE,
    }


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A document with one table, and its rows: one of them measured twice."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "benchmarks.md").write_text(
        "Before.\n<!-- begin throughput -->\nold\n<!-- end throughput -->\nAfter.\n"
    )
    save(
        tmp_path / "results" / "throughput.jsonl",
        [
            throughput_row("decode, batch 1", {"vllm": 10.0, "moeserve": 12.0, "moeserve-int8": 21.0}),
            throughput_row("decode, batch 8", {"vllm": 80.0, "moeserve": 50.0}),
            throughput_row("decode, batch 1", {"vllm": 20.0, "moeserve": 40.0, "moeserve-int8": 70.0}),
            throughput_row("decode, batch 1", {"vllm": 60.0, "moeserve": 90.0}),
        ],
    )
    return tmp_path


def test_tables_are_replaced_and_the_last_row_counts(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = checkout / "docs" / "benchmarks.md"
    arguments = ["bench", "report", "--results", str(checkout / "results"), "--document", str(document)]
    assert cli.main(arguments) == 0
    text = document.read_text()
    assert text.startswith("Before.\n<!-- begin throughput -->\n| model")
    assert text.endswith("<!-- end throughput -->\nAfter.\n")
    assert "old" not in text
    head, _, *lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    engines = ["moeserve", "moeserve-int8", "vllm"]
    assert head == ["model", "kernels", "cell", *engines, "moeserve / best peer (goal)", "reached"]
    assert [[cell.strip() for cell in line] for line in lines] == [
        *QUANTISED_AND_8,
        ["some-model", "avx2", "decode, batch 1", "90.0 (90%)", "", "60.0 (60%)", "1.50 vllm (1.15)", "0.97"],
    ]
    fact = "moeserve 0.1.0, torch 2.13, vllm 1.0: 2026-01-02, A CPU (avx2), 2 threads, commit 0123abc.\n"
    assert fact in text
    assert capsys.readouterr().out == f"{document}\n"  # no chart without prompts
    assert cli.main(arguments) == 0
    assert document.read_text() == text  # again changes nothing


def test_goals_of_several_precisions_share_a_line() -> None:
    row = throughput_row("decode, batch 1", {"vllm": 10.0, "moeserve": 12.0, "moeserve-int8": 21.0})
    row["ratios"].append({"engine": "moeserve-int8", "baseline": "llama.cpp-q8_0", "median": 0.9})
    of_int8 = row["goal"] | {"best_peer": "llama.cpp-q8_0", "ratio": 1.1, "reached": 0.82}
    row["goals"] = {"moeserve": row.pop("goal"), "moeserve-int8": of_int8}
    assert report.goal_cells(row) == ("1.20 vllm (1.15); 0.90 llama.cpp-q8_0 (1.1)", "0.97; 0.82")
    row["environment"] = MACHINE | {"cpu_family": 25, "cpu_model": 1}
    assert "A CPU (family 25, model 1, avx2)" in report.machines([row])[0]


def test_each_instruction_set_has_lines_of_its_own(checkout: Path) -> None:
    row = throughput_row("decode, batch 1", {"vllm": 10.0, "moeserve": 30.0})
    path = checkout / "results" / "throughput.jsonl"
    prompts = throughput_row("prefill, batch 4", {"vllm": 10.0, "moeserve": 30.0})
    save(path, [row | {"environment": MACHINE | {"kernels": "amx"}}, prompts])
    written = report.write_report(path, checkout / "docs" / "benchmarks.md")
    assert [each.name for each in written] == ["benchmarks.md", "throughput.svg", "throughput-dark.svg"]
    text = (checkout / "docs" / "benchmarks.md").read_text()
    assert "| avx2 | decode, batch 1 | 90.0 (90%)" in text
    assert "| amx | decode, batch 1 | 30.0 (30%)" in text


def test_bars_are_to_scale(checkout: Path) -> None:
    """Bars for each theme; only models of which prompts were measured too; no engines with other weights."""
    rows = report.cells_of(read_jsonl(checkout / "results" / "throughput.jsonl"))
    assert report.panels(rows) == []
    rows += report.cells_of([throughput_row("prefill, batch 4", {"vllm": 30.0, "moeserve": 45.0})])
    (panel,) = report.panels(rows)
    assert panel == Panel(
        "some-model, avx2",
        {
            "decode, batch 8": {"vllm": 0.8, "moeserve": 0.5},
            "decode, batch 1": {"vllm": 0.6, "moeserve": 0.9},
            "prefill, batch 4": {"vllm": 0.3, "moeserve": 0.45},
        },
    )
    light, dark = save_bars(checkout / "bars.svg", [panel], "share", "{x:.0%}")
    for path in (light, dark):
        image = path.read_text()
        for name, shares in (("moeserve", [0.5, 0.9, 0.45]), ("vllm", [0.8, 0.6, 0.3])):
            heights = heights_of(image, COLOURS[name])[:3]  # then the legend's
            assert [height / max(heights) for height in heights] == pytest.approx([x / max(shares) for x in shares])
        assert all(f">{text}<" in image for text in ("moeserve", "vllm", "some-model, avx2", "batch 8", "share", "80%"))


def test_lines_are_the_same_in_every_run(tmp_path: Path) -> None:
    images = []
    for _ in range(2):
        light, dark = save_lines(tmp_path / "lines.svg", {"seed 0": [0.1, 0.5, 0.9]}, ("step", "reward"))
        images.append((light.read_bytes(), dark.read_bytes()))
    assert images[0] == images[1]
    assert images[0][0] != images[0][1]
    assert all(text in images[0][0] for text in (b">seed 0<", b">step<", b">reward<"))


def heights_of(image: str, colour: str) -> list[float]:
    """Return the heights of the rectangles that have this colour."""
    paths = re.findall(
        r'<path d="M [\d.]+ ([\d.]+) \nL [\d.]+ [\d.]+ \nL [\d.]+ ([\d.]+) [^"]*"[^>]*fill: (#\w+)', image
    )
    return [float(bottom) - float(top) for bottom, top, found in paths if found == colour]


def test_missing_results_and_unknown_tables_are_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", "--results", str(checkout / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err
    (checkout / "docs" / "benchmarks.md").write_text("<!-- begin thruput -->")
    with pytest.raises(report.ReportError, match="no comments 'begin throughput'"):
        report.write_report(checkout / "results" / "throughput.jsonl", checkout / "docs" / "benchmarks.md")


def test_recorded_rows_are_printed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nested figures have joined names; lists and facts of the machine are not shown."""
    row = {"benchmark": "waits", "model": "m", "waits": {"p99": 0.12345, "all": [1, 2]}, "none": None}
    save(checkout / "results" / "waits.jsonl", [row | {"environment": MACHINE}])
    assert cli.main(["bench", "report", "waits", "--results", str(checkout / "results")]) == 0
    assert capsys.readouterr().out.startswith(
        "| model | waits p99 | none |\n| :-- | --: | --: |\n| m | 0.123 |  |\n\nmoeserve"
    )


def test_the_table_of_the_documentation_is_up_to_date() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = report.cells_of(read_jsonl(root / "bench" / "results" / "throughput.jsonl"))
    assert report.fill(text, rows) == text
