"""Errors name the field that is wrong, so that programs and people can mend their requests."""

from __future__ import annotations

from typing import Any

import pytest
from running_server import MODEL, RunningServer

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
QUESTION = [{"role": "user", "content": "Hi"}]


def refusal(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.http() as http:
        answer = http.post(path, json={"model": MODEL} | body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
CALL = {"type": "function_call", "call_id": "1", "name": "f"}


@pytest.mark.parametrize(
    ("path", "body", "name", "code"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.image_url", True),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages.0.content", False),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", False),
        (CHAT, {"messages": QUESTION, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", True),
        (CHAT, {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": {"x": 1}}},
         "response_format.json_schema.x", True),
        (CHAT, {"messages": QUESTION, "response_format": {"type": "json_schema"}},
         "response_format.json_schema", False),
        (CHAT, {}, "messages", False),
        (COMPLETIONS, {"prompt": [[1, 2], [3, "a"]]}, "prompt.1.1", False),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", False),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", 1]}, "stop.1", False),
        (RESPONSES, {"input": [{"role": "user", "content": "a", "colour": 1}]}, "input.0.colour", True),
        (RESPONSES, {"input": [CALL]}, "input.0.arguments", False),
        (RESPONSES, {"input": [CALL | {"arguments": "{}", "colour": 1}]}, "input.0.colour", True),
        (RESPONSES, {"input": [{"type": "web_search_call", "id": "a"}]}, "input.0", False),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
         "input.0.content.0.type", False),
    ],
)  # fmt: skip
def test_the_field_of_a_request_that_is_wrong(
    tiny_server: RunningServer, path: str, body: dict[str, Any], name: str, code: bool
) -> None:
    error = refusal(tiny_server, path, body)
    assert error["message"].startswith(f"{name} is" if code else f"{name}: ")
    assert error["param"] == name.partition(".")[0]
    assert error["code"] == ("unsupported_parameter" if code else None)


def test_the_field_of_a_message_that_is_wrong(tiny_server: RunningServer) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}
    assert refusal(tiny_server, MESSAGES, body)["message"].startswith("messages.0.content.0.text: ")
