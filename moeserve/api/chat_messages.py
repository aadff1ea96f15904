"""Validation of conversations and tools before a chat template renders them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeserve.errors import RequestError, shown


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation, each with its content as one text.

    Raises:
        RequestError: the role or the content of a message is missing or has a wrong type.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(f'messages={shown(messages)} must be a list of at least one {{"role": ..., "content": ...}}')
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return tools in the form that chat templates expect: a list of JSON schemas, or None.

    Raises:
        RequestError: the tools have a different form.
    """
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(
            f'tools={shown(tools)} must be a list of {{"type": "function", "function": {{"name": ..., ...}}}}'
        )
    return [dict(tool) for tool in tools]


def _check_message(name: str, message: Any) -> dict[str, Any]:
    has_both = isinstance(message, Mapping) and "role" in message
    if has_both and message["role"] != "assistant":  # an assistant message may consist of tool calls alone
        has_both = "content" in message
    if not has_both:
        raise RequestError(f'{name}={shown(message)} must be a dict with "role" and "content"')
    role, content = message["role"], message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{name}: role={shown(role)} must be a text such as 'user'")
    if content is None and role == "assistant":
        return dict(message)
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, (list, tuple)) or not all(map(_is_text_part, parts)):
        raise RequestError(
            f'{name}: content={shown(content)} must be a text, or a list of {{"type": "text", "text": ...}}; only text '
            "is supported"
        )
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
