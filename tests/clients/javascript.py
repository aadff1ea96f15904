"""JavaScript libraries: the AI SDK with three providers, and openai."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import NODE_MODULES, TESTS, Server, run

CITIES = ["Paris", "Oslo"]
LAST = "The tool returned: 20 degrees in Oslo"


def results(home: Path, server: Server, part: str) -> dict[str, Any]:
    """Run a part of javascript.mjs, and return what each loop ended with."""
    command = ["node", str(TESTS / "javascript.mjs"), server.url, server.model, part]
    lines = run(home, *command, NODE_PATH=str(NODE_MODULES)).splitlines()
    return {found.pop("name"): found for found in map(json.loads, lines)}


@pytest.mark.clients("npm:ai", "npm:@ai-sdk/openai", "npm:@ai-sdk/openai-compatible", "npm:@ai-sdk/anthropic")
def test_ai_sdk(home: Path, scripted: Server) -> None:
    found = results(home, scripted, "ai")
    names = ["openai.chat", "openai", "openai without store", "openai-compatible", "anthropic"]
    assert list(found) == [f"{name}{end}" for name in names for end in ("", ", streamed")]
    assert list(found.values()) == [{"text": LAST, "cities": CITIES}] * len(found)


@pytest.mark.clients("npm:openai")
def test_run_tools(home: Path, scripted: Server) -> None:
    found = results(home, scripted, "runTools")
    assert found == {name: {"text": LAST, "cities": CITIES} for name in ("whole", "streamed")}


@pytest.mark.clients("npm:openai")
@pytest.mark.parametrize("server", ["scripted", "real"])
def test_parse(home: Path, server: str, request: pytest.FixtureRequest) -> None:
    found = results(home, request.getfixturevalue(server), "parse")
    assert found["parse"]["text"] in (["Oslo"] if server == "scripted" else CITIES)
