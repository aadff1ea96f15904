"""The command line in environments whose encoding is not UTF-8: text is what was typed, and every answer is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import save_tiny_model

TEXT = "Größe €"
FLAGS = ["--temperature", "0", "--max-tokens", "6", "--num-threads", "1", "--dtype", "float32"]
ONLY_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose path is not ASCII either."""
    return save_tiny_model(tmp_path_factory.mktemp("Modèle"))


def run(command: str, *arguments: str | Path, typed: bytes = b"", **environment: str) -> str:
    """Run a command with an environment of its own, and return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    process = subprocess.run(
        [sys.executable, "-m", "moeserve", command, *map(os.fspath, arguments), *FLAGS],
        input=typed,
        capture_output=True,
        timeout=200,
        env=clean | environment,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.decode()


@pytest.mark.slow
def test_a_prompt_in_an_ascii_locale(folder: Path) -> None:
    arguments = (folder, "--prompt", TEXT, "--raw")
    assert run("generate", *arguments, **ONLY_ASCII) == run("generate", *arguments, PYTHONUTF8="1")


@pytest.mark.slow
def test_a_conversation_in_an_ascii_locale(folder: Path) -> None:
    arguments, typed = (folder, "--system", TEXT), f"{TEXT}\n".encode()
    assert run("chat", *arguments, typed=typed, **ONLY_ASCII) == run("chat", *arguments, typed=typed, PYTHONUTF8="1")


@pytest.mark.slow
def test_characters_that_the_output_cannot_represent_are_escaped(folder: Path) -> None:
    arguments = (folder, "--prompt", TEXT, "--raw")
    answer = run("generate", *arguments, PYTHONUTF8="1")
    assert not answer.isascii()
    assert run("generate", *arguments, PYTHONUTF8="1", PYTHONIOENCODING="ascii") == answer.encode(
        "ascii", "backslashreplace"
    ).decode("ascii")


def test_typed_bytes_that_are_no_text_are_refused_and_the_conversation_continues(folder: Path) -> None:
    printed = run("chat", folder, typed=b"\xff\nHello\n", PYTHONUTF8="1")
    refusal, answer = printed.splitlines()[1:3]
    assert "surrogate" in refusal
    assert answer
