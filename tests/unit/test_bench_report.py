"""The report: tables between comments, the last row of each measurement, plots to scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from moeserve import cli
from moeserve.bench import report
from moeserve.bench.harness import save

SVG = "{http://www.w3.org/2000/svg}"
MACHINE = {
    "date": "2026-01-02T03:04:05+00:00", "cpu": "A CPU", "cores": 2, "threads": 2, "isa": ["avx2"], "python": "3.11",
    "commit": "0123abc",
    "versions": {"moeserve": "0.1.0", "torch": "2.13"},
}  # fmt: skip
SETTINGS = {"vllm": {"threads": 2, "preloaded": ["libtcmalloc.so", "libiomp5.so"]}}
WITHOUT = {"llama.cpp-bf16": "not installed; run: something"}


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
        "<!-- begin moe -->\n<!-- end moe -->\n"
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
    assert text.startswith("Before.\n<!-- begin throughput -->\n**some-model**")
    assert "<!-- end throughput -->\nAfter.\n" in text
    assert "old" not in text
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    goal = "moeserve / best peer (goal)"
    assert ["cell", "moeserve", "moeserve-int8", "vllm", goal, "reached"] in lines
    goals = ["2.00 vllm (1.15)", "0.97"]
    assert ["decode, batch 1, quantised", "40.0 (40%)", "70.0 (70%)", "20.0 (20%)", *goals] in lines
    assert ["decode, batch 1", "90.0 (90%)", "", "60.0 (60%)", "1.50 vllm (1.15)", "0.97"] in lines
    assert "llama.cpp-bf16 (not installed; run: something)" in text
    for fact in ("2026-01-02, A CPU, 2 cores (avx2), 2 threads", "commit 0123abc", "moeserve 0.1.0, torch 2.13"):
        assert fact in text
    assert "vllm 1.0 (libtcmalloc.so and libiomp5.so preloaded)" in text
    assert "<!-- begin moe -->\nNo results yet.\n<!-- end moe -->" in text
    assert "plots/throughput-some-model.svg" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    assert document.read_text() == text  # again changes nothing


def test_each_instruction_set_has_tables_of_its_own(checkout: Path) -> None:
    row = throughput_row("decode, batch 1", {"vllm": 10.0, "moeserve": 30.0})
    save(checkout / "results" / "throughput.jsonl", [row | {"environment": MACHINE | {"kernels": "amx"}}])
    documents = {path.name for path in report.write_report(checkout / "results", checkout / "docs" / "benchmarks.md")}
    text = (checkout / "docs" / "benchmarks.md").read_text()
    assert "**some-model**, tokens" in text
    assert "**some-model, amx**, tokens" in text
    assert "| 90.0 (90%)" in text
    assert "| 30.0 (30%)" in text
    assert "(avx2; moeserve's kernels: amx)" in text
    assert documents >= {"throughput-some-model.svg", "throughput-some-model-amx.svg"}


def test_plots_are_to_scale(checkout: Path) -> None:
    report.write_report(checkout / "results", checkout / "docs" / "benchmarks.md")
    image = ElementTree.parse(checkout / "docs" / "plots" / "throughput-some-model.svg").getroot()
    bars = [bar for bar in image.findall(f"{SVG}rect") if "x" in bar.attrib]
    widths = [float(bar.attrib["width"]) for bar in bars]
    fractions = [0.4, 0.7, 0.2, 0.5, 0.8, 0.9, 0.6]  # of batch 1 quantised, then of batch 8, then of batch 1
    assert [width / max(widths) for width in widths] == pytest.approx([each / 0.9 for each in fractions], abs=0.01)
    colours = [bar.attrib["fill"] for bar in bars]
    assert colours[0] == colours[3]
    assert len(set(colours[:3])) == 3
    assert {text.text for text in image.findall(f"{SVG}text")} >= {"moeserve", "vllm", "40.0 (40%)", "decode, batch 8"}


def test_missing_results_and_unknown_tables_are_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", "--results", str(checkout / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(report.ReportError, match=r"'thruput'.*throughput"):
        report.fill("<!-- begin thruput -->", [])


def test_every_table_of_the_documentation_is_known_and_up_to_date() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [row for path in sorted((root / "bench" / "results").glob("*.jsonl")) for row in report.read_jsonl(path)]
    assert report.fill(text, rows) == text
    for name in report.TABLES:
        assert f"<!-- begin {name} -->" in text
