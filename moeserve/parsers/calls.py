"""The tool call formats of model families: dataclasses of markers, each with a method that reads calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from moeserve.parsers.deltas import Outlet
from moeserve.parsers.json_text import ParameterTypes, decoded, quoted, read_string, read_value
from moeserve.parsers.reader import Reader, Step

_NAME = re.compile(r"[\w.:/-]*")  # characters allowed in a function's name
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", *_ARGUMENTS, "id", "type"})
_OTHER_KEYS = {"tool_name": "name", "args": "arguments", "tool_call_id": "id"}  # Cohere's and Inkling's keys


class CallSyntax(Protocol):
    """The format of a tool call.

    Attributes:
        begin: the marker before the call.
        end: the marker after the call; empty: the call ends with its last character.
    """

    @property
    def begin(self) -> str: ...

    @property
    def end(self) -> str: ...

    def read(self, reader: Reader, outlet: Outlet, types: ParameterTypes) -> Step[bool]:
        """Read a call that begins after its begin marker. Return False if the call is malformed before its end marker.

        The caller records the text, and turns the recorded text into content if the call is malformed. This method
        stops the recording as soon as it has started a call, because the text after that becomes the call's arguments.
        """


@dataclass(frozen=True)
class JsonCalls:
    """Calls as JSON objects with the keys "name" and "arguments", one after another or in a list."""

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
    """A call as the function's name, then the arguments as JSON; or objects as in `JsonCalls` instead of both.

    Attributes:
        name_begin: an optional marker before the name.
        id_begin: a marker between the name and the call's id; both marker and id are optional.
        name_in_id: a regular expression whose first group is the name, if the call has an id in place of a name.
        arguments_begin: the marker before the arguments.
        arguments_end: the marker after the arguments; empty: none.
    """

    begin: str
    arguments_begin: str
    name_begin: str = ""
    id_begin: str = ""
    name_in_id: str = ""
    arguments_end: str = ""
    end: str = ""

    def read(self, reader: Reader, outlet: Outlet, types: ParameterTypes) -> Step[bool]:
        if (yield from reader.peek()) in ("{", "["):
            return (yield from JsonCalls(self.begin, self.end).read(reader, outlet, types))
        if self.name_begin:
            yield from reader.accept(self.name_begin)
        name = yield from read_name(reader)
        call_id = None
        if self.id_begin and (yield from reader.accept(self.id_begin)):
            call_id = yield from read_name(reader)
        if self.name_in_id:
            match = re.fullmatch(self.name_in_id, name)
            name, call_id = match[1] if match else "", name
        if not name or not (yield from reader.accept(self.arguments_begin)):
            return False
        has_arguments = (yield from reader.peek()) == "{"
        if not has_arguments and not (self.end and (yield from reader.accept(self.end))):
            return False
        outlet.start_call(name, call_id)
        reader.stop_record()
        if not has_arguments:
            outlet.add_arguments("{}")
            return True
        if not (yield from read_value(reader, outlet.add_arguments)):
            return False
        for marker in (self.arguments_end, self.end):
            if marker and not (yield from reader.accept(marker)):
                return False
        return True


@dataclass(frozen=True)
class TaggedCall:
    """A call as the function's name, then parameters as plain text; or objects as in `JsonCalls` instead of both.

    Attributes:
        name_end: the marker after the name; empty: the begin of a parameter or the end of the call ends the name.
        key_begin: the marker before the name of a parameter.
        key_end: the markers between the name of a parameter and its value.
        value_end: the marker after a value.
        has_value_lines: values are on separate lines.
        flags: the markers after `key_end` for a value that is a string, and for a value that is JSON; empty: no flags.
    """

    begin: str
    name_end: str
    key_begin: str
    key_end: tuple[str, ...]
    value_end: str
    end: str
    has_value_lines: bool = False
    flags: tuple[str, ...] = ()

    def read(self, reader: Reader, outlet: Outlet, types: ParameterTypes) -> Step[bool]:
        if (yield from reader.peek()) == "{":
            return (yield from JsonCalls(self.begin, self.end).read(reader, outlet, types))
        name = yield from read_name(reader)
        if not name or (self.name_end and not (yield from reader.accept(self.name_end))):
            return False
        marker = yield from reader.accept(self.key_begin, self.end)
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
            marker = yield from reader.accept(self.key_begin, self.end)
        if marker is not None or not reader.has_ended:
            outlet.add_arguments("{}" if separator == "{" else "}")
        return marker is not None

    def _read_parameter(self, reader: Reader, outlet: Outlet, types: ParameterTypes, function: str) -> Step[bool]:
        """Read a parameter after its begin marker. If the text ends within the parameter, its JSON stays incomplete."""
        key_end, *further = self.key_end
        pieces: list[str] = []
        found = yield from reader.until((key_end,), pieces.append)
        key = "".join(pieces).strip()
        if found is None:
            outlet.add_arguments(quoted(key)[:-1])
            return False
        for marker in further:
            yield from reader.accept(marker)
        is_text = self.flags and (yield from reader.accept(*self.flags)) == self.flags[0]
        pieces.clear()
        found = yield from reader.until((self.value_end,), pieces.append)
        value = "".join(pieces)
        if self.has_value_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        whole = quoted(value) if is_text else types.to_json(function, key, text=value)
        text = whole if found else quoted(value)[:-1]
        outlet.add_arguments(f"{quoted(key)}: {text}")
        return found is not None


def read_name(reader: Reader) -> Step[str]:
    """Read and return the next characters that are allowed in a name; empty if there are none."""
    pieces: list[str] = []
    yield from reader.peek()
    yield from reader.run(_NAME, pieces.append)
    return "".join(pieces)


def _read_object(reader: Reader, outlet: Outlet) -> Step[bool]:
    """Read an object with a name and arguments. Return False if it is malformed; its text is then being recorded."""
    yield from reader.accept("{")
    texts: dict[str, str] = {}  # values read before the call is started
    name = None
    is_started = False
    separator: str | None = ","
    while separator == ",":
        key = yield from read_string(reader)
        key = None if key is None else _OTHER_KEYS.get(key, key)
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
            if not name or not _NAME.fullmatch(name):
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
    """Return the JSON text of arguments that are an object, null, or a string that holds an object; otherwise None."""
    text = decoded(value) if value.startswith('"') else value
    if text in ("null", ""):
        return "{}"
    return text if text is not None and text.lstrip().startswith("{") else None
