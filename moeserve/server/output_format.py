"""The grammar of an answer: a requested format or required tool calls, after optional reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from moeserve.api.tokenizer import TextCodec
from moeserve.config.limits import LIMITS
from moeserve.errors import RequestError
from moeserve.json_schemas import relaxed_schema, servable_schema, unsupported_places, without_unique_items
from moeserve.parsers.families import ForcedCalls, ParserFamily
from moeserve.server.errors import ApiError
from moeserve.server.schema import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuredOutputs, TextFormat
from moeserve.structured_outputs import StructuredOutputsParams

ANY_OBJECT = {"type": "object"}
MAX_SCHEMAS = LIMITS.max_grammar_length * 3 // 4  # maximum characters of all functions' schemas in one grammar


def requested_outputs(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None = None
) -> StructuredOutputsParams | None:
    """Return the restriction that a request puts on its answer; None if neither field is given.

    Raises:
        ApiError: both fields are given, or a field is malformed.
    """
    wanted = None if isinstance(response_format, TextFormat) else response_format
    if structured is None:
        match wanted:
            case None:
                return None
            case JsonSchemaFormat(json_schema=described):
                return outputs_of_schema("response_format", described.schema_, is_strict=described.strict is True)
            case JsonObjectFormat(schema_=schema) if schema:
                return outputs_of_schema("response_format", schema)
        return _checked("response_format", json_object=True)
    if wanted is not None:
        raise ApiError(400, "give either response_format or structured_outputs", param="structured_outputs")
    return _checked("structured_outputs", **structured.model_dump(by_alias=True, exclude_none=True))


def outputs_of_schema(name: str, schema: dict[str, Any] | None, *, is_strict: bool = False) -> StructuredOutputsParams:
    """Return the restriction of an answer to a JSON schema; for None, to any JSON object.

    Args:
        name: name of the parameter, for error messages.
        is_strict: refuse a schema with restrictions that no grammar expresses; False: ignore `uniqueItems`, and refuse
            all other such restrictions.

    Raises:
        ApiError: the schema is malformed, or cannot be enforced.
    """
    return _checked(name, json=enforced_schema(name, name, schema or ANY_OBJECT, is_strict=is_strict))


def enforced_schema(param: str, name: str, schema: dict[str, Any], *, is_strict: bool) -> Any:
    """Return a schema for a grammar.

    Args:
        param: the field of the request that has the schema.
        name: name of the schema in error messages.
        is_strict: see `outputs_of_schema`.

    Raises:
        ApiError: the schema is too long, or has a keyword that cannot be enforced.
    """
    if (length := _length(schema)) > LIMITS.max_grammar_length:  # before the schema is rewritten, which takes longer
        raise ApiError(
            400, f"{name} has {length} characters; at most {LIMITS.max_grammar_length} are allowed", param=param
        )
    schema = servable_schema(schema)
    if not is_strict:
        schema = without_unique_items(schema)
    for place, keyword in unsupported_places(schema):
        raise ApiError(400, f"{name}: {keyword} at {place[:300]} cannot be enforced; leave it out", param=param)
    return schema


def _length(schema: Any) -> int:
    return len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def _checked(name: str, **fields: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**fields)
    except RequestError as error:
        raise ApiError(400, str(error), param=name) from None


def answer_grammar(
    wanted: StructuredOutputsParams | None,
    functions: Sequence[dict[str, Any]],
    *,
    must_call: bool,
    has_parallel_calls: bool,
    family: ParserFamily,
    codec: TextCodec,
    starts_in_reasoning: bool,
) -> StructuredOutputsParams | None:
    """Return the grammar of an answer that may reason, call functions, or have a format; None if any text is valid.

    Args:
        wanted: the requested format of the content.
        functions: functions that the model may call: {"name": ..., "parameters": JSON schema}.
        must_call: the answer must consist of calls.
        starts_in_reasoning: the prompt has begun the reasoning, which the answer must end.

    Raises:
        ApiError: the schema of a strict function cannot be enforced, or the grammar is too long.
    """
    if not must_call and wanted is None:
        return None
    has_reasoning = starts_in_reasoning and family.reasoning is not None
    if not must_call and not has_reasoning and not functions:
        return wanted

    rules: dict[str, str] = {}
    answers = []
    if wanted is not None and not must_call:
        content = _content_rule(wanted)
        if content is None:  # a client's own grammar cannot be embedded into another grammar
            return wanted
        rules["content"] = content
        answers.append("content")
    if functions:
        rules |= _call_rules(family.forced_calls, functions, codec, has_parallel_calls=has_parallel_calls)
        answers.append("calls")
    before = ""
    if has_reasoning:
        assert family.reasoning is not None
        rules |= _reasoning_rules(family.reasoning[1], codec)
        before = "reasoning SPACE "
    lines = [f"start: {before}({' | '.join(answers)})", *(f"{name}: {rule}" for name, rule in rules.items())]
    return _checked("tools" if functions else "response_format", grammar="\n".join(lines))


def grammar_forms(functions: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    """Yield forms of functions to try in a grammar, the most restrictive first.

    The first form has schemas of at most `MAX_SCHEMAS` characters; the largest are left out if necessary. The second
    form has no schemas. Strict functions keep their schemas in both.
    """
    free = [function if function.get("strict") else {"name": function["name"]} for function in functions]
    lengths = [_length(function.get("parameters")) for function in functions]
    total, form = sum(lengths), list(functions)
    for place in sorted(range(len(form)), key=lengths.__getitem__, reverse=True):
        if total > MAX_SCHEMAS and not form[place].get("strict"):
            form[place] = free[place]
            total -= lengths[place]
    yield form
    if form != free:
        yield free


def _reasoning_rules(end: str, codec: TextCodec) -> dict[str, str]:
    """Return the rules for reasoning up to the marker that ends it, and for white space after the marker."""
    literal = _literal(end, codec)
    if literal.startswith("<["):
        reasoning = {"reasoning": f"/(?s:.*)/ {literal}"}
    else:  # lazy matching ends at the first marker
        reasoning = {"reasoning[lazy]": f"/(?s:.*){_lark_pattern(re.escape(end))}/"}
    return reasoning | {"SPACE": r"/\s{0,4}/"}


def _content_rule(wanted: StructuredOutputsParams) -> str | None:
    grammar = wanted.for_engine()
    match grammar.notation:
        case "json":
            return f"%json {grammar.text}"
        case "regex":
            return f"/{_lark_pattern(grammar.text)}/"
    return None


def _lark_pattern(regex: str) -> str:
    """Return a regular expression in the form that Lark expects between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", regex).replace("\n", "\\n")


