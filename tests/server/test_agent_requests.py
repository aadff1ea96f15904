"""Requests as agents and SDKs send them to the Responses API and to Anthropic's: hints, tools and histories."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_tool
from pydantic import BaseModel
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM
from moeserve.outputs import CompletionOutput, RequestOutput
from moeserve.sampling_params import SamplingParams

MAX_MODEL_LEN = 4096
TEMPLATE = (
    "{% if tools %}<|begin|>tools: {{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|begin|>{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{{ message.tool_calls | tojson if message.tool_calls }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: dict[str, Any] = {"type": "function", "name": "weather", "parameters": SCHEMA}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "patches files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /PATCH-RULE/"},
}
HI: list[Any] = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": MODEL, "max_output_tokens": 20}
MESSAGE: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "messages": HI}
TOOL: dict[str, Any] = {"name": "weather", "input_schema": SCHEMA}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1", "content": "20"}


class Place(BaseModel):
    city: str


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    path = Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=8, show_progress=False)
    with running(llm, answer_parser="hermes") as server:
        yield server
    llm.shutdown()


class Script:
    """Answers in place of the model's, the last one for all further prompts, and the prompts that it had."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self.answers = ["Hello."]
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []

    @property
    def prompt(self) -> str:
        return self.prompts[-1]

    async def generate(self, prompt: Any, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        codec = self._server.llm.codec
        assert codec is not None
        token_ids = prompt["prompt_token_ids"]
        self.prompts.append(codec.decode(token_ids, skip_special_tokens=False))
        self.params.append(params)
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        output = CompletionOutput(0, text, codec.encode(text, add_special_tokens=False), finish_reason="stop")
        yield RequestOutput("r", None, token_ids, [output], True)


@pytest.fixture
def script(agent_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script(agent_server)
    monkeypatch.setattr(agent_server.llm, "generate", script.generate)
    return script


def call_of(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# The Responses API.


def test_tools_that_only_a_provider_can_run_are_left_out(agent_server: RunningServer, script: Script) -> None:
    inner = {
        "type": "namespace",
        "name": "agents",
        "description": "d",
        "tools": [FUNCTION, {**FUNCTION, "name": "spawn"}],
    }
    hosted: list[Any] = [
        {"type": "web_search", "external_web_access": True},
        {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:9/"},
        {"type": "local_shell"},
        {"type": "of_the_future", "name": "other"},
    ]
    tools: Any = [FUNCTION, *hosted, inner, PATCH]
    client = agent_server.openai()
    answer = client.responses.create(**ASKED, input="Hi", tools=tools)
    offered = json.loads(script.prompt.split("tools: ")[1].split("<|end|>")[0])
    names = [tool["function"]["name"] for tool in offered]
    assert names == ["weather", "agents__weather", "spawn", "apply_patch"]
    assert "PATCH-RULE" in script.prompt
    assert len(answer.tools) == len(tools)
    client.responses.create(**ASKED, input="Hi", tools=hosted)
    assert "tools" not in script.prompt
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "spawn"}]}
    client.responses.create(**ASKED, input="Hi", tools=tools, tool_choice=allowed)
    assert "spawn" in script.prompt
    assert "apply_patch" not in script.prompt


@pytest.mark.parametrize(
    ("called", "arguments", "expected"),
    [
        ("weather", {"city": "Oslo"}, {"type": "function_call", "name": "weather", "arguments": '{"city": "Oslo"}'}),
        ("agents__weather", {}, {"type": "function_call", "name": "weather", "namespace": "agents", "arguments": "{}"}),
        ("apply_patch", {"input": "*** a\n"}, {"type": "custom_tool_call", "name": "apply_patch", "input": "*** a\n"}),
    ],
)
def test_calls_have_the_form_of_their_tools(
    agent_server: RunningServer, script: Script, called: str, arguments: Any, expected: dict[str, Any]
) -> None:
    tools: Any = [FUNCTION, {"type": "namespace", "name": "agents", "description": "d", "tools": [FUNCTION]}, PATCH]
    script.answers = [call_of(called, arguments)]
    client = agent_server.openai()
    (item,) = client.responses.create(**ASKED, input="Hi", tools=tools).output
    given = item.to_dict()
    assert {name: given.get(name) for name in expected} == expected
    events = list(client.responses.create(**ASKED, input="Hi", tools=tools, stream=True))
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    streamed = done.to_dict()
    assert {name: streamed.get(name) for name in expected} == expected
    text = expected.get("input", expected.get("arguments"))
    assert "".join(event.delta for event in events if event.type.endswith(".delta")) == text
    # The call goes back in the next request, and has the name by which the model knows the tool.
    output: Any = {"type": item.type + "_output", "call_id": given["call_id"], "output": "DONE"}
    client.responses.create(**ASKED, input=[*HI, item, output], tools=tools)
    history = script.prompt.split("assistant: ")[1]
    assert f'"name": "{called}"' in history
    assert "tool: DONE" in history


@pytest.mark.parametrize("streams", [False, True])
def test_only_the_first_call_is_returned_without_parallel_calls(
    agent_server: RunningServer, script: Script, streams: bool
) -> None:
    script.answers = [call_of("weather", {"city": "Oslo"}) + "\n" + call_of("weather", {"city": "Rome"})]
    chat_tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": HI, "tools": [chat_tool]}, {"parallel_tool_calls": False}),
        ("/v1/responses", {"input": "Hi", "tools": [FUNCTION]}, {"parallel_tool_calls": False}),
        (
            "/v1/messages",
            MESSAGE | {"tools": [TOOL]},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
    ]
    with agent_server.http() as http:
        for path, body, alone in asked:
            both, first = (http.post(path, json=body | {"stream": streams} | each).text for each in ({}, alone))
            assert "Oslo" in both
            assert "Rome" in both
            assert "Oslo" in first
            assert "Rome" not in first


HISTORIES: dict[str, tuple[Any, str]] = {  # items, and a text of the prompt
    "image of a tool": (
        [
            {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": "data:,"}],
            },
        ],
        "tool: [image omitted",
    ),
    "custom call of a tool that is gone": (
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "PATCHED"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "DONE"},
        ],
        "PATCHED",
    ),
    "shell of the provider": (
        [
            {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "o", "call_id": "c", "output": "FILES"},
        ],
        "tool: FILES",
    ),
    "output that has the id of its call": (
        [
            {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": "FILES"},
        ],
        "tool: FILES",
    ),
    "call with its output": (
        [{"type": "mcp_call", "id": "m", "server_label": "s", "name": "sum", "arguments": "{}", "output": "RESULT"}],
        "tool: RESULT",
    ),
    "call with its outputs": (
        [{"type": "code_interpreter_call", "id": "i", "code": "1+1", "outputs": [{"type": "logs", "logs": "LOGS"}]}],
        'tool: [{"type": "logs", "logs": "LOGS"}]',
    ),
    "call with its results": (
        [{"type": "file_search_call", "id": "f", "queries": ["q"], "results": [{"file_id": "1", "text": "PAGE"}]}],
        "tool: PAGE",
    ),
    "summary": (
        [{"type": "compaction_summary", "summary": [{"type": "summary_text", "text": "SUM"}]}],
        "user: SUM",
    ),
    "calls without ids": (
        [
            {"type": "function_call", "name": "view", "arguments": "{}"},
            {"type": "function_call_output", "output": "DONE"},
        ],
        "tool: DONE",
    ),
    "message of an agent": (
        [{"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "REPORT"}]}],
        "user: REPORT",
    ),
    "refusal": ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "NEVER"}]}], "assistant: NEVER"),
    "search": ([{"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}}], "Hi"),
    "compaction": ([{"type": "compaction", "encrypted_content": "gAAA"}], "Hi"),
    "reasoning of another provider": (
        [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gA"}],
        "Hi",
    ),
    "arguments that are an object": (
        [
            {"type": "function_call", "call_id": 7, "name": "view", "arguments": {"a": 1}},
            {"type": "function_call_output", "call_id": 7, "output": {"degrees": 20}},
        ],
        'tool: {"degrees": 20}',
    ),
    "input that is an object": (
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": {"PATCHED": 1}},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [20, "DONE"]},
        ],
        "PATCHED",
    ),
    "text that is null": (
        [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": None}]}],
        "assistant: <|end|>",
    ),
    "reasoning that is a text": (
        [{"type": "reasoning", "content": "THOUGHT", "summary": "SUM"}, {"role": "assistant", "content": "a"}],
        "assistant: <think>THOUGHT</think>a",
    ),
    "reasoning around calls": (
        [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "FIRST"}]},
            {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "SECOND"}]},
            {"type": "function_call", "call_id": "d", "name": "view", "arguments": "{}"},
        ],
        "<think>FIRST\nSECOND</think>",
    ),
    "future": ([{"type": "of_the_future", "call_id": 3, "content": {"a": 1}}], "Hi"),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_items_of_histories_are_rendered_or_left_out(agent_server: RunningServer, script: Script, name: str) -> None:
    items, text = HISTORIES[name]
    agent_server.openai().responses.create(**ASKED, input=[*HI, *items, {"role": "user", "content": "Go"}])
    assert text in script.prompt
    assert "gA" not in script.prompt
    assert "user: Go<|end|>" in script.prompt


