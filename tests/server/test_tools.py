"""Formats of answers, tool calls and reasoning, by clients of others. The model writes at random what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM
from moeserve.parsers.families import FAMILIES

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["London", "Paris/Île"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": CITY, "clock": CLOCK}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION: list[Any] = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 1.0, "max_tokens": 400}
FORCED = [name for name, family in FAMILIES.items() if family.forced_calls]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=2048, max_num_seqs=32, show_progress=False)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module", params=["hermes"])
def tools_server(request: pytest.FixtureRequest, tiny: AsyncLLM) -> Iterator[RunningServer]:
    with running(tiny, answer_parser=request.param) as server:
        yield server


def check_calls(calls: Any) -> None:
    """Raise an error unless the calls are of the tools, with valid arguments and different ids."""
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.slow_but("hermes", "deepseek_v3")
@pytest.mark.parametrize("tools_server", FORCED, indirect=True)
@pytest.mark.parametrize("seed", [1, 2])
def test_calls_that_must_be_made(tools_server: RunningServer, seed: int) -> None:
    client = tools_server.openai()
    answer = client.chat.completions.create(
        **ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
    )
    (choice,) = answer.choices
    check_calls(choice.message.tool_calls)
    assert len(choice.message.tool_calls or ()) == 1
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    named = {"type": "function", "function": {"name": "clock"}}
    answer = client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=named, seed=seed)
    calls = answer.choices[0].message.tool_calls
    check_calls(calls)
    assert [call.function.name for call in calls or ()] == ["clock"]


def test_streamed_calls_are_those_of_the_whole_answer(tools_server: RunningServer) -> None:
    client = tools_server.openai()
    options: dict[str, Any] = {**ASKED, "tools": TOOLS, "tool_choice": "required", "seed": 4, "max_tokens": 120}
    whole = client.chat.completions.create(**options).choices[0]
    streamed: dict[int, list[Any]] = {}
    reason = None
    for chunk in client.chat.completions.create(**options, stream=True):
        reason = chunk.choices[0].finish_reason or reason
        for call in chunk.choices[0].delta.tool_calls or []:
            part = streamed.setdefault(call.index, [call.id, call.function.name, ""])
            part[2] += call.function.arguments
    expected = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or ()]
    assert [part[1:] for part in streamed.values()] == expected
    assert all(part[0] for part in streamed.values())
    assert reason == whole.finish_reason


def test_calls_in_the_other_apis(tools_server: RunningServer) -> None:
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = tools_server.openai().responses.create(
        model=MODEL, input="Hi", tools=flat, tool_choice="required", parallel_tool_calls=False, temperature=1.0
    )
    (call,) = response.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])

    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 400, "tools": tools}
    client = tools_server.anthropic()
    message = client.messages.create(**options, tool_choice=choice)
    (block,) = message.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMAS[block.name])
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**options, tool_choice=choice) as stream:
        final = stream.get_final_message()
    jsonschema.validate(final.content[0].input, SCHEMAS[final.content[0].name])


def test_results_of_calls_are_a_part_of_the_conversation(tools_server: RunningServer) -> None:
    """Each API's form of a conversation with calls becomes the same prompt."""
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    messages: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    chat = tools_server.openai().chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    items: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": '{"zone": "UTC"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
    ]
    response = tools_server.openai().responses.create(model=MODEL, input=items, max_output_tokens=1)
    use = {"type": "tool_use", "id": "call_1", "name": "clock", "input": {"zone": "UTC"}}
    turns: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "noon"}]},
    ]
    counted = tools_server.anthropic().messages.count_tokens(model=MODEL, messages=turns)
    assert chat.usage is not None
    assert response.usage is not None
    assert chat.usage.prompt_tokens == response.usage.input_tokens == counted.input_tokens


@pytest.mark.parametrize("seed", range(3))
def test_formats(tools_server: RunningServer, seed: int) -> None:
    client = tools_server.openai()
    described: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = client.chat.completions.create(**ASKED, seed=seed, response_format=described)
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), CITY)
    form: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    response = client.responses.create(model=MODEL, input="Hi", text=form, temperature=1.0)
    jsonschema.validate(json.loads(response.output_text), CITY)
    config: Any = {"format": {"type": "json_schema", "schema": CITY}}
    message = tools_server.anthropic().messages.create(
        model=MODEL, messages=QUESTION, max_tokens=400, output_config=config
    )
    jsonschema.validate(json.loads(message.content[0].text), CITY)
    for outputs, pattern in (({"regex": "[ab]{3}/x"}, "[ab]{3}/x"), ({"choice": ["yes", "no"]}, "yes|no")):
        extra = {"structured_outputs": outputs}
        text = client.completions.create(model=MODEL, prompt="Hi", max_tokens=30, extra_body=extra).choices[0].text
        assert re.fullmatch(pattern, text)


