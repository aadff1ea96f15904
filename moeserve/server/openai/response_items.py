"""Input items of the Responses API, and their conversion to chat messages."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Tag, TypeAdapter

from moeserve.config.limits import LIMITS
from moeserve.server.content import ANY_CONTENT, TEXT_TYPES, HistoryText, found_text, omitted
from moeserve.server.errors import ApiError
from moeserve.server.openai.response_tools import OfferedTools, arguments_of_input
from moeserve.server.schema import Body, Bounded

RESULTS = ("output", "outputs", "results", "error")  # fields that hold the result of a call in various items
REASONING_PREFIX = "moeserve1."  # start of the reasoning that this server returns as encrypted_content


class TextPart(Body):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: HistoryText | None = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: HistoryText = ""


class OtherPart(Body):
    """A part without text, such as a picture."""

    type: str


def _part_type(part: Any) -> Any:
    found = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "TextPart" if found in TEXT_TYPES else "RefusalPart" if found == "refusal" else "OtherPart"


Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag("TextPart")]
    | Annotated[RefusalPart, Tag("RefusalPart")]
    | Annotated[OtherPart, Tag("OtherPart")],
    Discriminator(_part_type),
]
Content: TypeAlias = Annotated[str | Annotated[list[Part], Bounded(LIMITS.max_parts)], ANY_CONTENT]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = ""


class CallItem(Body):
    """A call of a function, which has arguments, or of a custom tool, which has a text input."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: HistoryText = ""
    name: HistoryText = ""
    namespace: str | None = None
    arguments: HistoryText = ""
    input: HistoryText | None = None

    @property
    def json_arguments(self) -> str:
        """The arguments of the function that stands for the tool in the prompt."""
        return self.arguments if self.type == "function_call" else arguments_of_input(self.input or "")


class CallOutputItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: HistoryText = ""
    output: Content = ""


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: Content = ""
    content: Content = ""
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The text of the reasoning; empty if only another provider can read it."""
        return _text(self.content) or _decoded(self.encrypted_content or "") or _text(self.summary)


class ItemReference(Body):
    type: Literal["item_reference"] = "item_reference"
    id: str


class OtherItem(Body):
    """An item of a provider's tool, or of an unknown type."""

    model_config = ConfigDict(extra="allow")

    type: str


ITEM_TAGS = {
    "message": "MessageItem",
    "function_call": "CallItem",
    "custom_tool_call": "CallItem",
    "function_call_output": "CallOutputItem",
    "custom_tool_call_output": "CallOutputItem",
    "reasoning": "ReasoningItem",
    "item_reference": "ItemReference",
}


def _item_type(item: Any) -> str:
    """Return the tag of an item. Messages and references may omit their type."""
    if not isinstance(item, dict):
        return ITEM_TAGS.get(getattr(item, "type", ""), "OtherItem")
    found = item.get("type")
    if found is None:
        found = "item_reference" if "id" in item and "role" not in item else "message"
    return ITEM_TAGS.get(found, "OtherItem") if isinstance(found, str) else "OtherItem"


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[CallItem, Tag("CallItem")]
    | Annotated[CallOutputItem, Tag("CallOutputItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")]
    | Annotated[ItemReference, Tag("ItemReference")]
    | Annotated[OtherItem, Tag("OtherItem")],
    Discriminator(_item_type),
]
Items: TypeAlias = Annotated[list[Item], Bounded(LIMITS.max_messages)]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
ITEM: TypeAdapter[Item] = TypeAdapter(Item)


def chat_messages(items: Sequence[Item], tools: OfferedTools) -> list[dict[str, Any]]:
    """Return items as chat messages. Reasoning, text and calls in a row become one assistant message.

    Raises:
        ApiError: a message of the user has a part that is not text.
    """
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        match item:
            case MessageItem():
                if item.role == "assistant":
                    _assistant(messages, "content")["content"] = _text(item.content)
                else:
                    messages.append({"role": item.role, "content": _only_text(f"input.{place}.content", item.content)})
            case CallItem():
                name = tools.function_name(item.name, item.namespace)
                _add_call(messages, item.call_id, name, item.json_arguments)
            case CallOutputItem():
                output = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                messages.append(output)
            case ReasoningItem():
                if item.text:
                    message = _assistant(messages, "content")
                    earlier = [message["reasoning_content"]] if "reasoning_content" in message else []
                    message["reasoning_content"] = "\n".join([*earlier, item.text])
            case OtherItem():
                _add_other(messages, item)
    return messages


def _add_call(messages: list[dict[str, Any]], call_id: str, name: str, arguments: str) -> None:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _add_other(messages: list[dict[str, Any]], item: OtherItem) -> None:
    """Add an item of an unknown type. A call that a provider's tool made is left out if it has no id and no result."""
    fields = item.model_extra or {}
    call_id, item_id = (value if isinstance(value := fields.get(name), str) else "" for name in ("call_id", "id"))
    result = next((value for name in RESULTS if (value := fields.get(name)) is not None), None)
    rest = {name: value for name, value in fields.items() if name not in ("id", "call_id", "status", *RESULTS)}
    if item.type.endswith("_call") and (call_id or result is not None):
        name = item.type.removesuffix("_call")
        _add_call(messages, call_id or item_id, name, json.dumps(rest, ensure_ascii=False))
        if result is not None:
            _add_result(messages, call_id or item_id, result)
    elif item.type.endswith("_output"):
        _add_result(messages, call_id or item_id, rest if result is None else result)
    elif text := found_text(fields.get("content")) or found_text(fields.get("summary")):
        messages.append({"role": "user", "content": text})


def _add_result(messages: list[dict[str, Any]], call_id: str, result: Any) -> None:
    text = found_text(result) or json.dumps(result, ensure_ascii=False)
    messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


def _assistant(messages: list[dict[str, Any]], unless: str | None = None) -> dict[str, Any]:
    """Return the last message if it is the assistant's and lacks the field `unless`; else append a new message."""
    if not messages or messages[-1]["role"] != "assistant" or (unless is not None and unless in messages[-1]):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: str | Sequence[Part]) -> str:
    """Return the text of a content. A part without text, such as an image, is replaced by its type."""
    return content if isinstance(content, str) else "\n".join(map(_part_text, content))


def _only_text(name: str, content: str | Sequence[Part]) -> str:
    for place, part in () if isinstance(content, str) else enumerate(content):
        if isinstance(part, OtherPart):
            raise ApiError(
                400,
                f"{name}.{place}.{part.type[:100]} is not supported here: the model reads texts only",
                param="input",
                code="unsupported_parameter",
            )
        if isinstance(part, TextPart) and part.text is None:
            raise ApiError(400, f"{name}.{place}.text: a part of type {part.type!r} needs a text", param="input")
    return _text(content)


def _part_text(part: Part) -> str:
    match part:
        case TextPart():
            return part.text or ""
        case RefusalPart():
            return part.refusal
    return omitted(part.type.removeprefix("input_"))


def encoded_reasoning(reasoning: str) -> str:
    """Return reasoning in the form of `encrypted_content`. It is encoded, not secret: responses contain it as text."""
    return REASONING_PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def _decoded(content: str) -> str:
    """Return the text in `encrypted_content`; empty if another server has encrypted it."""
    if not content.startswith(REASONING_PREFIX):
        return ""
    try:
        return base64.b64decode(content.removeprefix(REASONING_PREFIX), altchars="-_", validate=True).decode()
    except (binascii.Error, ValueError):  # the client has changed the content
        return ""
