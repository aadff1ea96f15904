"""Java's own HTTP client, as it comes: it asks for HTTP/2 in its first request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import TESTS, Server, run

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
LOOP = 'Please [call weather {"city": "Paris"}] and [call weather {"city": "Oslo"}].'


def texts(home: Path, server: Server, prompt: str, tools: list[object]) -> list[str]:
    """Return the last answer, whole and streamed."""
    command = ["java", str(TESTS / "Client.java"), server.url, server.model, prompt, json.dumps(tools)]
    return run(home, *command).split("\n")


@pytest.mark.clients("java")
def test_tool_calls(home: Path, scripted: Server) -> None:
    answers = texts(home, scripted, LOOP, [{"type": "function", "function": WEATHER}])
    assert answers == ["The tool returned: result 2"] * 2


@pytest.mark.clients("java")
def test_default_model(home: Path, real: Server) -> None:
    assert texts(home, real, "What is the capital of England?", []) == ["The capital of England is London."] * 2
