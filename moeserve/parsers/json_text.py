"""Reads JSON from an answer, and converts between JSON and the text of parameters.

While a value is read, only its structure is checked: strings and matching brackets. The text between them is passed on
as the model has written it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from moeserve.parsers.reader import Reader, Sink, Step

_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE_STRINGS = re.compile(r"[ \t\r\n0-9A-Za-z+.,:-]*")
_SCALAR = re.compile(r"[0-9A-Za-z+.-]*")
_CLOSING = {"{": "}", "[": "]"}
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}  # some templates render values in this way


def read_value(reader: Reader, sink: Sink) -> Step[bool]:
    """Pass on the text of one JSON value. Return True if the value is complete.

    Return False if the answer ends within the value, or if the next character cannot be part of the value.
    """
    open_brackets: list[str] = []
    first = yield from reader.peek()
    if first == '"':
        return (yield from _read_string(reader, sink))
    if first not in _CLOSING:
        pieces: list[str] = []
        yield from reader.run(_SCALAR, pieces.append)
        sink("".join(pieces))
        return bool(pieces)
    while True:
        character = yield from reader.run(_OUTSIDE_STRINGS, sink)
        if character == '"':
            if not (yield from _read_string(reader, sink)):
                return False
        elif character in _CLOSING:
            open_brackets.append(character)
            yield from reader.character(sink)
        elif character and character == _CLOSING[open_brackets[-1]]:
            open_brackets.pop()
            yield from reader.character(sink)
            if not open_brackets:
                return True
        else:
            return False


def read_string(reader: Reader) -> Step[str | None]:
    """Read a JSON string, and return its decoded value; None if no JSON string follows."""
    if (yield from reader.peek()) != '"':
        return None
    pieces: list[str] = []
    is_complete = yield from _read_string(reader, pieces.append)
    return decoded("".join(pieces)) if is_complete else None


def decoded(text: str) -> str | None:
    """Return the value of a JSON string; None if the text is not a JSON string or its value is not valid Unicode."""
    if not text.startswith('"'):
        return None
    try:
        value: str = json.loads(text, strict=False)
        value.encode()
    except ValueError:
        return None
    return value


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


class ParameterTypes:
    """The JSON types of tools' parameters, for formats in which values are plain text."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """
        Args:
            tools: the request's tools: `{"type": "function", "function": {"name": ..., "parameters": JSON schema}}`.
        """
        self._schemas = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            if isinstance(function, Mapping):
                self._schemas[function.get("name")] = function.get("parameters")

    def to_json(self, function: str, *path: str, text: str) -> str:
        """Return the JSON text of a parameter's value, or of a value nested in a parameter.

        If `text` is valid JSON of a type other than string, it is returned unchanged if the schema allows this type or
        does not allow strings. Every other text is returned as a JSON string.

        Args:
            path: the parameter's name, then the names of nested values. Any name stands for an item of a list.
            text: the value as the model has written it.
        """
        types = self._types(function, path)
        if types == {"string"}:
            return quoted(text)
        literal = _PYTHON_LITERALS.get(text.strip(), text.strip())
        try:
            kinds = _types_of(json.loads(literal, parse_constant=_reject))
        except (ValueError, RecursionError):
            return quoted(text)
        if "string" in kinds or ("string" in types and not kinds & types):
            return quoted(text)
        return literal

    def _types(self, function: str, path: Sequence[str]) -> set[str]:
        """Return the types that the schema of the value at `path` allows; empty if any type is allowed."""
        root = schema = self._schemas.get(function)
        for name in path:
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            schema = properties.get(name) if isinstance(properties, Mapping) else _items_of(schema)
        return _types_in(schema, root, set())


def _items_of(schema: Any) -> Any:
    return schema.get("items") if isinstance(schema, Mapping) else None


def _types_in(schema: Any, root: Any, visited: set[int]) -> set[str]:
    """Return the types that a schema allows.

    Args:
        visited: ids of schemas whose types have been added. A schema may refer to itself.
    """
    if not isinstance(schema, Mapping) or id(schema) in visited:
        return set()
    visited.add(id(schema))
    types: set[str] = set()
    declared = schema.get("type")
    types.update(each for each in (declared if isinstance(declared, list) else [declared]) if isinstance(each, str))
    if not types:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        types.update(*(_types_of(value) for value in values + ([schema["const"]] if "const" in schema else [])))
    for combination in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(combination)
        for part in parts if isinstance(parts, list) else ():
            types |= _types_in(part, root, visited)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        types |= _types_in(target, root, visited)
    return types


def _types_of(value: Any) -> set[str]:
    """Return the JSON types of a value. An integer is also a number."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _read_string(reader: Reader, sink: Sink) -> Step[bool]:
    """Pass on a JSON string, beginning at its opening quotation mark. Return True if the string is complete."""
    yield from reader.character(sink)
    while True:
        character = yield from reader.run(_IN_STRING, sink)
        if not character:
            return False
        yield from reader.character(sink)
        if character == '"':
            return True
        yield from reader.character(sink)  # the character after a backslash
