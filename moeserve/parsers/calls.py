"""How model families write tool calls: tables of markers, each with a method that reads calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from moeserve.parsers.deltas import Outlet
from moeserve.parsers.json_text import ParameterTypes, decoded, quoted, read_string, read_value
from moeserve.parsers.reader import Reader, Step

_NAME = re.compile(r"[\w.:/-]+")  # the name of a function; no call has another text in its place
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", *_ARGUMENTS, "id", "type"})


class CallSyntax(Protocol):
    """How a family writes a tool call.

    Attributes:
        begin: the marker before the call.
        end: the marker after it; empty: the call ends with its last character.
    """

    @property
    def begin(self) -> str: ...

    @property
    def end(self) -> str: ...

    def read(self, reader: Reader, outlet: Outlet, types: ParameterTypes) -> Step[bool]:
        """Read a call from behind its first marker. Return False if it does not go on to its last one.

        The caller records the text, and returns as content what was recorded. Recording stops as soon as a call is
        started, because the text after that becomes its arguments.
        """


@dataclass(frozen=True)
class JsonCalls:
    """Objects with the keys "name" and "arguments", one after another or in a list."""

    begin: str
    end: str = ""

    def read(self, reader: Reader, outlet: Outlet, types: ParameterTypes) -> Step[bool]:
        is_list = (yield from reader.accept("[")) is not None
        while (yield from reader.peek()) == "{":
            reader.record()
            if not (yield from _read_object(reader, outlet)):
                return False
            reader.stop_record()
            if is_list and not (yield from reader.accept(",")):
                break
        if is_list and not (yield from reader.accept("]")):
            return False
        return not self.end or (yield from reader.accept(self.end)) is not None


@dataclass(frozen=True)
class NamedCall:
    """A header with the function's name, then the arguments as JSON. In place of both, objects as in `JsonCalls`.

    Attributes:
        header: a regular expression with the groups "name" and, if the model writes ids, "id".
        arguments_begin: the marker between header and arguments.
        arguments_end: the marker after the arguments, if they have one of their own.
    """

    begin: str
    header: re.Pattern[str]
    arguments_begin: str
    arguments_end: str = ""
    end: str = ""

    def read(self, reader: Reader, outlet: Outlet, types: ParameterTypes) -> Step[bool]:
        if (yield from reader.peek()) in ("{", "["):
            return (yield from JsonCalls(self.begin, self.end).read(reader, outlet, types))
        pieces: list[str] = []
        markers = [marker for marker in (self.arguments_begin, self.begin, self.end) if marker]
        marker = yield from reader.until(tuple(markers), pieces.append)
        header = self.header.fullmatch("".join(pieces))
        if marker != self.arguments_begin or header is None:
            return False
        if (yield from reader.peek()) != "{":  # without arguments
            if not self.end or not (yield from reader.accept(self.end)):
                return False
            start_call(reader, outlet, header)
            outlet.add_arguments("{}")
            return True
        start_call(reader, outlet, header)
        if not (yield from read_value(reader, outlet.add_arguments)):
            return False
        for marker in (self.arguments_end, self.end):
            if marker and not (yield from reader.accept(marker)):
                return False
        return True


@dataclass(frozen=True)
class TaggedCall:
    """The function's name, then its parameters as plain text. In place of both, objects as in `JsonCalls`.

    Attributes:
        name_end: the marker after the name; empty: that of the first parameter, or of the end of the call.
        key_begin: the marker before the name of a parameter.
        key_end: the markers between the name of a parameter and its value.
        value_end: the marker after a value.
        has_value_lines: values stand on lines of their own.
    """

    begin: str
    name_end: str
    key_begin: str
    key_end: tuple[str, ...]
    value_end: str
    end: str
    has_value_lines: bool = False

    def read(self, reader: Reader, outlet: Outlet, types: ParameterTypes) -> Step[bool]:
        if (yield from reader.peek()) == "{":
            return (yield from JsonCalls(self.begin, self.end).read(reader, outlet, types))
        pieces: list[str] = []
        next_part = (self.key_begin, self.end)
        marker = yield from reader.until((self.name_end,) if self.name_end else next_part, pieces.append)
        name = "".join(pieces).strip()
        if marker is None or not _NAME.fullmatch(name):
            return False
        if self.name_end:
            marker = yield from reader.accept(*next_part)
            if marker is None:
                return False
        outlet.start_call(name)
        reader.stop_record()
        separator = "{"
        while marker == self.key_begin:
            outlet.add_arguments(separator)
            separator = ", "
            if not (yield from self._read_parameter(reader, outlet, types, name)):
                return False
            marker = yield from reader.accept(*next_part)
        if marker is not None or not reader.has_ended:
            outlet.add_arguments("{}" if separator == "{" else "}")
        return marker is not None

    def _read_parameter(self, reader: Reader, outlet: Outlet, types: ParameterTypes, function: str) -> Step[bool]:
        """Read a parameter behind its first marker. If the text ends in it, its JSON text remains incomplete."""
        key_end, *further = self.key_end
        pieces: list[str] = []
        found = yield from reader.until((key_end,), pieces.append)
        key = "".join(pieces).strip()
        if found is None:
            outlet.add_arguments(quoted(key)[:-1])
            return False
        for marker in further:
            yield from reader.accept(marker)
        pieces.clear()
        found = yield from reader.until((self.value_end,), pieces.append)
        value = "".join(pieces)
        if self.has_value_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        text = types.to_json(function, key, value) if found else quoted(value)[:-1]
        outlet.add_arguments(f"{quoted(key)}: {text}")
        return found is not None


def start_call(reader: Reader, outlet: Outlet, header: re.Match[str]) -> None:
    """Start the call that a header describes, whose text therefore does not become content."""
    outlet.start_call(header["name"], header.groupdict().get("id"))
    reader.stop_record()


def _read_object(reader: Reader, outlet: Outlet) -> Step[bool]:
    """Read an object with a name and arguments. Return False if it is none; then its text is being recorded."""
    yield from reader.accept("{")
    texts: dict[str, str] = {}  # of the values before the call is started
    name = None
    is_started = False
    separator: str | None = ","
    while separator == ",":
        key = yield from read_string(reader)
        if key not in _KEYS or key in texts or not (yield from reader.accept(":")):
            return False
        is_object = (yield from reader.peek()) == "{"
        pieces: list[str] = []
        if key in _ARGUMENTS and name is not None and is_object and not is_started:
            is_started = True
            outlet.start_call(name, decoded(texts.get("id", "")))
            reader.stop_record()
            if not (yield from read_value(reader, outlet.add_arguments)):
                return False
            reader.record()
        elif not (yield from read_value(reader, pieces.append)):
            return False
        texts[key] = "".join(pieces)
        if key == "name":
            name = decoded(texts[key])
            if name is None or not _NAME.fullmatch(name):
                return False
        separator = yield from reader.accept(",", "}")
    if separator is None:
        return False
    if not is_started:
        arguments = _object_text(next((texts[key] for key in _ARGUMENTS if key in texts), "null"))
        if name is None or arguments is None:
            return False
        outlet.start_call(name, decoded(texts.get("id", "")))
        outlet.add_arguments(arguments)
    return True


def _object_text(value: str) -> str | None:
    """Return the JSON text of arguments that are an object, null, or a string with the text of an object."""
    text = decoded(value) if value.startswith('"') else value
    if text in ("null", ""):
        return "{}"
    return text if text is not None and text.lstrip().startswith("{") else None
