"""The answer formats of model families (reasoning, then content with tool calls), and the parser of one answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moeserve.parsers.calls import CallSyntax, JsonCalls
from moeserve.parsers.deltas import Outlet, ParsedDelta, Trimmed
from moeserve.parsers.json_text import ParameterTypes
from moeserve.parsers.reader import Reader, Step

_ANYTHING = re.compile(r"[\s\S]*")


@dataclass(frozen=True)
class ParserOptions:
    """Options for parsing one answer.

    Attributes:
        tools: the request's tools, for the types of their parameters.
        starts_in_reasoning: the prompt ends with the marker that begins reasoning.
        parse_tools: if False, tool calls stay in the content, as written by the model.
        parse_reasoning: if False, reasoning stays in the content, with its markers.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    starts_in_reasoning: bool = False
    parse_tools: bool = True
    parse_reasoning: bool = True


class AnswerSyntax(Protocol):
    """The answer format of a model family."""

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """The markers around reasoning; None if the family marks reasoning in another way or not at all."""

    def read(self, reader: Reader, outlet: Outlet, options: ParserOptions) -> Step[None]:
        """Read one answer to its end."""


class AnswerParser:
    """The parser of one answer. The pieces in which it is fed do not change the sum of its deltas.

    No text raises an error. White space next to a marker belongs to the format and is dropped. Everything else that
    does not parse as reasoning or a tool call becomes content, including markers. A call is reported as soon as its
    name is known. If the rest of a reported call is malformed, the call ends there, and the text after it is content.
    """

    def __init__(self, syntax: AnswerSyntax, options: ParserOptions, new_id: Callable[[], str]) -> None:
        self._reader = Reader()
        self._outlet = Outlet(new_id)
        self._steps = syntax.read(self._reader, self._outlet, options)

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        """Parse the next piece of an answer.

        Args:
            text: the text added by the latest tokens.
            token_ids: the latest tokens. All present families are parsed from the text alone.
        """
        self._reader.feed(text)
        next(self._steps, None)
        return self._outlet.take()

    def finish(self) -> ParsedDelta:
        """Return the text that was held back. No text may be fed after this call."""
        self._reader.has_ended = True
        next(self._steps, None)
        return self._outlet.take()


@dataclass(frozen=True)
class MarkedAnswer:
    """Reasoning between two markers, then content and tool calls. Each call begins with a marker.

    A call also ends reasoning whose end marker is missing.

    Attributes:
        reasoning: the markers around reasoning, which comes first; None: no reasoning.
        call: the format of a tool call; None: no tool calls.
        section: the markers around the section of all calls; None: calls are not in a section.
        dropped: markers that are removed from the content.
    """

    reasoning: tuple[str, str] | None
    call: CallSyntax | None = None
    section: tuple[str, str] | None = None
    dropped: tuple[str, ...] = ()

    @property
    def _call_begins(self) -> tuple[str, ...]:
        begin = () if self.call is None else (self.call.begin,)
        return begin if self.section is None else (self.section[0], *begin)

    def read(self, reader: Reader, outlet: Outlet, options: ParserOptions) -> Step[None]:
        call = self.call if options.parse_tools else None
        content = Trimmed(outlet.add_content)
        marker = None
        if self.reasoning is not None:
            marker = yield from self._read_reasoning(reader, outlet, options, content)
        begins = (*self.dropped, *(() if call is None else self._call_begins))
        if call is None:
            yield from _read_content(reader, content, begins)
            return

        types = ParameterTypes(options.tools)
        ends: tuple[str, ...] = ()  # end markers of calls and sections that are still open
        while True:
            if marker is None:
                marker = yield from reader.until(begins + ends, content)
            if marker is None:
                content.flush()
                return
            if marker in ends or marker in self.dropped:
                ends = tuple(end for end in ends if end != marker)
                content.after_marker()
            else:
                num_calls = outlet.num_calls
                reader.record(marker)
                is_complete = yield from self._read_calls(marker, call, reader, outlet, types)
                if outlet.num_calls > num_calls:
                    section_end = () if self.section is None else self.section[1:]
                    ends = section_end if is_complete or not call.end else (*section_end, call.end)
                    content.after_marker()
                content(reader.stop_record())
            marker = None

    def _read_reasoning(
        self, reader: Reader, outlet: Outlet, options: ParserOptions, content: Trimmed
    ) -> Step[str | None]:
        """Read the reasoning, if there is any. If a call ends the reasoning, return the marker that begins the call."""
        assert self.reasoning is not None
        begin, end = self.reasoning
        reader.record()
        has_begun = (yield from reader.accept(begin)) is not None  # also accept a repetition of the prompt's marker
        start = reader.stop_record()
        if not has_begun and not options.starts_in_reasoning:
            content(start)
            return None
        ends: tuple[str, ...] = (end,)
        if self.call is not None and options.parse_tools:
            ends = (end, *self._call_begins)
        if options.parse_reasoning:
            reasoning = Trimmed(outlet.add_reasoning, strips_start=True)
            marker = yield from reader.until(ends, reasoning)
            if marker is None:
                reasoning.flush()
            content.after_marker()
        else:
            content(start)
            marker = yield from reader.until(ends, content)
            if marker == end:
                content(end)
        return marker if marker != end else None

    def _read_calls(
        self, marker: str, call: CallSyntax, reader: Reader, outlet: Outlet, types: ParameterTypes
    ) -> Step[bool]:
        """Read the calls after a marker. Return False if they are malformed before their end marker."""
        if self.section is not None and marker == self.section[0]:
            if (yield from reader.peek()) == "{":
                return (yield from JsonCalls(*self.section).read(reader, outlet, types))
            if not (yield from reader.accept(call.begin)):
                return False
        return (yield from call.read(reader, outlet, types))


def _read_content(reader: Reader, content: Trimmed, dropped: tuple[str, ...]) -> Step[None]:
    """Read content without calls to its end."""
    while dropped and (yield from reader.until(dropped, content)) is not None:
        content.after_marker()
    yield from reader.run(_ANYTHING, content)
    content.flush()