def _call_rules(
    calls: ForcedCalls, functions: Sequence[dict[str, Any]], codec: TextCodec, *, has_parallel_calls: bool
) -> dict[str, str]:
    """Return the rules of answers that consist of calls."""
    each = []
    for function in functions:
        parts = [
            _literal(calls.before_name + function["name"], codec),
            _with_index(calls.before_arguments, codec),
            f"%json {json.dumps(parameters_schema(function), ensure_ascii=False)}",
            _literal(calls.after_arguments, codec),
        ]
        each.append(" ".join(filter(None, parts)))
    has_several = has_parallel_calls and calls.separator is not None
    more = f"({' '.join(filter(None, [_literal(calls.separator or '', codec), 'call']))})*" if has_several else ""
    parts = [_literal(calls.begin, codec), "call", more, _literal(calls.end, codec)]
    return {"calls": " ".join(filter(None, parts)), "call": "\n    | ".join(each)}


def parameters_schema(function: dict[str, Any]) -> Any:
    """Return the schema that a function's arguments must satisfy. It is relaxed unless the function is strict.

    Raises:
        ApiError: the function is strict, and its schema cannot be enforced.
    """
    schema = function.get("parameters") or ANY_OBJECT
    if not function.get("strict"):
        return relaxed_schema(schema)
    return enforced_schema("tools", f"the parameters of the tool {function['name']!r}", schema, is_strict=True)


def _with_index(text: str, codec: TextCodec) -> str:
    before, mark, after = text.partition("{index}")
    number = ["/[0-9]{1,3}/"] if mark else []
    return " ".join(filter(None, [_literal(before, codec), *number, _literal(after, codec)]))


def _literal(text: str, codec: TextCodec) -> str:
    """Return a text in Lark's notation. A part that is a single added token, such as a marker, matches only this token.

    Otherwise llguidance would match some added tokens by text, and could not match special ones at all.
    """
    added = codec.added_tokens
    names = sorted(map(re.escape, filter(None, added)), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(names)})", text) if names else [text]
    return " ".join(f"<[{added[piece]}]>" if piece in added else json.dumps(piece) for piece in pieces if piece)
