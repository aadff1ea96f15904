"""Conversations with tool calls as published chat templates render them."""

from __future__ import annotations

from typing import Any

import pytest
from published_tokenizers import PACKAGES

pytest.importorskip("fastapi", reason="install it with: pip install 'moeserve[server]'")

from moeserve.api.tokenizer import TextCodec
from moeserve.errors import RequestError
from moeserve.server.conversation import template_messages
from moeserve.server.errors import ApiError

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
    rendered = []
    for messages in template_messages(MESSAGES, codec.chat_template or ""):
        try:
            rendered.append(codec.decode(codec.chat_prompt(messages), skip_special_tokens=False))
        except RequestError:
            continue
    assert CALL_IN_TEXT[model] in rendered[0]
    assert "noon" in rendered[0]


def test_conversations_without_calls_have_one_form() -> None:
    assert template_messages(MESSAGES[:1], "") == [MESSAGES[:1]]
    assert template_messages([{"role": "assistant"}], "content is none") == [[{"role": "assistant", "content": ""}]]


def test_arguments_that_are_no_json_are_refused() -> None:
    wrong = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "clock", "arguments": "{"}}]}
    with pytest.raises(ApiError, match="clock"):
        template_messages([wrong], "")
