"""A half of a surrogate pair, which clients leave where they cut a text inside an emoji, never fails a request."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from running_server import MODEL, RunningServer

from moeserve.server.surrogates import replace_lone_surrogates

CUT = "cut in an emoji \ud83d"
USER = {"role": "user", "content": CUT}
FUNCTION = {"name": "f", "arguments": "{}"}
CALL = {"id": "c", "type": "function", "function": FUNCTION}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": CUT}
OUTPUT = [{"type": "function_call", "call_id": "c", **FUNCTION}, {"type": "function_call_output", "call_id": "c"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (
        "chat/completions",
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [CALL]},
                {**USER, "role": "tool", "tool_call_id": "c"},
            ]
        },
    ),
    (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]},
    ),
    ("responses", {"input": [USER, OUTPUT[0], {**OUTPUT[1], "output": CUT}]}),
    ("responses", {"input": [{"type": "of_the_future", CUT: CUT}, USER], "metadata": {CUT: CUT}}),
    ("responses", {"input": CUT, "tools": [{"type": "web_search", "x": CUT}]}),
    ("responses", {"input": CUT, "text": {"format": {"type": "json_schema", "name": CUT, "schema": {}}}}),
    ("completions", {"prompt": CUT}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_requests_are_answered(tiny_server: RunningServer, path: str, body: dict[str, Any]) -> None:
    most = "max_output_tokens" if path == "responses" else "max_tokens"
    with tiny_server.http() as http:
        answer = http.post(
            f"/v1/{path}",
            content=json.dumps({"model": MODEL, most: 1, "truncation": "auto"} | body),
            headers={"content-type": "application/json"},
        )
    too_long = answer.status_code == 400 and "tokens" in answer.text
    assert answer.status_code == 200 or too_long, answer.text


def test_only_lone_halves_are_replaced() -> None:
    pieces = [rb"\ud83d", rb"\ude00", rb"\uD8FF", rb"\uDC00", rb"\\", rb"\n", b"ud83d", b"a", rb"\\" * 50]
    choose = random.Random(0)
    for _ in range(20_000):
        text = b'"%b"' % b"".join(choose.choices(pieces, k=choose.randrange(8)))
        replaced = bytearray(text)
        assert list(replace_lone_surrogates(replaced)) == []
        assert json.loads(replaced) == re.sub("[\ud800-\udfff]", "\ufffd", json.loads(text)), text


def test_long_texts_are_replaced_in_pieces() -> None:
    text = bytearray(rb"\ud83d" * 10_000)
    assert len(list(replace_lone_surrogates(text))) > 1
    assert text == rb"\ufffd" * 10_000
