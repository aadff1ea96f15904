"""Conversations in forms that a chat template renders in full: no instruction, call or result of a tool is lost."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve import nested_json
from moeserve.errors import RequestError

INSTRUCTION_ROLES = ("system", "developer")
_MARK = "\ue000mark\ue000"  # a text that no template contains
_NULL_CONTENT = re.compile(r"\bcontent['\"]?\]? is (not )?none")  # in a template that tests contents for null
# Special tokens that templates add to texts, which fails if they are undefined, and other variables of all templates.
_NO_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
_VARIABLES = {"documents": None, "tools": None, "add_generation_prompt": True, **_NO_TOKENS}


@dataclass(frozen=True)
class TemplateAbilities:
    """The kinds of messages that a chat template renders."""

    system: bool  # a system message at the start
    late_system: bool  # system messages anywhere
    developer: bool  # the role developer, by its own name
    tools: bool
    calls: bool  # tool calls of messages
    results: bool  # messages of the role tool


@functools.lru_cache(maxsize=64)
def abilities_of(template: str) -> TemplateAbilities:
    """Return the kinds of messages that a template renders, from its source and from renderings of small examples."""
    system = {"role": "system", "content": "a"}
    user = {"role": "user", "content": "b"}
    answer = {"role": "assistant", "content": "c"}
    marked = {"role": "system", "content": _MARK}
    result = {"role": "tool", "tool_call_id": "d", "content": _MARK}
    return TemplateAbilities(
        system=_renders(template, [marked, user]),
        late_system=_renders(template, [system, user, answer, marked, user]) and _renders(template, [user, marked]),
        developer="developer" in template and _renders(template, [{**marked, "role": "developer"}, user]),
        tools="tools" in template,
        calls="tool_calls" in template,
        results="'tool'" in template or '"tool"' in template or _renders(template, [user, answer, result]),
    )


def _renders(template: str, messages: list[dict[str, Any]]) -> bool:
    """Return True if a template renders messages, one of which has the text `_MARK`, and keeps this text."""
    from moeserve.api.template_sandbox import render

    try:
        text = render(template, messages, _VARIABLES)
    except RequestError:
        return False
    return _MARK in text


def template_messages(
    messages: Sequence[Mapping[str, Any]], template: str, tools: Sequence[Mapping[str, Any]] | None = None
) -> list[list[dict[str, Any]]]:
    """Return messages in the forms that a chat template may expect, in the order in which to try these forms.

    - Instructions (system and developer messages) at the start become one message. Later instructions, and results of
      tools, become part of a user's turn if the template does not render them. A message never changes the ones before
      it, except that it may extend the last user's turn, so the prefix cache finds earlier turns.
    - If the template does not render tools or calls, they are written as text.
    - Most templates expect the arguments of calls as objects, but some, such as DeepSeek's, as JSON.
    - Templates that require the roles to alternate get neighbours of the same role as one message.
    - A message without text gets an empty text; with calls, it gets null if the template tests for null.
    """
    abilities = abilities_of(template)
    turns = _Turns()
    first, rest = _instructions(messages, abilities)
    if tools and not abilities.tools:
        first = {"role": "system", **(first or {})}
        first["content"] = _joined(first.get("content"), tools_text(tools))
    if first is not None:
        if abilities.system or first["role"] == "developer":
            turns.add(first)
        else:
            turns.add_to_user(first["content"])
    for message in rest:
        if message["role"] in INSTRUCTION_ROLES and not abilities.late_system:
            turns.add_to_user(_text(message))
        elif message["role"] == "developer" and not abilities.developer:
            turns.add({**message, "role": "system"})
        elif message["role"] == "tool" and not abilities.results:
            turns.add_to_user(f"<tool_response>\n{_text(message)}\n</tool_response>")
        else:
            turns.add(dict(message) if abilities.calls else _with_calls_as_text(message))
    empty = None if _NULL_CONTENT.search(template) else ""
    forms = [
        [_with_calls(message, empty, as_objects=as_objects) for message in turns.messages]
        for as_objects in (True, False)
    ]
    forms += [_alternating(form) for form in forms]
    return [form for place, form in enumerate(forms) if form not in forms[:place]]


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return instructions for calling tools, for templates that render none. The answers are in the format `hermes`."""
    described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, each described as JSON:\n<tools>\n{described}\n</tools>\n"
        "To call a function, write its name and its arguments as a JSON object between two marks:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'
    )


def arguments_object(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object. Other values, and JSON that is cut off, become the only entry."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    try:
        found = nested_json.parse(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        found = arguments
    if isinstance(found, str) and found != arguments:  # encoded twice
        return arguments_object(found)
    if found is None:
        return {}
    return found if isinstance(found, dict) else {"arguments": arguments}


class _Turns:
    """Messages for a template, in which several messages may be joined to one turn of the user."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._is_open = False  # the last turn holds other roles' texts, and a user's message would join it

    def add(self, message: dict[str, Any]) -> None:
        if self._is_open and message["role"] == "user":
            last = self.messages.pop()
            message = {**message, "content": _joined(last["content"], _text(message))}
        self.messages.append(message)
        self._is_open = False

    def add_to_user(self, text: str) -> None:
        """Add a text to the last message if that is the user's, else as a new message of the user."""
        if self.messages and self.messages[-1]["role"] == "user":
            last = self.messages[-1]
            self.messages[-1] = {**last, "content": _joined(_text(last), text)}
        else:
            self.messages.append({"role": "user", "content": text})
        self._is_open = True


def _instructions(
    messages: Sequence[Mapping[str, Any]], abilities: TemplateAbilities
) -> tuple[dict[str, Any] | None, Sequence[Mapping[str, Any]]]:
    """Return the instructions at the start as one message, and the other messages."""
    number = next(
        (place for place, message in enumerate(messages) if message["role"] not in INSTRUCTION_ROLES), len(messages)
    )
    if not number:
        return None, messages
    role = "developer" if abilities.developer and messages[0]["role"] == "developer" else "system"
    text = _joined(*(_text(message) for message in messages[:number]))
    return {**messages[0], "role": role, "content": text}, messages[number:]


def _alternating(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which neighbouring messages of the user, or of the assistant, are joined."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else {}
        if last.get("role") != message["role"] or message["role"] not in ("user", "assistant"):
            merged.append(message)
            continue
        both = {**last, **message, "content": _joined(_text(last), _text(message))}
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            both["tool_calls"] = calls
        if thoughts := _joined(last.get("reasoning_content"), message.get("reasoning_content")):
            both["reasoning_content"] = thoughts
        merged[-1] = both
    return merged


def _with_calls(message: dict[str, Any], empty: str | None, *, as_objects: bool) -> dict[str, Any]:
    calls = [_call(call, as_objects=as_objects) for call in message.get("tool_calls") or ()]
    content = message.get("content")
    if calls:
        return {**message, "content": empty if content is None else content, "tool_calls": calls}
    return {**message, "content": "" if content is None else content}


def _call(call: Mapping[str, Any], *, as_objects: bool) -> dict[str, Any]:
    """Return a call with its arguments as an object, or as JSON."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if as_objects:
        arguments = arguments_object(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments_object(arguments), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    texts = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        described = {"name": function.get("name"), "arguments": arguments_object(function.get("arguments"))}
        texts.append(f"<tool_call>\n{json.dumps(described, ensure_ascii=False)}\n</tool_call>")
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, [_text(message), *texts]))} if texts else others


def _joined(*texts: str | None) -> str:
    return "\n\n".join(filter(None, texts))


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
