"""Limits on the nesting of JSON that request parsing does not check: JSON texts within JSON, and model outputs."""

from __future__ import annotations

import json
from typing import Any

from moeserve.config.limits import LIMITS


def parse(text: str) -> Any:
    """Return the value of a JSON text that a client or the model has written.

    Raises:
        ValueError: the text is not JSON, or has more levels than the JSON of a request may have.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"the JSON has more than {LIMITS.max_nesting} levels") from None
    require_levels(value)
    return value


def require_levels(value: Any) -> None:
    """Raise ValueError if a value has more levels of lists and dicts than the JSON of a request may have."""
    level, depth = [value], 0
    while level:
        if depth > LIMITS.max_nesting:
            raise ValueError(f"the JSON has more than {LIMITS.max_nesting} levels")
        level = [
            item
            for part in level
            for item in (part.values() if isinstance(part, dict) else part if isinstance(part, list) else ())
        ]
        depth += 1
