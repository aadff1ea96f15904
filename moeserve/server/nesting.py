"""Limits on the JSON of requests, checked before the JSON is parsed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from moeserve.config.limits import LIMITS
from moeserve.server.errors import ApiError

PIECE_BYTES = 2**17  # about a millisecond of work
MAX_UNCHECKED_BYTES = 2**16  # smaller bodies are parsed quickly, whatever they contain, unless they are deeply nested
# The parser and pydantic take a microsecond for a name or a value, without releasing the GIL.
MAX_NAMES = 2**16  # maximum number of names in all objects together
MAX_VALUES = LIMITS.max_token_ids + 2**16  # maximum number of commas

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_STEPS = np.zeros(256, np.int8)  # change of the nesting level by each byte
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def require_nesting(body: bytearray) -> Iterator[None] | None:
    """Raise ApiError for JSON that parsers, templates and grammars should not process.

    Returns:
        For a large body, an iterator that does the rest of the check. It raises the same errors, and yields after each
        piece of work. None: the check is complete.

    Raises:
        ApiError: the text is not UTF-8, is nested too deeply, or has too many arrays, objects, names or values.
    """
    _require_utf8(body)
    if len(body) <= MAX_UNCHECKED_BYTES and body.count(b"[") + body.count(b"{") <= LIMITS.max_nesting:
        return None
    return _count_in_pieces(body)


def _count_in_pieces(body: bytearray) -> Iterator[None]:
    counts = _Counts()
    for start in range(0, len(body), PIECE_BYTES):
        counts.add(np.frombuffer(body, np.uint8, min(PIECE_BYTES, len(body) - start), start))
        counts.require_limits()
        yield


def _require_utf8(body: bytearray) -> None:
    """Raise ApiError unless a body is UTF-8. The parser also accepts UTF-16 and UTF-32, which are not counted right."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the request's body is not UTF-8: byte {error.start} is invalid") from None
    if b"\0" in body:
        raise ApiError(400, "the request's body has a null byte; send JSON in UTF-8")


class _Counts:
    """Counts of the structure of a JSON text, whose pieces are added in order."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._is_escaped = False  # the next byte is escaped by a backslash
        self._level = self._max_level = 0
        self._num_containers = self._num_names = self._num_values = 0

    def add(self, piece: npt.NDArray[np.uint8]) -> None:
        quotes = piece == _QUOTE
        self._unmark_escaped(piece, quotes)
        inside = np.bitwise_xor.accumulate(quotes)
        if self._is_in_string:
            np.logical_not(inside, out=inside)
        self._is_in_string = bool(inside[-1])
        outside = piece[~inside]
        steps = _STEPS[outside]
        levels = np.cumsum(steps, dtype=np.int32)
        self._max_level = max(self._max_level, self._level + int(levels.max(initial=0)))
        self._level += int(levels[-1]) if len(levels) else 0
        self._num_containers += int(np.count_nonzero(steps > 0))
        self._num_names += int(np.count_nonzero(outside == ord(":")))
        self._num_values += int(np.count_nonzero(outside == ord(",")))

    def require_limits(self) -> None:
        """Raise ApiError if a limit is exceeded."""
        for number, most, what in (
            (self._max_level, LIMITS.max_nesting, "levels"),
            (self._num_containers, LIMITS.max_containers, "arrays and objects"),
            (self._num_names, MAX_NAMES, "names in its objects"),
            (self._num_values, MAX_VALUES, "values"),
        ):
            if number > most:
                raise ApiError(400, f"the JSON of the request has more than {most} {what}")

    def _unmark_escaped(self, piece: npt.NDArray[np.uint8], quotes: npt.NDArray[np.bool_]) -> None:
        """Unmark escaped quotes. In a run of backslashes, the first escapes the second, the third the fourth."""
        places = np.flatnonzero(piece == _BACKSLASH)
        if self._is_escaped:
            quotes[0] = False
            places = places[places > 0]
        self._is_escaped = False
        if not len(places):
            return
        begins_run = np.diff(places, prepend=-2) != 1
        first_of_run = np.maximum.accumulate(np.where(begins_run, places, 0))
        escaped = places[(places - first_of_run) % 2 == 0] + 1
        self._is_escaped = bool(escaped[-1] == len(piece))
        quotes[escaped[escaped < len(piece)]] = False