def test_encrypted_reasoning_comes_back(agent_server: RunningServer, script: Script) -> None:
    script.answers = ["<think>Thöught.</think>Hello."]
    client = agent_server.openai()
    answer = client.responses.create(**ASKED, input="Hi", include=["reasoning.encrypted_content"], store=False)
    reasoning: Any = answer.output[0]
    item: Any = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": reasoning.encrypted_content}
    client.responses.create(**ASKED, input=[*HI, item, answer.output[1], *HI])
    assert "assistant: <think>Thöught.</think>Hello.<|end|>" in script.prompt
    plain: Any = client.responses.create(**ASKED, input="Hi").output[0]
    assert plain.encrypted_content is None


@pytest.mark.parametrize(
    "hint",
    [
        {"client_metadata": {"x": "a"}},
        {"truncation": "auto"},
        {"max_tool_calls": 5},
        {"stream_options": {"include_obfuscation": False}},
        {"context_management": [{"type": "compaction", "compact_threshold": 9}]},
        {"reasoning": {"generate_summary": "auto", "summary": "detailed"}},
        {"text": {"verbosity": "low"}},
        {"previous_response_id": None, "conversation": None, "prompt": None, "top_logprobs": 0, "background": False},
    ],
)
def test_hints_leave_the_prompt_alone(agent_server: RunningServer, script: Script, hint: Any) -> None:
    client = agent_server.openai()
    client.responses.create(**ASKED, input="Hi")
    client.responses.create(**ASKED, input="Hi", extra_body=hint)
    assert script.prompts[0] == script.prompts[1]


