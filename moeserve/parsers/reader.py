"""`Reader`: text that arrives in pieces. Parsers are generators that pause until more text arrives."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]  # yields to wait for more text; returns a T
Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")


def drop(text: str) -> None:
    """Discard text. For use as a sink."""


class Reader:
    """The text of an answer that has arrived so far.

    A parser is a generator that calls the methods below with `yield from`. A method pauses until it has enough text to
    decide, or until the text has ended. Text is read once, from start to end. Methods pass text to a sink as early as
    possible. They hold back only text that may begin a marker.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._text = ""
        self._position = 0
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        """Add text that has arrived."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def record(self, first: str = "") -> None:
        """Start to record the text that is read. Record `first` before it. If already recording, continue."""
        if self._record is None:
            self._record = []
        self._record.append(first)

    def stop_record(self) -> str:
        """Stop recording, and return the recorded text."""
        text = "".join(self._record or ())
        self._record = None
        return text

    def until(self, markers: tuple[str, ...], sink: Sink) -> Step[str | None]:
        """Pass on the text before the first marker, then read and return the marker; None if there is no marker."""
        while True:
            start, stop = _find(markers, self._text, self._position)
            self._read(start, sink)
            if stop > start:
                self._read(stop, drop)
                return self._text[start:stop]
            if self.has_ended:
                self._read(len(self._text), sink)
                return None
            yield

    def accept(self, *options: str) -> Step[str | None]:
        """Read white space, and one of `options` if it follows. Return the option; None if no option follows."""
        yield from self.peek()
        longest = max(map(len, options))
        while True:
            text = self._text[self._position : self._position + longest]
            for option in options:
                if text.startswith(option):
                    self._read(self._position + len(option), drop)
                    return option
            if self.has_ended or not any(option.startswith(text) for option in options):
                return None
            yield

    def peek(self) -> Step[str]:
        """Read white space. Return the next character without reading it; "" at the end of the text."""
        return (yield from self.run(_SPACE, drop))

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Step[str]:
        """Pass on the characters that a pattern matches. Return the next character without reading it; "" at the end.

        Args:
            pattern: a repeated set of characters, such as `[a-z]*`, whose matches do not depend on how text is divided.
        """
        while True:
            match = pattern.match(self._text, self._position)
            assert match is not None, "the pattern matches the empty text"
            self._read(match.end(), sink)
            if self._position < len(self._text):
                return self._text[self._position]
            if self.has_ended:
                return ""
            yield

    def character(self, sink: Sink) -> Step[None]:
        """Pass on one character unless the text has ended."""
        while self._position == len(self._text) and not self.has_ended:
            yield
        self._read(min(self._position + 1, len(self._text)), sink)

    def _read(self, end: int, sink: Sink) -> None:
        if end > self._position:
            text = self._text[self._position : end]
            self._position = end
            if self._record is not None:
                self._record.append(text)
            sink(text)


def _find(markers: tuple[str, ...], text: str, position: int) -> tuple[int, int]:
    """Return start and end of the first marker. Without a marker, return the start of a possible marker, twice."""
    pattern, longest, first_characters = _search_table(markers)
    match = pattern.search(text, position)
    if match is not None:
        return match.start(), match.end()
    for start in range(max(position, len(text) - longest + 1), len(text)):
        if text[start] in first_characters:
            rest = text[start:]
            if any(marker.startswith(rest) for marker in markers):
                return start, start
    return len(text), len(text)


@functools.lru_cache(maxsize=256)
def _search_table(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int, frozenset[str]]:
    """Return a pattern that matches the markers, the length of the longest marker, and all first characters."""
    pattern = re.compile("|".join(map(re.escape, markers)))
    return pattern, max(map(len, markers)), frozenset(marker[0] for marker in markers)
