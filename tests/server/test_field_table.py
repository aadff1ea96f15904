"""The table of fields in docs/server.md is what the classes of requests declare."""

from __future__ import annotations

from pathlib import Path

from moeserve.server.anthropic.messages import MessagesRequest
from moeserve.server.openai.chat import ChatRequest
from moeserve.server.openai.completions import CompletionRequest
from moeserve.server.openai.responses import ResponsesRequest
from moeserve.server.schema import Ignored, Refused

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"
BODIES = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}


def table() -> list[str]:
    """Return the rows of the table: a field and its APIs, whether it is ignored or refused, and why."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, body in BODIES.items():
        for field_name, field in body.model_fields.items():
            for rule in field.metadata:
                if isinstance(rule, (Ignored, Refused)):
                    kind = "ignored" if isinstance(rule, Ignored) else "refused"
                    rows.setdefault((kind, field_name, rule.why), []).append(name)
    return [
        f"| `{field_name}` | {'all' if len(names) == len(BODIES) else ', '.join(names)} | {kind} | {why} |"
        for (kind, field_name, why), names in sorted(rows.items())
    ]


def test_the_document_has_the_table_of_fields() -> None:
    lines = DOCUMENT.read_text("utf-8").splitlines()
    start = lines.index("| field | APIs | | why |") + 2
    assert lines[start : start + len(table())] == table()
    assert not lines[start + len(table())].startswith("|")
