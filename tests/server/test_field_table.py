"""docs/server.md names the fields that the classes of requests ignore and refuse, and why they refuse them."""

from __future__ import annotations

import re
from pathlib import Path

from moeserve.server.anthropic.messages import MessagesRequest
from moeserve.server.openai.chat import ChatRequest
from moeserve.server.openai.completions import CompletionRequest
from moeserve.server.openai.responses import ResponsesRequest
from moeserve.server.schema import Ignored, Refused

DOCUMENT = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
BODIES = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}


def rules(kind: type[Ignored | Refused]) -> dict[tuple[str, str], list[str]]:
    """Return the fields that are ignored or refused, each with the reason, and the APIs that do so."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, body in BODIES.items():
        for field_name, field in body.model_fields.items():
            for rule in field.metadata:
                if isinstance(rule, kind):
                    found.setdefault((field_name, rule.why), []).append(name)
    return dict(sorted(found.items()))


def test_the_document_has_the_table_of_refused_fields() -> None:
    lines = DOCUMENT.splitlines()
    start = lines.index("| field | APIs | why |") + 2
    table = [f"| `{field}` | {', '.join(names)} | {why} |" for (field, why), names in rules(Refused).items()]
    assert lines[start : start + len(table)] == table
    assert not lines[start + len(table)].startswith("|")


def test_the_document_names_the_ignored_fields() -> None:
    (names,) = re.findall(r"change no answer and are ignored: (.*?)\. Refused are", DOCUMENT, re.DOTALL)
    assert re.findall(r"`(\w+)`", names) == [field for field, _ in rules(Ignored)]
