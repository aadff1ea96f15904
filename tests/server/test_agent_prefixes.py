"""Long conversations of agents: almost all tokens of a prompt are found in the prefix cache, in every API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM

NUM_TURNS, LEAST_CACHED = 50, 0.95
TURNS_BETWEEN_QUESTIONS, TURNS_BETWEEN_REMINDERS = 10, 7
RULES = "You are an agent that helps with software. Read files before you change them, and run the tests. " * 30
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
    "required": ["path"],
}
# Renders system messages anywhere, and all reasoning.
PLAIN = (
    "{% if tools %}<|begin|>tools: {{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|begin|>{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
# Refuses system messages after the first message, and drops the reasoning before the last question.
STRICT = (
    "{% set last = namespace(question=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|begin|>tools: {{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must be the first') }}{% endif %}<|begin|>{{ message.role }}: "
    "{% if message.reasoning_content and loop.index0 > last.question %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
# Renders neither tools nor calls, results and system messages.
BARE = (
    "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('no') }}"
    "{% endif %}<|begin|>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
TEMPLATES = {"plain": PLAIN, "strict": STRICT, "bare": BARE}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 32768}))
    llm = AsyncLLM(folder, dtype="float32", num_threads=1, kv_cache_memory="256MiB", show_progress=False)
    yield llm
    llm.shutdown()


@pytest.fixture
def agent_server(llm: AsyncLLM, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningServer]:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATES[request.param])
    with running(llm, answer_parser="hermes", chat_template=str(path)) as server:
        yield server


def call_of(turn: int) -> dict[str, Any]:
    return {"path": f"src/größe_{turn}.py", "line": turn}


def chat_usage(server: RunningServer, num_turns: int) -> tuple[int, int]:
    """Return the tokens of the prompt of a turn, and those that were cached."""
    messages: list[Any] = [
        {"role": "system", "content": "Chat. " + RULES},
        {"role": "user", "content": "Mend the tests"},
    ]
    for turn in range(num_turns):
        function = {"name": "read", "arguments": json.dumps(call_of(turn))}
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": f"I read file {turn}",
                "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"def f{turn}(): return {turn}"})
        messages += [{"role": "developer", "content": f"Note {turn}: be brief"}] * is_time(
            turn, TURNS_BETWEEN_REMINDERS
        )
        if is_time(turn, TURNS_BETWEEN_QUESTIONS):
            messages += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": f"And {turn}?"}]
    tools: list[Any] = [{"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}]
    answer = server.openai().chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def messages_usage(server: RunningServer, num_turns: int) -> tuple[int, int]:
    """Return prompt tokens and cached tokens of a request to Anthropic's API; each request has a new billing block."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Mend the tests"}]}]
    for turn in range(num_turns):
        call = {"type": "tool_use", "id": f"c{turn}", "name": "read", "input": call_of(turn)}
        thought = {"type": "thinking", "thinking": f"I read file {turn}", "signature": "moeserve"}
        messages.append({"role": "assistant", "content": [thought, call]})
        result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": f"def f{turn}(): return {turn}"}
        messages.append({"role": "user", "content": [result]})
        messages += [{"role": "system", "content": f"Note {turn}: be brief"}] * is_time(turn, TURNS_BETWEEN_REMINDERS)
        if is_time(turn, TURNS_BETWEEN_QUESTIONS):
            done = {"role": "assistant", "content": [{"type": "text", "text": "Done."}]}
            messages += [done, {"role": "user", "content": [{"type": "text", "text": f"And {turn}?"}]}]
    if messages[-1]["role"] == "user":
        messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.{num_turns:03x}; cc_entrypoint=cli; cch={num_turns:05x};"
    blocks: list[Any] = [{"type": "text", "text": text} for text in (billing, "Messages. " + RULES)]
    tools: list[Any] = [{"name": "read", "input_schema": PARAMETERS}]
    answer = server.anthropic().messages.create(
        model=MODEL, system=blocks, messages=messages, tools=tools, max_tokens=1
    )
    cached = answer.usage.cache_read_input_tokens or 0
    return answer.usage.input_tokens + cached + (answer.usage.cache_creation_input_tokens or 0), cached


def responses_usage(server: RunningServer, num_turns: int) -> tuple[int, int]:
    """Return the same for the Responses API."""
    items: list[Any] = [{"role": "user", "content": "Mend the tests"}]
    for turn in range(num_turns):
        summary = [{"type": "summary_text", "text": f"I read file {turn}"}]
        items += [
            {"type": "reasoning", "id": f"r{turn}", "summary": summary},
            {"type": "function_call", "call_id": f"c{turn}", "name": "read", "arguments": json.dumps(call_of(turn))},
            {"type": "function_call_output", "call_id": f"c{turn}", "output": f"def f{turn}(): return {turn}"},
        ]
        items += [{"role": "developer", "content": f"Note {turn}: be brief"}] * is_time(turn, TURNS_BETWEEN_REMINDERS)
        if is_time(turn, TURNS_BETWEEN_QUESTIONS):
            done = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}
            items += [done, {"role": "user", "content": f"And {turn}?"}]
    tools: list[Any] = [{"type": "function", "name": "read", "parameters": PARAMETERS, "strict": False}]
    answer = server.openai().responses.create(
        model=MODEL, instructions="Responses. " + RULES, input=items, tools=tools, max_output_tokens=1
    )
    assert answer.usage is not None
    return answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens


def is_time(turn: int, turns_between: int) -> bool:
    return turn % turns_between == turns_between - 1


@pytest.mark.slow_but("plain-messages")
@pytest.mark.parametrize(
    ("agent_server", "usage_of_turn"),
    [
        ("plain", messages_usage),
        ("strict", chat_usage),
        ("strict", messages_usage),
        ("strict", responses_usage),
        ("bare", chat_usage),
    ],
    indirect=["agent_server"],
)
def test_turns_of_an_agent_are_cached(
    agent_server: RunningServer, usage_of_turn: Callable[[RunningServer, int], tuple[int, int]]
) -> None:
    usages = [usage_of_turn(agent_server, num_turns) for num_turns in range(NUM_TURNS)]
    num_prompt, num_cached = (sum(numbers) for numbers in zip(*usages[1:], strict=True))
    assert num_cached >= LEAST_CACHED * num_prompt