def test_what_would_change_the_answer_is_refused_by_name(agent_server: RunningServer, script: Script) -> None:
    client = agent_server.openai()
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    for field, value in {"input": image, "background": True, "conversation": "c", "top_logprobs": 3}.items():
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**{**ASKED, "input": "Hi"}, extra_body={field: value})
        assert (refused.value.param, refused.value.code) == (field, "unsupported_parameter")
    assert not script.prompts


def test_an_empty_input_is_answered(agent_server: RunningServer, script: Script) -> None:
    answer = agent_server.openai().responses.create(**ASKED, input=[], instructions="Be brief.")
    assert answer.output_text == "Hello."
    assert "system: Be brief.<|end|>" in script.prompt


def test_outputs_are_parsed_by_the_client_of_openai(agent_server: RunningServer, script: Script) -> None:
    script.answers = ['{"city": "Oslo"}']
    answer = agent_server.openai().responses.parse(**ASKED, input="Hi", text_format=Place)
    assert answer.output_parsed == Place(city="Oslo")
    assert script.params[-1].structured_outputs is not None


def test_a_stream_that_fails_has_the_failed_response(
    agent_server: RunningServer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(prompt: Any, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        yield RequestOutput("r", None, prompt["prompt_token_ids"], [CompletionOutput(0, "Hello.", [70])], False)
        raise RuntimeError("the engine failed")

    monkeypatch.setattr(agent_server.llm, "generate", failing)
    with agent_server.http() as http:
        text = http.post("/v1/responses", json={"input": "Hi", "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    response = events[-2]["response"]
    assert response["status"] == "failed"
    assert response["error"]["message"]
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hello.")


# Chat completions.


@pytest.mark.parametrize(
    ("thought", "has_calls"),
    [
        ({"type": "thinking", "thinking": "THOUGHT", "signature": "s"}, True),
        ({"type": "thinking", "thinking": [{"type": "text", "text": "THOUGHT"}]}, False),
        ({"type": "reasoning", "text": "THOUGHT"}, False),
    ],
)
def test_reasoning_and_calls_among_parts_are_not_text(
    agent_server: RunningServer, script: Script, thought: Any, has_calls: bool
) -> None:
    used = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "Looking."}, used]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "20"}
    messages: Any = [*HI, answer | ({"tool_calls": [call]} if has_calls else {}), result]
    agent_server.openai().chat.completions.create(model=MODEL, messages=messages)
    assert "assistant: <think>THOUGHT</think>Looking.[{" in script.prompt
    assert script.prompt.count("weather") == 1
    assert "omitted" not in script.prompt


# Anthropic's API.


@pytest.mark.parametrize(
    "hint",
    [
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"speed": "fast"},
        {"container": None, "mcp_servers": [], "inference_geo": "us", "service_tier": "auto"},
        {"container": "c"},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "scope": "global"}}]},
        {
            "tools": [
                {**TOOL, "eager_input_streaming": True, "defer_loading": True, "input_examples": [{"city": "Oslo"}]}
            ]
        },
        {"tools": [{**TOOL, "allowed_callers": ["direct"]}, {"type": "web_search_20250305", "name": "web_search"}]},
        {"metadata": {"user_id": "u", "other": 1}, "thinking": {"type": "adaptive", "display": "omitted"}},
    ],
)
def test_hints_of_anthropics_clients_leave_the_prompt_alone(
    agent_server: RunningServer, script: Script, hint: dict[str, Any]
) -> None:
    plain: dict[str, Any] = (
        {"system": "Be brief."} if "system" in hint else {"tools": [TOOL]} if "tools" in hint else {}
    )
    client = agent_server.anthropic()
    client.messages.create(**MESSAGE, extra_body=plain)
    client.messages.create(**MESSAGE, extra_body=hint)
    assert script.prompts[0] == script.prompts[1]
    counted = client.messages.count_tokens(model=MODEL, messages=HI, extra_body=hint)
    assert counted.input_tokens == client.messages.count_tokens(model=MODEL, messages=HI, extra_body=plain).input_tokens


