"""The results of a parser, and the `Outlet` that collects them while text is parsed."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolCallDelta:
    """New text of one tool call.

    Attributes:
        index: index of the call in the answer, from 0.
        id: id of the call, on its first delta; else None.
        name: name of the function, on the call's first delta; else None.
        arguments: next piece of the JSON text of the arguments. The concatenated pieces of a call are one JSON object,
            unless the answer was cut off or the model made a mistake.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ParsedDelta:
    """The parts that new text adds to an answer. Each tool call has at most one delta, in order."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass
class _Call:
    index: int
    id: str | None = None
    name: str | None = None
    pieces: list[str] = field(default_factory=list)


class Outlet:
    """Collects the parts of an answer until `take` returns them as a delta."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self.last_name = ""  # name of the last call
        self._new_id = new_id
        self._ids: set[str] = set()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []

    def add_content(self, text: str) -> None:
        self._content.append(text)

    def add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. A call gets a new id if the model wrote no id, or repeated the id of an earlier call."""
        if not call_id or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        self._calls.append(_Call(self.num_calls, call_id, name))
        self.num_calls += 1
        self.last_name = name

    def add_arguments(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        if not self._calls:
            self._calls.append(_Call(self.num_calls - 1))
        self._calls[-1].pieces.append(text)

    def take(self) -> ParsedDelta:
        """Return the parts collected since the last call of `take`."""
        calls = tuple(ToolCallDelta(call.index, call.id, call.name, "".join(call.pieces)) for call in self._calls)
        delta = ParsedDelta("".join(self._content), "".join(self._reasoning), calls)
        self._content, self._reasoning, self._calls = [], [], []
        return delta


class Trimmed:
    """Writes text, but holds back white space at its end, which is dropped if a marker follows."""

    def __init__(self, write: Callable[[str], None], *, strips_start: bool = False) -> None:
        """
        Args:
            strips_start: also drop white space at the start of the text.
        """
        self._write = write
        self._strips_start = strips_start
        self._space: list[str] = []  # white space that is held back

    def __call__(self, text: str) -> None:
        if self._strips_start:
            text = text.lstrip()
        end = len(text.rstrip())
        if end:
            self._strips_start = False
            self._write("".join(self._space) + text[:end])
            self._space = []
        if end < len(text):
            self._space.append(text[end:])

    def after_marker(self) -> None:
        """Drop the white space before and after a marker that has just been read."""
        self._space = []
        self._strips_start = True

    def flush(self) -> None:
        """Write the white space that was held back, because no marker follows."""
        self._write("".join(self._space))
        self._space = []


class Messages:
    """The texts of several messages of one kind (content or reasoning), separated by line breaks."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._has_text = False
        self._is_new = False

    def begin(self) -> Trimmed:
        """Begin a message, and return the sink for its text."""
        self._is_new = self._has_text
        return Trimmed(self.write, strips_start=True)

    def write(self, text: str) -> None:
        self._write("\n" + text if self._is_new and text else text)
        self._is_new = self._is_new and not text
        self._has_text = self._has_text or bool(text)


def new_call_id() -> str:
    """Return a random id in OpenAI's format."""
    return "call_" + secrets.token_hex(12)
