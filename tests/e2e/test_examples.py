"""Every program in examples/ runs and prints a sensible answer, and so do the programs in documents."""

from __future__ import annotations

import io
import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# A program in a document, and what it prints, if that follows
PROGRAM = re.compile(r"^```python\n(.*?)^```\n(?:\n^```\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)

# program: (standard input, texts that its output must contain)
EXPECTED = {
    "offline.py": ("", ["Paris", " five", "Wednesday"]),
    "many_tasks.py": ("", ["Paris", " five", "Wednesday"]),
    "chat.py": ("What is the capital of England?\nAnd of Japan?\n", ["London", "Tokyo"]),
    "parallel.py": ("", ["London", "tp 3 x dp 2 = 6 ranks"]),
    "rebalance.py": (
        "",
        ["before: placement epoch 0, fullest", "after: ", "started again: placement epoch 0, fullest"],
    ),
    "whole_api.py": (
        "",
        ["Paris", "London", "bfloat16 512 True", "refused: prompt", "mine True", "True False", "top_p=2.0 must be"],
    ),
    "disaggregated/serve_and_ask.py": (
        "",
        ["449 tokens: The capital of England", '"remote"} 1.0', "} 432.0"],
    ),
}


NOTEBOOK = [["Paris", " five"], ["London"], ["Wednesday"], ["Paris", "Wednesday"]]  # texts of the cells that print

ELSEWHERE = {"lm_eval_moeserve.py"}  # in tests/server/test_lm_eval.py


def test_every_example_is_tested() -> None:
    programs = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("disaggregated/*.py")]
    assert {path.relative_to(EXAMPLES).as_posix() for path in programs} == set(EXPECTED) | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXPECTED))
def test_example(
    name: str, default_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, expected = EXPECTED[name]
    monkeypatch.setattr("sys.argv", [name])
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for text in expected:
        assert text in printed


@pytest.mark.slow
def test_notebook(default_cache: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=200).execute()
    outputs = ["".join(map(text_of, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]
    printed = [text for text in outputs if text and not text.startswith("LLM(")]
    assert len(printed) == len(NOTEBOOK), outputs
    for text, expected in zip(printed, NOTEBOOK, strict=True):
        for each in expected:
            assert each in text


def text_of(output: Any) -> str:
    """Return the text that an output of a cell shows, without what the cell wrote to standard error."""
    if output.output_type == "stream":
        return str(output.text) if output.name == "stdout" else ""
    return str(output.data["text/plain"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("README.md", [["Berlin", "Paris"]]),
        ("docs/tutorial.md", [[], [], ["tensor_parallel_size=3", "London"], []]),
        ("docs/python_api.md", [["Paris"]]),
        ("docs/structured_outputs.md", [['"is_capital":']]),
        ("docs/planning.md", [[], ["my host"], ["tokens; experts of the first layer: ("]]),
    ],
)
def test_the_programs_in_a_document(
    name: str,
    expected: list[list[str]],
    default_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They run one after another in one folder."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    programs = PROGRAM.findall((ROOT / name).read_text())
    for (program, output), texts in zip(programs, expected, strict=True):
        Path("program.py").write_text(program)
        runpy.run_path("program.py", run_name="__main__")
        printed = capsys.readouterr().out
        assert all(text in printed for text in texts), printed
        if not texts:
            assert printed == output
