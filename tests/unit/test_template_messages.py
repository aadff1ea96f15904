"""Conversations with tool calls as published chat templates render them."""

from __future__ import annotations

from typing import Any

import pytest
from published_tokenizers import PACKAGES

from moeserve.api.chat_template import render_conversation
from moeserve.api.template_messages import template_messages
from moeserve.api.tokenizer import TextCodec

CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]
CALL_IN_TEXT = {
    "deepseek-v3": '<｜tool▁sep｜>clock\n```json\n{"zone": "UTC"}\n```',  # noqa: RUF001, DeepSeek's own characters
    "qwen3": '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>',
}


@pytest.mark.parametrize("model", PACKAGES)
def test_calls_reach_the_prompt(model: str) -> None:
    if not PACKAGES[model].folder.exists():
        pytest.skip("`make tokenizers` fetches it")
    codec = TextCodec.load(str(PACKAGES[model].folder))
    assert codec is not None
    rendered = codec.decode(codec.chat_prompt(MESSAGES), skip_special_tokens=False)
    assert CALL_IN_TEXT[model] in rendered
    assert "noon" in rendered


def test_conversations_without_calls_have_one_form() -> None:
    assert template_messages(MESSAGES[:1], "") == [MESSAGES[:1]]
    assert template_messages([{"role": "assistant"}], "content is none") == [[{"role": "assistant", "content": ""}]]


PLAIN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
SYSTEM_FIRST = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
)
LATER_IGNORED = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for message in messages if message.role in ('user', 'assistant') %}[{{ message.role }}]{{ message.content }}"
    "{% endfor %}"
)
NO_SYSTEM = (
    "{{ bos_token + '' }}{% for message in messages %}{% if message.role == 'system' or "
    "(message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
)
TEMPLATES = {"plain": PLAIN, "system first": SYSTEM_FIRST, "later ignored": LATER_IGNORED, "no system": NO_SYSTEM}


def text_of(template: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return render_conversation(
        template,
        messages,
        tools,
        add_generation_prompt=False,
        continue_final_message=False,
        special_tokens={"bos_token": "<s>"},
        arguments={},
    )


def conversation(roles: str) -> list[dict[str, Any]]:
    """Return messages with the texts t0, t1 and so on, by the first letters of their roles."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": names[letter], "content": f"t{place}"} for place, letter in enumerate(roles)]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("roles", ["su", "ssu", "dsdu", "us", "usu", "uasu", "suasua", "uassus", "duadua", "s"])
def test_every_instruction_reaches_the_prompt_and_moves_nothing(template: str, roles: str) -> None:
    """Each longer conversation begins with the text of the shorter one."""
    before = ""
    for number in range(1, len(roles) + 1):
        text = text_of(TEMPLATES[template], conversation(roles[:number]))
        positions = [text.find(f"t{place}") for place in range(number)]
        assert -1 not in positions
        assert positions == sorted(positions)
        if number > 1 and set(roles[: number - 1]) - set("sd"):  # before, instructions may move into the user's turn
            assert text.startswith(before)
        before = text


def test_instructions_at_the_start_are_one_message() -> None:
    assert text_of(SYSTEM_FIRST, conversation("ssu")) == "[system]t0\n\nt1[user]t2"
    assert text_of(SYSTEM_FIRST, conversation("uas")) == "[user]t0[assistant]t1[user]t2"
    assert text_of(PLAIN, conversation("uas")) == "[user]t0[assistant]t1[system]t2"
    assert text_of(NO_SYSTEM, conversation("su")) == "<s>[user]t0\n\nt1"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"zone": "UTC"}', {"zone": "UTC"}),
        ({"zone": "UTC"}, {"zone": "UTC"}),
        ('"{\\"zone\\": \\"UTC\\"}"', {"zone": "UTC"}),
        ("", {}),
        (None, {}),
        ('{"zone": "U', {"arguments": '{"zone": "U'}),
        ("[1]", {"arguments": "[1]"}),
        ("no JSON", {"arguments": "no JSON"}),
    ],
)
def test_arguments_become_objects(arguments: Any, expected: Any) -> None:
    message = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "clock", "arguments": arguments}}]}
    forms = template_messages([message], "{{ messages[0].tool_calls }}")
    assert forms[0][0]["tool_calls"][0]["function"]["arguments"] == expected
    assert isinstance(forms[-1][0]["tool_calls"][0]["function"]["arguments"], str)


def test_neighbours_of_the_same_role_are_merged_in_the_last_form() -> None:
    user: dict[str, Any] = {"role": "user", "content": "a"}
    called: dict[str, Any] = {"role": "assistant", "content": "b", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c", "content": "d"}
    messages = [user, user, {"role": "assistant", "content": "e"}, called, result, result, called, user]
    forms = template_messages(messages, "{{ messages[0].tool_calls }} 'tool'")
    assert [message["role"] for message in forms[0]] == [message["role"] for message in messages]
    merged = forms[-1]
    assert [message["role"] for message in merged] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert [message["content"] for message in merged[:2]] == ["a\n\na", "e\n\nb"]
    assert len(merged[1]["tool_calls"]) == 1


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_arguments_that_are_nested_too_deep_stay_a_text(depth: int) -> None:
    text = '{"a":' * depth + "1" + "}" * depth
    call = {**CALL, "function": {"name": "clock", "arguments": text}}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert len(text_of(template, [{"role": "assistant", "content": "", "tool_calls": [call]}])) > depth


def test_a_template_without_tools_gets_them_as_text() -> None:
    tool = {"type": "function", "function": {"name": "clock", "description": "tells the time"}}
    text = text_of(LATER_IGNORED, [{"role": "system", "content": "Be brief."}, *MESSAGES], [tool])
    assert text.startswith("[system]Be brief.\n\n")
    assert '"description": "tells the time"' in text
    assert '[assistant]<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>' in text
    assert text.endswith("[user]<tool_response>\nnoon\n</tool_response>")
