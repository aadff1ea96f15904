"""Requests for chat completions as clients send them: leftovers of answers, older names, and hints are no errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM

QUESTION: list[Any] = [{"role": "user", "content": "Hi"}]
FUNCTION: dict[str, Any] = {
    "name": "clock",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=2048, max_num_seqs=16, show_progress=False)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def plain(tiny: AsyncLLM) -> Iterator[RunningServer]:
    with running(tiny) as server:
        yield server


def post(server: RunningServer, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    """Return the answer to a request, which must be served."""
    body = {"messages": QUESTION, "max_tokens": 1} | fields
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": QUESTION, "max_tokens": 1} | fields
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def prompt(server: RunningServer, messages: list[Any], **fields: Any) -> str:
    """Return the prompt of a conversation as the model reads it."""
    with server.http() as http:
        tokens = http.post("/tokenize", json={"messages": messages, **fields}).json()["tokens"]
        text: str = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        return text


@pytest.mark.parametrize(
    "extra",
    [
        {"tool_calls": [{"index": 0, **CALL}]},
        {"tool_calls": [{**CALL, "extra_content": {"google": {}}}]},
        {"tool_calls": [{**CALL, "function": CALL["function"] | {"parsed_arguments": {}}}]},
        {"tool_calls": [CALL], "refusal": None, "annotations": [], "audio": None, "parsed": None},
        {"tool_calls": [{"id": "c", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}]},
    ],
)
def test_leftovers_of_answers_change_nothing(plain: RunningServer, extra: dict[str, Any]) -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    given = prompt(plain, [*QUESTION, {"role": "assistant", "content": "", **extra}, result])
    expected = prompt(plain, [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, result])
    assert "extra" not in given
    assert json.loads('{"zone": "UTC"}') == {"zone": "UTC"}
    assert given.replace('"index": 0, ', "") == expected


def test_parts_of_histories(plain: RunningServer) -> None:
    cached = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    assert prompt(plain, [{"role": "user", "content": [cached]}]) == prompt(plain, QUESTION)
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    assert "I will not." in prompt(plain, [*QUESTION, refusal, *QUESTION])
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [picture]}
    assert "image_url omitted" in prompt(plain, [*QUESTION, {"role": "assistant", "tool_calls": [CALL]}, result])
    error = refused(plain, messages=[{"role": "user", "content": [picture]}])
    assert error["message"].startswith("messages.0.content.0.image_url is not supported here")
    assert (error["param"], error["code"]) == ("messages", "unsupported_parameter")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "tool", "tool_call_id": 7, "content": {"degrees": 20}}, 'tool: {"degrees": 20}'),
        ({"role": "tool", "tool_call_id": "7", "content": [{"degrees": 20}, 20]}, 'tool: {"degrees": 20}'),
        ({"role": "tool", "tool_call_id": "7", "content": {"type": "text", "text": "noon"}}, "tool: noon"),
        ({"role": "tool", "tool_call_id": "7", "content": {"type": "Feature", "text": "a"}}, '"Feature"'),
        ({"role": "tool", "tool_call_id": "7", "content": 20}, "tool: 20"),
        ({"role": "assistant", "content": ["hi", {"text": "you"}]}, "assistant: hi\nyou"),
        ({"role": "assistant", "content": [{"type": "text", "text": None}]}, "assistant: <|end|>"),
        ({"role": "assistant", "tool_calls": [{"id": 7, "function": {"name": None}}]}, '"id": "7"'),
        ({"role": "assistant", "tool_calls": [{"id": 7, "type": "custom", "custom": {"input": {"a": 1}}}]}, "a"),
    ],
)
def test_any_message_of_a_history_is_rendered(plain: RunningServer, message: Any, text: str) -> None:
    assert text in prompt(plain, [*QUESTION, message, *QUESTION])


@pytest.mark.parametrize("arguments", ['{"zone": "U', "", "no JSON", "[1]", "null", '"{}"', "[" * 5000, "9" * 5000, 7])
def test_any_arguments_in_a_history_are_served(plain: RunningServer, arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with plain.http() as http:
        tokens = http.post("/tokenize", json={"messages": history})
        assert tokens.status_code == 200, tokens.text
    items: list[Any] = [*QUESTION, {"type": "function_call", "call_id": "c", "name": "f", "arguments": str(arguments)}]
    if len(str(arguments)) < 100:
        post(plain, messages=history)
        post(plain, "/v1/responses", input=items)


@pytest.mark.parametrize(
    "fields",
    [
        *({name: None} for name in ("audio", "prediction", "moderation", "functions", "stream", "tools", "n", "store")),
        {"store": True},
        {"verbosity": "low"},
        {"service_tier": "flex"},
        {"prompt_cache_retention": "24h"},
        {"prediction": {"type": "content", "content": "a"}},
        {"metadata": {"a": {"b": 1}}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"stream_options": {"include_usage": True}},
        {"top_logprobs": 0},
        {"top_logprobs": 0, "logprobs": False},
        {"max_tokens": 1.0, "n": 1.0, "seed": 3.0, "top_k": 5.0},
        {"reasoning_effort": "default"},
        {"modalities": ["text"]},
        *({"stop": stop} for stop in ("", [], [""])),
        {"response_format": {}, "tool_choice": ""},
        {"max_completion_tokens": -1},
        {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}], "tool_choice": "none"},
        {"a_field_of_next_year": {"a": 1}},
    ],
)
def test_what_does_not_change_the_answer_is_ignored(plain: RunningServer, fields: dict[str, Any]) -> None:
    with plain.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 1} | fields)
    assert answer.status_code == 200, answer.text


def test_empty_fields_of_the_other_apis_ask_for_nothing(plain: RunningServer) -> None:
    post(plain, "/v1/messages", model=MODEL, stop_sequences=[""])
    post(plain, "/v1/responses", input="Hi", max_output_tokens=-1, text={"format": {}}, tool_choice="")
    post(plain, "/v1/completions", prompt="Hi", max_tokens=-1, stop=["", "a"])


def test_without_probability_the_most_likely_token_is_left(plain: RunningServer) -> None:
    options = {"prompt": "Hi", "max_tokens": 8, "logprobs": 1}
    (choice,) = post(plain, "/v1/completions", top_p=0, **options)["choices"]
    (likely,) = post(plain, "/v1/completions", temperature=0, **options)["choices"]
    assert choice["text"] == likely["text"]
    post(plain, top_p=0)
    post(plain, "/v1/responses", input="Hi", max_output_tokens=1, top_p=0)
    post(plain, "/v1/messages", model=MODEL, top_p=0)


def test_integers_may_be_floats_and_effort_has_all_levels(plain: RunningServer) -> None:
    post(plain, "/v1/completions", prompt="Hi", max_tokens=1.0, stream_options={"include_usage": True})
    post(plain, "/v1/responses", input="Hi", max_output_tokens=1.0, reasoning={"effort": "default"})
    post(plain, "/v1/messages", model=MODEL, max_tokens=1.0, top_k=5.0, output_config={"effort": "none"})
    assert refused(plain, max_tokens=1.5)["param"] == "max_tokens"
    assert refused(plain, max_tokens=1e300)["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
        ("/v1/responses", {"input": [{"type": "item_reference"}]}, "input.0.id"),
        ("/v1/chat/completions", {"messages": QUESTION, "tools": [{"function": {"name": None}}]},
         "tools.0.function.name"),
        ("/v1/chat/completions", {"messages": [{"role": None, "content": "a"}]}, "messages.0.role"),
        ("/v1/messages", {"max_tokens": 1, "model": MODEL, "messages": [{"role": "user", "content": None}]},
         "messages.0.content"),
        ("/v1/messages", {"max_tokens": 1, "model": MODEL, "messages": QUESTION,
                          "tools": [{"type": "web_search_1", "name": "s"}, {"name": "a b", "input_schema": {}}]},
         "tools.1"),
    ],
)  # fmt: skip
def test_errors_name_the_field(plain: RunningServer, path: str, fields: dict[str, Any], name: str) -> None:
    with plain.http() as http:
        answer = http.post(path, json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{name}: ")


@pytest.mark.parametrize(
    "name", ["audio", "web_search_options", "documents", "use_beam_search", "early_stopping", "echo"]
)
def test_what_would_change_the_answer_is_refused_by_name(plain: RunningServer, name: str) -> None:
    error = refused(plain, **{name: ["x"]})
    assert error["message"].startswith(f"{name} is not supported here")
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_sampling_parameters_of_vllm_have_the_effect_of_the_same_fields(plain: RunningServer, tiny: AsyncLLM) -> None:
    assert tiny.codec is not None
    letters = tiny.codec.encode("abc")

    def text(**fields: Any) -> str:
        fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True} | fields
        return str(post(plain, "/v1/completions", prompt="Hi", **fields)["choices"][0]["text"])

    written = text(allowed_token_ids=letters)
    assert len(written) == 8
    assert set(written) <= set("abc")
    assert written[0] not in text(allowed_token_ids=letters, bad_words=[written[0]])
    answer = post(plain, "/v1/completions", prompt="x" * 10000, truncate_prompt_tokens=5)
    assert answer["usage"]["prompt_tokens"] == 5
    random = {text(temperature=1.0, seed=-1) for _ in range(4)}
    assert len(random) == 4


@pytest.mark.parametrize("name", ["whitespace_pattern", "disable_additional_properties", "structural_tag"])
def test_what_would_change_the_structure_is_refused_by_name(plain: RunningServer, name: str) -> None:
    error = refused(plain, structured_outputs={"json_object": True, name: "x"})
    assert error["message"].startswith(f"structured_outputs.{name} is not supported here")
    post(plain, structured_outputs={"json_object": True, name: "", "disable_fallback": True})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, True),
        ({"thinking": {"type": "auto"}}, None),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_thinking_has_the_form_of_other_providers(
    tiny: AsyncLLM, fields: dict[str, Any], expected: bool | None
) -> None:
    template = "{{ 'on' if enable_thinking else 'off' if enable_thinking is defined else 'unset' }}"
    with running(tiny, trust_request_chat_template=True) as server:
        usage = post(server, chat_template=template, **fields)["usage"]
        text = {None: "unset", True: "on", False: "off"}[expected]
        assert usage["prompt_tokens"] == post(server, chat_template=text)["usage"]["prompt_tokens"]


def test_a_strict_server_refuses_unknown_fields(tiny: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    with running(tiny, strict_requests=True) as server:
        error = refused(server, colour="red")
        assert (error["param"], error["code"]) == ("colour", "unsupported_parameter")
        post(server, colour=None, verbosity="low")
    with running(tiny) as server:
        for _ in range(2):
            post(server, colour="red")
    assert sum("'colour'" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    "name", ["get weather", "search (web)", "\N{GREEK SMALL LETTER ALPHA}", "a+b", 'a"b', "", "a" * 65]
)
def test_names_of_tools(plain: RunningServer, name: str) -> None:
    error = refused(plain, tools=[TOOL, {"type": "function", "function": {"name": name}}])
    assert error["message"].startswith("tools.1: ")
    assert error["param"] == "tools"


def test_names_are_as_long_as_the_api_allows(plain: RunningServer) -> None:
    with plain.http() as http:
        for name, chat, long in (
            ("a" * 64, 200, 200),
            ("a" * 65, 400, 200),
            ("a" * 128, 400, 200),
            ("a" * 129, 400, 400),
        ):
            tool = {"name": name, "parameters": {"type": "object"}}
            answers = [
                http.post(
                    "/v1/chat/completions",
                    json={"messages": QUESTION, "max_tokens": 1, "tools": [{"type": "function", "function": tool}]},
                ),
                http.post(
                    "/v1/responses",
                    json={"input": "a", "max_output_tokens": 1, "tools": [{"type": "function", **tool}]},
                ),
                http.post(
                    "/v1/messages",
                    json={
                        "model": MODEL,
                        "messages": QUESTION,
                        "max_tokens": 1,
                        "tools": [{"name": name, "input_schema": {"type": "object"}}],
                    },
                ),
            ]
            assert [answer.status_code for answer in answers] == [chat, long, long]


def test_tools_need_no_configuration(plain: RunningServer) -> None:
    """The template of the tiny model renders no tools, and names no format."""
    text = prompt(plain, [{"role": "system", "content": "Be brief."}, *QUESTION], tools=[TOOL])
    assert text.startswith("<|begin|>system: Be brief.\n\n")
    assert '"enum": ["UTC"]' in text
    client = plain.openai()
    tools: Any = [TOOL]
    forced = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=1.0
    )
    (call,) = forced.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("clock", {"zone": "UTC"})


@pytest.mark.parametrize(
    "other", [{"type": "custom", "custom": {"name": "x"}}, {"type": "web_search"}, {"googleSearch": {}}]
)
def test_tools_that_are_not_functions_are_left_out(plain: RunningServer, other: dict[str, Any]) -> None:
    assert prompt(plain, QUESTION, tools=[other, TOOL]) == prompt(plain, QUESTION, tools=[TOOL])
    assert prompt(plain, QUESTION, tools=[other]) == prompt(plain, QUESTION)
    answers = [post(plain, tools=tools) for tools in ([other, TOOL], [TOOL])]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    error = refused(plain, tools=[other, {"type": "function", "function": {"name": "a b"}}])
    assert error["message"].startswith("tools.1: ")


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ("any", True),
        ({"type": "any"}, True),
        ({"type": "required"}, True),
        ({"type": "none"}, False),
        ({"type": "auto"}, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}, False),
    ],
)
def test_forms_of_tool_choice(plain: RunningServer, choice: Any, calls: bool) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    tools = [other, TOOL] if isinstance(choice, dict) and "allowed_tools" in choice else [TOOL]
    fields: dict[str, Any] = {"tools": tools, "parallel_tool_calls": False, "max_tokens": 99, "seed": 3}
    answer = post(plain, tool_choice=choice, **fields)
    named = [call["function"]["name"] for call in answer["choices"][0]["message"].get("tool_calls", [])]
    assert named == ["clock"] * calls
    alone = post(plain, tool_choice="none" if choice == {"type": "none"} else "auto", tools=[TOOL])
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert refused(plain, tool_choice={"type": "mcp"}, tools=tools)["param"] == "tool_choice"


def test_functions_are_the_older_form_of_tools(plain: RunningServer) -> None:
    client = plain.openai()
    functions: Any = [FUNCTION]
    asked: dict[str, Any] = {"model": MODEL, "temperature": 1.0, "functions": functions}
    choice = client.chat.completions.create(**asked, messages=QUESTION, function_call={"name": "clock"}).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "clock"
    assert json.loads(choice.message.function_call.arguments) == {"zone": "UTC"}
    streamed = client.chat.completions.create(**asked, messages=QUESTION, function_call={"name": "clock"}, stream=True)
    deltas = [chunk.choices[0].delta.function_call for chunk in streamed]
    assert json.loads("".join(delta.arguments or "" for delta in deltas if delta)) == {"zone": "UTC"}
    history: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": '{"zone": "UTC"}'}},
        {"role": "function", "name": "clock", "content": "noon"},
    ]
    text = prompt(plain, history)
    assert '{"zone": "UTC"}' in text
    assert "tool: noon" in text


def test_older_names_of_structured_outputs(plain: RunningServer) -> None:
    for fields, expected in (({"guided_choice": ["yes"]}, "yes"), ({"guided_regex": "ab"}, "ab")):
        answer = post(plain, **fields, max_tokens=9)
        assert answer["choices"][0]["message"]["content"] == expected
    form: dict[str, Any] = {"response_format": {"type": "json_object", "schema": {"const": 8}}}
    answer = post(plain, **form, max_tokens=9)
    assert json.loads(answer["choices"][0]["message"]["content"]) == 8
    answer = post(plain, guided_json={"const": 7}, max_tokens=9)
    assert json.loads(answer["choices"][0]["message"]["content"]) == 7
    error = refused(plain, guided_regex="ab", structured_outputs={"choice": ["a"]})
    assert error["param"] == "structured_outputs"


@pytest.mark.parametrize("fields", [{"continue_final_message": True, "add_generation_prompt": False}, {"prefix": True}])
def test_the_last_message_is_continued(plain: RunningServer, fields: dict[str, Any]) -> None:
    last = {"role": "assistant", "content": "The capital is "}
    if "prefix" in fields:
        last, fields = last | fields, {}
    usage = post(plain, messages=[*QUESTION, last], **fields)["usage"]
    closed = prompt(plain, [*QUESTION, last], add_generation_prompt=False)
    open_end = closed.removesuffix("<|end|>")
    with plain.http() as http:
        tokens = http.post("/tokenize", json={"prompt": open_end, "add_special_tokens": False}).json()["count"]
    assert usage["prompt_tokens"] == tokens
    assert open_end.endswith("assistant: The capital is ")


def test_continuing_a_call_is_refused(plain: RunningServer) -> None:
    history = [*QUESTION, {"role": "assistant", "tool_calls": [CALL]}]
    assert "continue_final_message" in refused(plain, messages=history, continue_final_message=True)["message"]


def test_reasoning_has_both_names(plain: RunningServer) -> None:
    codec = plain.llm.codec
    assert codec is not None
    options = {"logit_bias": {str(codec.id_of_token("</think>")): 5.0}, "temperature": 1.0, "seed": 3, "max_tokens": 60}
    message = post(plain, **options, chat_template_kwargs={"begins_reasoning": True})["choices"][0]["message"]
    assert message["reasoning"]
    assert message["reasoning"] == message["reasoning_content"]


def test_chat_templates_of_the_operator_and_of_requests(tiny: AsyncLLM, plain: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}")
    with running(tiny, chat_template=str(file), trust_request_chat_template=True) as server:
        assert prompt(server, QUESTION) == "[user]Hi"
        assert prompt(server, QUESTION, chat_template="{{ messages[0].content }}!") == "Hi!"
        assert post(server, chat_template="{{ messages[0].content }}!")["usage"]["prompt_tokens"] == 3
    error = refused(plain, chat_template="{{ messages[0].content }}")
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")


def test_openais_own_parse_is_answered(plain: RunningServer) -> None:
    """Its messages, which have further fields, are sent back as they are."""
    client = plain.openai()
    tools: Any = [{"type": "function", "function": FUNCTION | {"strict": True}}]
    parsed = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    message = parsed.choices[0].message
    (call,) = message.tool_calls or ()
    assert call.function.parsed_arguments == {"zone": "UTC"}
    history: list[Any] = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    assert client.chat.completions.create(model=MODEL, messages=history, max_tokens=1).choices
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=QUESTION, modalities=["audio"])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"not": {"type": "string"}},
        {"type": "string", "pattern": "^(?=a)a"},
        {"$ref": "https://example.com/schema"},
        {"type": "any"},
    ],
)
def test_a_tool_that_is_not_strict_never_fails_for_its_schema(plain: RunningServer, schema: dict[str, Any]) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    post(plain, tools=[{"type": "function", "function": tool}], **fields)
    if "$ref" not in schema and "type" not in schema:
        error = refused(plain, tools=[{"type": "function", "function": tool | {"strict": True}}], **fields)
        assert "'f'" in error["message"]
        assert "not at #/properties/x" in error["message"]
        assert error["param"] == "tools"


def test_formats_name_the_place_that_cannot_be_enforced(plain: RunningServer) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"x": {"contains": {"type": "string"}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = refused(plain, response_format=form)
    assert "contains at #/properties/x" in error["message"]
    assert error["param"] == "response_format"
    schema["properties"]["x"] = {"propertyNames": {"type": "string"}, "format": "password"}
    post(plain, response_format=form)


def test_the_prompt_is_the_same_without_a_server(tiny: AsyncLLM, plain: RunningServer) -> None:
    history = [*QUESTION, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "noon"}]
    with plain.http() as http:
        tokens = http.post("/tokenize", json={"messages": history, "tools": [TOOL]}).json()["tokens"]
    assert tiny.chat_prompt(history, tools=[TOOL]) == {"prompt_token_ids": tokens}
