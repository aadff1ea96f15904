"""Errors name the field that is wrong, so that programs and people can mend their requests."""

from __future__ import annotations

from typing import Any

import pytest
from running_server import MODEL, RunningServer

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
QUESTION = [{"role": "user", "content": "Hi"}]
TEXT = {"type": "text", "text": "Hi"}


def refusal(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.http() as http:
        answer = http.post(path, json={"model": MODEL} | body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}


@pytest.mark.parametrize(
    ("path", "body", "name", "code"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.image_url", True),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", False),
        (CHAT, {"messages": QUESTION, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function", False),
        (CHAT, {"messages": QUESTION, "response_format": {"type": "json_schema"}},
         "response_format.json_schema", False),
        (CHAT, {}, "messages", False),
        (COMPLETIONS, {"prompt": [[1, 2], [3, "a"]]}, "prompt.1.1", False),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", False),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", 1]}, "stop.1", False),
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
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text"}]}]}
    assert refusal(tiny_server, MESSAGES, body)["message"].startswith("messages.0.content.0.text: ")


PICTURE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
ANSWERED = [*QUESTION, {"role": "assistant", "content": "Yes"}]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (MESSAGES, {"messages": [*ANSWERED, {"role": "user", "content": [TEXT, PICTURE]}], "max_tokens": 1},
         "messages.2.content.1.image"),
        (RESPONSES, {"input": [*ANSWERED, {"role": "user", "content": [TEXT, {"type": "input_image"}]}]},
         "input.2.content.1.input_image"),
        (RESPONSES, {"input": [*ANSWERED, {"role": "user", "content": [{"type": "input_text"}]}]},
         "input.2.content.0.text"),
    ],
)  # fmt: skip
def test_the_part_of_a_message_that_is_wrong(
    tiny_server: RunningServer, path: str, body: dict[str, Any], name: str
) -> None:
    assert refusal(tiny_server, path, body)["message"].startswith(name)


@pytest.mark.parametrize(
    ("body", "words"),
    [(b'{\n "a": 1,,}', "line 2, column 9"), (b'{"a": 1}x', "line 1, column 9"), (b"", "empty"), (b"null", "null")],
)
def test_a_body_that_is_no_object(tiny_server: RunningServer, body: bytes, words: str) -> None:
    with tiny_server.http() as http:
        answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_schema_that_is_too_long_is_named(tiny_server: RunningServer) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(20_000)}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = refusal(tiny_server, CHAT, {"messages": QUESTION, "response_format": form})
    assert error["message"].startswith("response_format has ")
    assert error["param"] == "response_format"


LONG = "a" * 5000  # the context of the tiny model has 64 tokens, and its longest token 9 characters


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 64}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "stream": True}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "\N{GRINNING FACE}" * 12}]}, "messages"),
        (RESPONSES, {"input": LONG}, "input"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
def test_prompts_that_are_too_long(tiny_server: RunningServer, path: str, body: dict[str, Any], param: str) -> None:
    error = refusal(tiny_server, path, body)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stop": ["a"] * 1000}, "stop"),
        ({"logit_bias": {str(number): 1 for number in range(2000)}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_the_sampling_parameter_that_is_wrong(tiny_server: RunningServer, fields: dict[str, Any], param: str) -> None:
    assert refusal(tiny_server, COMPLETIONS, {"prompt": "a"} | fields)["param"] == param


FLAT_CHOICE = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": QUESTION, "tool_choice": "required"}),
        (CHAT, {"messages": QUESTION, "tool_choice": "required", "tools": [], "stream": True}),
        (CHAT, {"messages": QUESTION, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (RESPONSES, {"input": "Hi", "tool_choice": "required"}),
        (RESPONSES, {"input": "Hi", "tool_choice": FLAT_CHOICE}),
        (MESSAGES, {"messages": QUESTION, "max_tokens": 1, "tool_choice": {"type": "any"}}),
        (MESSAGES, {"messages": QUESTION, "max_tokens": 1, "tool_choice": {"type": "tool", "name": "f"}}),
    ],
)
def test_a_call_that_must_be_made_needs_tools(tiny_server: RunningServer, path: str, body: dict[str, Any]) -> None:
    error = refusal(tiny_server, path, body)
    assert "tool_choice" in error["message"]
    assert path == MESSAGES or error["param"] == "tool_choice"  # Anthropic's form has no such field


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_other_choices_need_no_tools(tiny_server: RunningServer, choice: str) -> None:
    bodies = {
        CHAT: {"messages": QUESTION, "max_tokens": 1, "tool_choice": choice},
        RESPONSES: {"input": "Hi", "max_output_tokens": 1, "tool_choice": choice},
        MESSAGES: {"messages": QUESTION, "max_tokens": 1, "tool_choice": {"type": choice}},
    }
    with tiny_server.http() as http:
        for path, body in bodies.items():
            assert http.post(path, json={"model": MODEL} | body).status_code == 200
