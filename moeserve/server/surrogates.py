"""Replaces halves of surrogate pairs in the JSON of requests. Clients send them if they cut a text inside an emoji."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ESCAPES = re.compile(  # a pair, or a half
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
_REPLACEMENT = rb"\ufffd"  # has as many bytes as an escaped half
_PIECE = 1024  # escapes per piece of work, about a millisecond


def replace_lone_surrogates(body: bytearray) -> Iterator[None]:
    """Replace each half of a surrogate pair in a JSON text by U+FFFD, in place. Yield after each piece of work."""
    for number, found in enumerate(_ESCAPES.finditer(body)):
        is_pair = found.end() - found.start() > len(_REPLACEMENT)
        # After an escaped backslash, `\u` begins no escape. If this concerns the first half of a pair, the second is
        # alone.
        if is_pair == (_num_backslashes(body, found.start()) % 2 == 1):
            body[found.end() - len(_REPLACEMENT) : found.end()] = _REPLACEMENT
        if number % _PIECE == _PIECE - 1:
            yield


def _num_backslashes(body: bytearray, end: int) -> int:
    """Return the number of consecutive backslashes directly before position `end`."""
    size = 1
    while True:
        before = body[max(0, end - size) : end]
        number = len(before) - len(before.rstrip(b"\\"))
        if number < len(before) or size >= end:
            return number
        size *= 8
