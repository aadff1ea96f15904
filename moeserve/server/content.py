"""Content of messages in forms that only some providers know, as text."""

from __future__ import annotations

from typing import Any


def found_text(content: Any) -> str:
    """Return the texts of any content, one a line; an empty text if there are none."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def omitted(kind: str) -> str:
    """Return the text that stands for a part of this type, such as a picture, in the result of a tool."""
    return f"[{kind[:100]} omitted: the model reads texts only]"
