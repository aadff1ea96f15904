"""`truncation` of the Responses API: too long a conversation is shortened, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from running_server import MODEL, RunningServer

from moeserve.server.openai.response_items import ITEMS
from moeserve.server.openai.truncation import removable_groups

LAST = {"role": "user", "content": "last"}


def turns(number: int) -> list[dict[str, Any]]:
    """Return the items of a conversation. Each turn has more than 10 of the 64 tokens of the model."""
    return [{"role": ("user", "assistant")[place % 2], "content": f"turn {place}"} for place in range(number)]


def ask(server: RunningServer, items: list[dict[str, Any]], **fields: Any) -> Any:
    with server.http() as http:
        return http.post("/v1/responses", json={"model": MODEL, "input": items, "max_output_tokens": 4, **fields})


def prompt_of(server: RunningServer, answer: Any) -> int:
    return int(answer.json()["usage"]["input_tokens"])


@pytest.mark.parametrize("truncation", [None, "disabled"])
def test_too_long_a_conversation_is_refused_by_name(tiny_server: RunningServer, truncation: str | None) -> None:
    answer = ask(tiny_server, [*turns(40), LAST], truncation=truncation)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_the_oldest_items_are_left_out(tiny_server: RunningServer) -> None:
    items = [*turns(40), LAST]
    answer = ask(tiny_server, items, truncation="auto")
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == "auto"
    number = next(n for n in range(len(items)) if ask(tiny_server, items[n:]).status_code == 200)
    assert prompt_of(tiny_server, answer) <= prompt_of(tiny_server, ask(tiny_server, items[number:]))
    assert prompt_of(tiny_server, answer) in {
        prompt_of(tiny_server, ask(tiny_server, items[place:])) for place in range(number, len(items))
    }


def test_instructions_stay(tiny_server: RunningServer) -> None:
    developer = {"role": "developer", "content": "be brief"}
    plain = ask(tiny_server, [developer, LAST], instructions="Ok")
    answer = ask(
        tiny_server,
        [developer, *turns(3), {"role": "user", "content": "x" * 200}, LAST],
        instructions="Ok",
        truncation="auto",
    )
    assert prompt_of(tiny_server, answer) == prompt_of(tiny_server, plain)


def test_what_must_stay_may_be_too_long(tiny_server: RunningServer) -> None:
    answer = ask(tiny_server, [*turns(2), {"role": "user", "content": "x" * 500}], truncation="auto")
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_streams_are_shortened_too(tiny_server: RunningServer) -> None:
    answer = ask(tiny_server, [*turns(40), LAST], truncation="auto", stream=True)
    assert "response.incomplete" in answer.text or "response.completed" in answer.text


def test_calls_and_results_are_left_out_together() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}

    def result(name: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": name, "output": "1"}

    items = ITEMS.validate_python(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "task"},
            {"type": "reasoning", "summary": []},
            call("a"),
            call("b"),
            result("b"),
            result("a"),
            {"role": "assistant", "content": "done"},
            LAST,
            call("c"),
            result("c"),
        ]
    )
    assert removable_groups(items) == [[1], [2, 3, 6], [4, 5], [7], [9, 10]]
