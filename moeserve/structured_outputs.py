"""The grammar of an output: `StructuredOutputsParams` for users, and `OutputGrammar` for the engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from moeserve import nested_json
from moeserve.config.limits import LIMITS
from moeserve.errors import RequestError, nearest, shown
from moeserve.json_schemas import servable_schema

KINDS = ("json", "regex", "choice", "grammar", "json_object")


class OutputGrammar(msgspec.Struct, frozen=True):
    """A grammar of allowed outputs, in one of three notations."""

    notation: Literal["json", "regex", "lark"]  # "lark" also stands for GBNF
    text: str  # a JSON schema as JSON, a regular expression, or the rules of a grammar
    name: str  # name of the user's parameter, for error messages


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The allowed outputs, given by exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    Names and meaning follow vLLM. A schema is stored as JSON text.

    Raises:
        RequestError: not exactly one is given, or a value is malformed or exceeds `Limits`.
    """

    json: str | Mapping[str, Any] | None = None  # JSON schema, as text or as an object
    regex: str | None = None  # matches the whole output; Rust's syntax, without look-around and back-references
    choice: list[str] | None = None  # the output is one of these texts
    grammar: str | None = None  # grammar in llguidance's dialect of Lark, or in GBNF
    json_object: bool | None = False  # any JSON object
    disable_any_whitespace: bool = False  # no white space between the tokens of JSON

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(kinds) or 'none'} of {', '.join(KINDS)}; give exactly one"
            )
        if self.json_object is None:  # the default in vLLM
            object.__setattr__(self, "json_object", False)
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"structured_outputs: {name}={shown(getattr(self, name))} must be True or False")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(f"structured_outputs: {name}={shown(value)} must be a text of 1 character or more")
        grammar = self.for_engine()
        if len(grammar.text) > LIMITS.max_grammar_length:
            raise RequestError(
                f"structured_outputs: {grammar.name} has {len(grammar.text)} characters; at most "
                f"{LIMITS.max_grammar_length} are allowed"
            )
        try:
            grammar.text.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError(
                f"structured_outputs: {grammar.name} has half a surrogate pair; pass valid Unicode"
            ) from None

    def for_engine(self) -> OutputGrammar:
        """Return the grammar for the engine."""
        if self.regex is not None:
            return OutputGrammar("regex", self.regex, "regex")
        if self.grammar is not None:
            return OutputGrammar("lark", self.grammar, "grammar")
        if self.choice is not None:
            return OutputGrammar("regex", "|".join(map(_escaped, self.choice)), "choice")
        name = "json" if self.json is not None else "json_object"
        text = self.json if isinstance(self.json, str) else '{"type":"object"}'
        if self.disable_any_whitespace:
            schema = json.loads(text)
            schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
            text = json.dumps(schema | {"x-guidance": {"whitespace_flexible": False}}, ensure_ascii=False)
        return OutputGrammar("json", text, name)


def checked(name: str, value: Any) -> StructuredOutputsParams | None:
    """Return the checked value of a sampling parameter, which may be given as a `StructuredOutputsParams` or a dict.

    Raises:
        RequestError: the value has another type, or is malformed.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"{name}={shown(value)} must be a StructuredOutputsParams, a dict of its fields, or None")
    known = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
    for key in value:
        if key not in known:
            raise RequestError(f"{name} has an unknown key {shown(key)}: {nearest(str(key), known)}")
    return StructuredOutputsParams(**value)


def _schema_text(schema: Any) -> str:
    """Return a schema as compact JSON text."""
    try:
        if isinstance(schema, str):
            schema = nested_json.parse(schema)
        if not isinstance(schema, (Mapping, bool)):
            raise ValueError("a schema is an object")
        nested_json.require_levels(schema)
        return json.dumps(servable_schema(schema), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"structured_outputs: json={shown(schema)} is no JSON schema: {error}") from None


def _escaped(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):X}}}" for letter in text)


def _choices(choices: Any) -> list[str]:
    if isinstance(choices, (str, bytes)) or not isinstance(choices, (list, tuple)) or not choices:
        raise RequestError(f"structured_outputs: choice={shown(choices)} must be a list of one text or more")
    if len(choices) > LIMITS.max_choices:
        raise RequestError(
            f"structured_outputs: choice has {len(choices)} entries; at most {LIMITS.max_choices} are allowed"
        )
    for text in choices:
        if not isinstance(text, str):
            raise RequestError(f"structured_outputs: choice={shown(text)}: each must be a text")
    return list(choices)
