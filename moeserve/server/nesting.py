"""Limits on the arrays and objects of JSON, which are checked before it is parsed."""

from __future__ import annotations

import re

import numpy as np

from moeserve.config.settings import LIMITS
from moeserve.server.errors import ApiError

# A string, which may be cut off. Each byte is read once, because a match never begins in the middle of a string.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_STEPS = np.zeros(256, np.int8)  # change of the nesting level by each byte
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def require_nesting(body: bytearray) -> None:
    """Raise ApiError for JSON with more levels or containers than parsers, templates and grammars should process."""
    if body.count(b"[") + body.count(b"{") <= LIMITS.max_nesting:
        return
    brackets = np.frombuffer(_STRING.sub(b"", body), np.uint8)
    steps = _STEPS[brackets]
    if np.cumsum(steps, dtype=np.int32).max(initial=0) > LIMITS.max_nesting:
        raise ApiError(400, f"the JSON of the request has more than {LIMITS.max_nesting} levels")
    if np.count_nonzero(steps > 0) > LIMITS.max_containers:
        raise ApiError(400, f"the JSON of the request has more than {LIMITS.max_containers} arrays and objects")