def test_a_strict_tool_is_offered(agent_server: RunningServer, script: Script) -> None:
    tools: list[Any] = [{**TOOL, "strict": True}]
    agent_server.anthropic().messages.create(**MESSAGE, tools=tools)
    assert '"name": "weather"' in script.prompt


@pytest.mark.parametrize("schema", [[], True, ["x"], "x"], ids=repr)
def test_a_schema_that_is_no_object_is_empty(agent_server: RunningServer, script: Script, schema: Any) -> None:
    """As PHP encodes an empty object."""
    function = {"name": "weather", "parameters": schema}
    bodies = {
        "chat/completions": {"messages": HI, "tools": [{"type": "function", "function": function}]},
        "responses": {"input": HI, "tools": [{"type": "function", **function}]},
        "messages": {"messages": HI, "max_tokens": 9, "tools": [{"name": "weather", "input_schema": schema}]},
    }
    with agent_server.http() as http:
        for path, body in bodies.items():
            answer = http.post(f"/v1/{path}", json={"model": MODEL} | body)
            assert answer.status_code == 200, answer.text
            assert '"parameters": {}' in script.prompt
        strict = {"messages": HI, "tools": [{"type": "function", "function": {**function, "strict": True}}]}
        assert http.post("/v1/chat/completions", json=strict).status_code == 400