def test_an_answer_is_either_a_call_or_in_the_format(tools_server: RunningServer) -> None:
    described: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = tools_server.openai().chat.completions.create(
        **ASKED, n=16, seed=1, tools=TOOLS, response_format=described, parallel_tool_calls=False
    )
    kinds = set()
    for choice in answer.choices:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            check_calls(choice.message.tool_calls)
        else:
            jsonschema.validate(json.loads(choice.message.content or ""), CITY)
    assert kinds == {"stop", "tool_calls"}


def test_reasoning_comes_before_the_format(tools_server: RunningServer) -> None:
    """The template begins the reasoning, which the answer ends at random, and the format begins behind it."""
    codec = tools_server.llm.codec
    assert codec is not None
    described: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    template = {"chat_template_kwargs": {"begins_reasoning": True}}
    answer = tools_server.openai().chat.completions.create(
        **ASKED,
        seed=3,
        response_format=described,
        logit_bias={str(codec.id_of_token("</think>")): 5.0},
        extra_body=template,
    )
    (choice,) = answer.choices
    jsonschema.validate(json.loads(choice.message.content or ""), CITY)
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"]
    forced = tools_server.openai().chat.completions.create(
        **ASKED,
        seed=3,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        logit_bias={str(codec.id_of_token("</think>")): 5.0},
        extra_body=template,
    )
    check_calls(forced.choices[0].message.tool_calls)


@pytest.fixture(scope="module")
def short_prompts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose template writes only how many tools there are."""
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2**14)
    template = folder / "short.jinja"
    template.write_text("{{ messages[-1]['content'] }}{{ tools | length }}")
    llm = AsyncLLM(folder, dtype="float32", max_num_seqs=4, show_progress=False)
    with running(llm, answer_parser="hermes", chat_template=str(template)) as server:
        yield server
    llm.shutdown()


def test_many_tools_are_served_although_their_schemas_exceed_one_grammar(short_prompts: RunningServer) -> None:
    """A hundred tools, each of the size that MCP servers have; the largest ones lose their schemas."""
    padded = {name: schema | {"description": "x" * 1500} for name, schema in SCHEMAS.items()}
    named = [(f"{name}_{number}", schema) for number in range(55) for name, schema in padded.items()]
    described: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    tools: list[Any] = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in named]
    tools += TOOLS
    client = short_prompts.openai()
    asked: dict[str, Any] = ASKED | {"tools": tools, "max_tokens": 60, "seed": 1}
    called = client.chat.completions.create(**asked, tool_choice="required").choices[0].message
    assert called.tool_calls
    formatted = client.chat.completions.create(**asked, response_format=described).choices[0].message
    assert formatted.tool_calls or (formatted.content or "").startswith("{")
    flat: Any = [{"type": "function", "name": name, "parameters": each} for name, each in named]
    response = client.responses.create(
        model=MODEL, input="Hi", tools=flat, tool_choice="required", max_output_tokens=60
    )
    assert response.output[0].type == "function_call"
    blocks: Any = [{"name": name, "input_schema": each} for name, each in named]
    message = short_prompts.anthropic().messages.create(
        model=MODEL, messages=QUESTION, max_tokens=60, tools=blocks, tool_choice={"type": "any"}
    )
    assert message.content[0].type == "tool_use"


def test_strict_tools_that_exceed_one_grammar_are_refused(short_prompts: RunningServer) -> None:
    function = {"strict": True, "parameters": CITY | {"description": "x" * 1500}}
    tools: Any = [{"type": "function", "function": {"name": f"f{number}", **function}} for number in range(100)]
    with pytest.raises(openai.BadRequestError) as refused:
        short_prompts.openai().chat.completions.create(**ASKED, tools=tools, tool_choice="required")
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, None),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "(" * 50}}}, None),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ],
)
def test_formats_that_cannot_be_served(tools_server: RunningServer, options: Any, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        tools_server.openai().chat.completions.create(**ASKED, **options)
    if param is not None:
        assert refused.value.param == param
