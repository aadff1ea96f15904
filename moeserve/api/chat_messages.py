"""Checks of conversations, and of further arguments for chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeserve.errors import RequestError, nearest, shown

# Arguments of transformers' `apply_chat_template` that are not variables of a template.
RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return a conversation with each content as one text.

    Raises:
        RequestError: a message has no role or content, or one of a wrong type.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(f'messages={shown(messages)} must be a list of at least one {{"role": ..., "content": ...}}')
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return tools as chat templates take them: a list of JSON schemas, or None.

    Raises:
        RequestError: the tools have another form.
    """
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(
            f'tools={shown(tools)} must be a list of {{"type": "function", "function": {{"name": ..., ...}}}}'
        )
    return [dict(tool) for tool in tools]


def check_template_arguments(arguments: Any) -> dict[str, Any]:
    """Return further variables of a chat template as a dict.

    Raises:
        RequestError: a name is reserved, or this is no mapping of names.
    """
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise RequestError(f"chat_template_kwargs must map names to values, not {shown(arguments)}")
    for name in arguments:
        if name in RESERVED_TEMPLATE_ARGUMENTS:
            raise RequestError(f"chat_template_kwargs cannot set {name!r}: it is not a variable of the template")
    return dict(arguments)


def _check_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f'{name}={shown(message)} must be a dict with "role" and "content"')
    for key in ("role", "content"):
        if key not in message:
            others = [str(other) for other in message if other not in ("role", "content")]
            hint = "".join(f"; for {other!r}, {nearest(other, ['role', 'content'])}" for other in others[:1])
            raise RequestError(f"{name} has no {key!r}{hint}")
    if not isinstance(message["role"], str) or not message["role"]:
        raise RequestError(f"{name}: role={shown(message['role'])} must be a text such as 'user'")
    return {**message, "content": _check_content(name, message["content"])}


def _check_content(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            f'{name}: content={shown(content)} must be a text, or a list of {{"type": "text", "text": ...}}'
        )
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{name}: content[{index}]={shown(part)} must be {{"type": "text", "text": ...}}; '
                "only text is supported"
            )
    return "\n".join(part["text"] for part in content)
