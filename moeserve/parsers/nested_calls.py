"""Tool call formats whose parameters are nested: Gemma's notation of values, and MiniMax's nested elements."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from moeserve.parsers.calls import JsonCalls, read_name
from moeserve.parsers.deltas import Outlet
from moeserve.parsers.json_text import ParameterTypes, quoted
from moeserve.parsers.reader import Reader, Sink, Step

_UNQUOTED = re.compile(r"[^,:{}\[\]<]*")  # keys and scalars
_CLOSING = {"{": "}", "[": "]"}
MAX_DEPTH = 64  # maximum nesting of values, because methods that read values are recursive


@dataclass(frozen=True)
class NotationCall:
    """A call such as `call:name{key:<|"|>text<|"|>,other:[1,{a:true}]}`, the notation of Gemma 4.

    Objects as in `JsonCalls` are accepted instead.

    Attributes:
        name_begin: the marker before the name.
        quote: the marker before and after a string.
    """

    begin: str
    name_begin: str
    quote: str
    end: str

    def read(self, reader: Reader, outlet: Outlet, types: ParameterTypes) -> Step[bool]:
        if (yield from reader.peek()) == "{":
            return (yield from JsonCalls(self.begin, self.end).read(reader, outlet, types))
        if not (yield from reader.accept(self.name_begin)):
            return False
        name = yield from read_name(reader)
        if not name or (yield from reader.peek()) != "{":
            return False
        outlet.start_call(name)
        reader.stop_record()
        is_complete = yield from self._read_value(reader, outlet.add_arguments)
        return is_complete and (yield from reader.accept(self.end)) is not None

    def _read_value(self, reader: Reader, sink: Sink, depth: int = 0) -> Step[bool]:
        """Pass on the JSON text of a value. Return False if the text ends within it, or is malformed."""
        character = yield from reader.peek()
        if character in _CLOSING and depth < MAX_DEPTH:
            return (yield from self._read_container(reader, sink, character, depth + 1))
        if (yield from reader.accept(self.quote)):
            return (yield from self._read_string(reader, sink))
        pieces: list[str] = []
        character = yield from reader.run(_UNQUOTED, pieces.append)
        text = "".join(pieces).strip()
        if not character or not text:
            sink(text)
            return False
        sink(ParameterTypes(None).to_json("", text=text))
        return True

    def _read_container(self, reader: Reader, sink: Sink, begin: str, depth: int) -> Step[bool]:
        end = _CLOSING[begin]
        yield from reader.character(sink)
        if (yield from reader.accept(end)):
            sink(end)
            return True
        while True:
            if begin == "{" and not (yield from self._read_key(reader, sink)):
                return False
            if not (yield from self._read_value(reader, sink, depth)):
                return False
            marker = yield from reader.accept(",", end)
            if marker is None:
                return False
            sink(", " if marker == "," else end)
            if marker == end:
                return True

    def _read_key(self, reader: Reader, sink: Sink) -> Step[bool]:
        if (yield from reader.accept(self.quote)):
            is_complete = yield from self._read_string(reader, sink)
        else:
            pieces: list[str] = []
            yield from reader.run(_UNQUOTED, pieces.append)
            sink(quoted("".join(pieces).strip()))
            is_complete = True
        if not is_complete or not (yield from reader.accept(":")):
            return False
        sink(": ")
        return True

    def _read_string(self, reader: Reader, sink: Sink) -> Step[bool]:
        sink('"')
        found = yield from reader.until((self.quote,), lambda text: sink(quoted(text)[1:-1]))
        if found is not None:
            sink('"')
        return found is not None


@dataclass(frozen=True)
class ElementCall:
    """A call as the function's name, then an element for each parameter, which may have nested elements (MiniMax-M3).

    If all nested elements are named `item`, they form a list; otherwise, they form an object.

    Attributes:
        prefix: the text before each tag `<key>` and `</key>`.
        name_begin: the tag before the name.
        name_end: the text after the name.
        last: the tag after the parameters.
    """

    prefix: str
    name_begin: str
    name_end: str
    last: str

    @property
    def begin(self) -> str:
        return self.prefix + self.name_begin

    @property
    def end(self) -> str:
        return f"{self.prefix}<{self.last}>"

    def read(self, reader: Reader, outlet: Outlet, types: ParameterTypes) -> Step[bool]:
        name = yield from read_name(reader)
        if not name or not (yield from reader.accept(self.name_end)):
            return False
        if not (yield from reader.accept(self.prefix)):
            return False
        outlet.start_call(name)
        reader.stop_record()
        separator = "{"
        while True:
            pieces: list[str] = []
            is_tag = (yield from reader.accept("<")) and (yield from reader.until((">",), pieces.append))
            key = "".join(pieces)
            if is_tag and key == self.last:
                outlet.add_arguments("{}" if separator == "{" else "}")
                return True
            if is_tag or key:
                outlet.add_arguments(f"{separator}{quoted(key)}" if is_tag else f"{separator}{quoted(key)[:-1]}")
            if not is_tag:
                return False
            separator = ", "
            reader.record()
            value = yield from self._read_element(
                reader, (key,), lambda path, text: types.to_json(name, *path, text=text)
            )
            read = reader.stop_record()
            if value is None:
                outlet.add_arguments(f": {quoted(read)[:-1]}")
                return False
            outlet.add_arguments(f": {value}")
            if not (yield from reader.accept(self.prefix)):
                return False

    def _read_element(
        self, reader: Reader, path: tuple[str, ...], to_json: Callable[[tuple[str, ...], str], str]
    ) -> Step[str | None]:
        """Return the JSON text of an element, read after its tag; None if the text ends or is malformed."""
        texts: list[str] = []
        children: dict[str, list[str]] = {}
        while True:
            if (yield from reader.until((self.prefix,), texts.append)) is None or not (yield from reader.accept("<")):
                return None
            pieces: list[str] = []
            if (yield from reader.until((">",), pieces.append)) is None:
                return None
            name = "".join(pieces)
            if name == f"/{path[-1]}":
                break
            if not name or name.startswith("/") or len(path) == MAX_DEPTH:
                return None
            child = yield from self._read_element(reader, (*path, name), to_json)
            if child is None:
                return None
            children.setdefault(name, []).append(child)
        text = "".join(texts)
        if not children:
            return to_json(path, text)
        if text.strip():  # text beside nested elements
            children.setdefault("$text", []).append(quoted(text.strip()))
        lists = {name: f"[{', '.join(values)}]" for name, values in children.items()}
        if lists.keys() == {"item"}:
            return lists["item"]
        fields = [
            f"{quoted(name)}: {values[0] if len(values) == 1 else lists[name]}" for name, values in children.items()
        ]
        return "{" + ", ".join(fields) + "}"
