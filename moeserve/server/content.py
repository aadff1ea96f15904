"""Converts contents of messages that only some providers support to text."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator

from moeserve.config.limits import LIMITS

TEXT_TYPES = ("text", "input_text", "output_text", "reasoning_text", "summary_text")  # types of parts
PART_TYPES = (*TEXT_TYPES, "refusal", "thinking", "tool_use", "tool_result", "search_result", "tool_reference")
MEDIA_TYPES = ("image", "image_url", "input_image", "document", "file", "input_file", "input_audio")


def _as_text(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_parts(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):  # the field's type refuses a list that is too long
        return content if len(content) > LIMITS.max_parts else [_as_part(part) for part in content]
    is_part = isinstance(content, dict) and content.get("type") in (*PART_TYPES, *MEDIA_TYPES)
    return [content] if is_part else _as_text(content)


def _as_part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") is None:
        text = part["text"] if isinstance(part.get("text"), str) else _as_text(part)
        return {**part, "type": "text", "text": text}
    return part if part is None or isinstance(part, dict) else {"type": "text", "text": _as_text(part)}


# A text in a conversation's history. Clients cannot correct a history, so other JSON values are rendered as JSON text.
HistoryText = Annotated[str, BeforeValidator(_as_text)]
# Marks a content, which is a text or a list of parts. Other forms are accepted: a single part for a list of one, a text
# for a part in a list, and any other object or value, which is rendered as JSON.
ANY_CONTENT = BeforeValidator(_as_parts)


def found_text(content: Any) -> str:
    """Return the texts in any content, one per line; empty if there are none."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def omitted(kind: str) -> str:
    """Return the text that replaces a part of this type, such as a picture, in the result of a tool."""
    return f"[{kind[:100]} omitted: the model reads texts only]"
