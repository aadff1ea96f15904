"""Every program in examples/ runs and prints a sensible answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# program: (standard input, texts that its output must contain)
EXPECTED = {
    "offline.py": ("", ["Paris", " five", "Wednesday"]),
    "chat.py": ("What is the capital of France?\nAnd of Italy?\n", ["Paris", "Rome"]),
    "parallel.py": ("", ["Paris", "tp 3 x dp 2 = 6 ranks"]),
    "rebalance.py": (
        "",
        ["before: placement epoch 0, fullest", "after: ", "started again: placement epoch 0, fullest"],
    ),
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_example(name: str, default_cache: Path) -> None:
    typed, expected = EXPECTED[name]
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], input=typed, capture_output=True, text=True, check=True, timeout=200
    )
    for text in expected:
        assert text in run.stdout