def test_lines_for_billing_are_left_out(agent_server: RunningServer, script: Script) -> None:
    client = agent_server.anthropic()
    rules = {"type": "text", "text": "Be brief."}
    for number in range(2):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
        systems: list[Any] = [[{"type": "text", "text": header}, rules], [{**rules, "text": f"{header}\nBe brief."}]]
        for system in systems:
            client.messages.create(**MESSAGE, system=system)
    client.messages.create(**MESSAGE, system="Be brief.")
    assert len(script.prompts) == 5
    assert len(set(script.prompts)) == 1


def test_histories_with_blocks_of_providers(agent_server: RunningServer, script: Script) -> None:
    used = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}, "caller": {"type": "direct"}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    search = [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "SECRET"}]
    blocks = [
        {"type": "thinking", "thinking": "First. ", "signature": "s"},
        {"type": "redacted_thinking", "data": "SECRET"},
        {"type": "thinking", "thinking": "Second."},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "SECRET"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": search},
        {"type": "mcp_tool_result", "tool_use_id": "m1", "content": [{"type": "text", "text": "FOUND"}]},
        {"type": "text", "text": "Looking.", "citations": [{"type": "web_search_result_location"}]},
        used,
        {**used, "id": "c2", "input": "not an object"},
    ]
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A TEXT"}}
    results = [
        {**RESULT, "content": [{"type": "text", "text": "20"}, image], "is_error": None},
        {**RESULT, "tool_use_id": "c2", "content": [{"type": "tool_reference", "tool_name": "x"}]},
        document,
        {"type": "text", "text": "Go"},
    ]
    history: Any = [*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    agent_server.anthropic().messages.create(**MESSAGE | {"messages": history})
    assert "<think>First. Second.</think>FOUND\nLooking." in script.prompt
    assert '"city": "Oslo"' in script.prompt
    assert "tool: 20\n[image omitted" in script.prompt
    assert "user: A TEXT\nGo<|end|>" in script.prompt
    assert "SECRET" not in script.prompt


@pytest.mark.parametrize(
    ("role", "content", "text"),
    [
        ("assistant", None, "assistant: <|end|>"),
        ("assistant", [{"type": "thinking", "thinking": None}, {"type": "text", "text": None}], "assistant: <|end|>"),
        ("assistant", ["hi", {"type": "tool_use", "id": 7, "name": None}], "assistant: hi"),
        ("user", [{**RESULT, "tool_use_id": 7, "content": {"type": "text", "text": "20"}}], "tool: 20<|end|>"),
        ("user", [{**RESULT, "content": {"degrees": 20}}], 'tool: {"degrees": 20}<|end|>'),
        ("user", {**RESULT, "content": [{"text": "20"}]}, "tool: 20<|end|>"),
    ],
)
def test_any_message_of_a_history_is_rendered(
    agent_server: RunningServer, script: Script, role: str, content: Any, text: str
) -> None:
    history: Any = [*HI, {"role": role, "content": content}, *HI]
    agent_server.anthropic().messages.create(**MESSAGE | {"messages": history})
    assert text in script.prompt


@pytest.mark.parametrize(
    ("content", "field"), [(None, "messages.0.content: "), ([{"type": "text"}], "messages.0.content.0.text: ")]
)
def test_a_message_of_the_user_needs_a_text(agent_server: RunningServer, content: Any, field: str) -> None:
    messages: Any = [{"role": "user", "content": content}]
    with pytest.raises(anthropic.BadRequestError, match=field):
        agent_server.anthropic().messages.create(**MESSAGE | {"messages": messages})


def test_what_anthropics_clients_must_not_send(agent_server: RunningServer, script: Script) -> None:
    client = agent_server.anthropic()
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0\.image is"):
        client.messages.create(**MESSAGE | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        client.messages.create(**MESSAGE, extra_body={"mcp_servers": [{"type": "url", "url": "http://127.0.0.1:9"}]})
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**MESSAGE, extra_body={"thread": {"type": "create"}})
    body: Any = refused.value.body
    assert body["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert not script.prompts


def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(agent_server: RunningServer) -> None:
    client = agent_server.anthropic()
    limit = MAX_MODEL_LEN - 1
    for size in (MAX_MODEL_LEN, 20 * MAX_MODEL_LEN):
        messages: Any = [{"role": "user", "content": "x" * size}]
        with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {limit} maximum"):
            client.messages.create(**MESSAGE | {"messages": messages})


def test_the_last_message_of_the_assistant_is_continued(agent_server: RunningServer, script: Script) -> None:
    begun: Any = [*HI, {"role": "assistant", "content": "The capital is"}]
    agent_server.anthropic().messages.create(**MESSAGE | {"messages": begun})
    assert script.prompt.endswith("assistant: The capital is")


def test_formats_of_anthropics_clients(agent_server: RunningServer, script: Script) -> None:
    script.answers = ['{"city": "Oslo"}']
    client = agent_server.anthropic()
    answer = client.messages.parse(**MESSAGE, output_format=Place)
    assert answer.parsed_output == Place(city="Oslo")
    client.messages.create(**MESSAGE, extra_body={"output_format": {"type": "json_schema", "schema": SCHEMA}})
    assert [params.structured_outputs is not None for params in script.params] == [True, True]


def test_reasoning_is_signed(agent_server: RunningServer, script: Script) -> None:
    script.answers = ["<think>Thought.</think>Hello."]
    client = agent_server.anthropic()
    whole = client.messages.create(**MESSAGE).content
    assert [block.type for block in whole] == ["thinking", "text"]
    assert whole[0].signature
    with client.messages.stream(**MESSAGE) as stream:
        assert [block.to_dict() for block in stream.get_final_message().content] == [block.to_dict() for block in whole]


def test_tools_are_run_by_anthropics_client(agent_server: RunningServer, script: Script) -> None:
    @beta_tool
    def weather(city: str) -> str:
        """Return the weather."""
        return f"20 in {city}"

    script.answers = [call_of("weather", {"city": "Oslo"}), "It is 20 degrees."]
    runner = agent_server.anthropic().beta.messages.tool_runner(**MESSAGE, tools=[weather])
    (block,) = runner.until_done().content
    assert block.type == "text"
    assert block.text == "It is 20 degrees."
    assert "tool: 20 in Oslo" in script.prompt


def test_usage_counts_tokens_that_are_written_to_the_cache(agent_server: RunningServer) -> None:
    client = agent_server.anthropic()
    system: Any = [{"type": "text", "text": "Count my tokens. " * 20, "cache_control": {"type": "ephemeral"}}]
    first, second = (client.messages.create(**MESSAGE, system=system).usage for _ in range(2))
    total = client.messages.count_tokens(model=MODEL, messages=HI, system=system).input_tokens
    block_size = agent_server.llm.config.cache.block_size
    assert (first.cache_read_input_tokens, first.input_tokens) == (0, total % block_size)
    assert first.cache_creation_input_tokens == total - total % block_size
    assert second.cache_read_input_tokens
    for usage in (first, second):
        read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        assert usage.input_tokens + read + written == total


def test_openais_usage_counts_tokens_that_are_written_to_the_cache(agent_server: RunningServer) -> None:
    block_size = agent_server.llm.config.cache.block_size
    with agent_server.http() as http:
        for path, field, prompt in (
            ("/v1/completions", "prompt", "Write my tokens. " * 20),
            ("/v1/chat/completions", "prompt", [{"role": "user", "content": "Write my tokens. " * 20}]),
            ("/v1/responses", "input", "Write my tokens to the cache. " * 20),
        ):
            body = {"messages" if "chat" in path else field: prompt, "max_tokens": 1, "max_output_tokens": 1}
            for is_second in (False, True):
                usage = http.post(path, json=body).json()["usage"]
                total, details = usage[f"{field}_tokens"], usage[f"{field}_tokens_details"]
                in_cache = details["cached_tokens"] + details["cache_write_tokens"]
                assert in_cache == max(details["cached_tokens"], total - total % block_size)
                assert (details["cached_tokens"] < block_size * 4) != is_second
