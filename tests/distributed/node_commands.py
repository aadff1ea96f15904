"""A program on a host that obeys commands from a pipe (`node_program.py`), as seen by the test."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "node_program.py"


class Commands:
    """Commands to the program, and its answers."""

    def __init__(self, folder: Path, fail: Callable[[str], None]) -> None:
        """
        Args:
            fail: called with a message while an answer is awaited; raises AssertionError if there will be none.
        """
        self._commands, self._answers, self._fail = folder / "commands", folder / "answers", fail
        os.mkfifo(self._commands)
        self._num_answers = 0
        self._pipe = os.open(self._commands, os.O_RDWR)  # does not wait for the reader

    @property
    def program(self) -> list[str]:
        """The command line of the program."""
        return [sys.executable, str(PROGRAM), str(self._commands), str(self._answers)]

    def send(self, do: str, **arguments: Any) -> None:
        os.write(self._pipe, (json.dumps({"do": do} | arguments) + "\n").encode())

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return the answer to the next command."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(FileNotFoundError):
                lines = self._answers.read_text().split("\n")[:-1]  # the last may be incomplete
                if len(lines) > self._num_answers:
                    self._num_answers += 1
                    found: dict[str, Any] = json.loads(lines[self._num_answers - 1])
                    return found
            self._fail("" if time.monotonic() < deadline else f"no answer within {seconds} s")
            time.sleep(0.05)

    def close(self) -> None:
        os.close(self._pipe)
