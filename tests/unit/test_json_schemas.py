"""Schemas as pydantic and zod write them, in keywords with which grammars can be built."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.json_schemas import relaxed_schema, servable_schema, unsupported_places, without_unique_items

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


def within(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "number"}},
            {"properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "number"}},
            {"patternProperties": {"^x": {"type": "number"}}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"type": "string", "minLength": 2}},
            {"patternProperties": {r"^[\s\S]{2,}$": True}, "additionalProperties": False},
        ),
        ({"type": "array", "contains": {"type": "null"}, "minContains": 0}, {"type": "array"}),
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"type": "string", "format": "date-time"}, {"type": "string", "format": "date-time"}),
        ({"not": {}}, False),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -(10**18), "maximum": 10**18}),
        ({"minimum": 2, "maximum": True}, {"minimum": 2, "maximum": True}),
        (
            {"enum": [{"format": "password"}], "default": {"not": {}}},
            {"enum": [{"format": "password"}], "default": {"not": {}}},
        ),
    ],
)
def test_what_restricts_nothing_is_dropped(schema: Any, expected: Any) -> None:
    assert servable_schema(schema) == expected
    assert servable_schema(within(schema)) == within(expected)
    assert servable_schema({"$defs": {"a": schema}, "anyOf": [schema, True]}) == {
        "$defs": {"a": expected},
        "anyOf": [expected, True],
    }


def test_branches_of_a_tagged_union_require_their_tag() -> None:
    def branch(kind: str, **others: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": kind, "default": kind}}, **others}

    schema = {
        "$defs": {"cat": branch("cat"), "dog": branch("dog", required=["kind"])},
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, branch("fox", required=["age"])],
    }
    assert servable_schema(schema)["oneOf"] == [
        {"$ref": "#/$defs/cat", "required": ["kind"]},
        {"$ref": "#/$defs/dog"},
        branch("fox", required=["age", "kind"]),
    ]
    untagged = {"oneOf": [{"type": "string"}, {"$ref": "#/nowhere"}, {"$ref": "#/oneOf/x"}]}
    assert servable_schema(untagged) == untagged


def test_places_of_what_cannot_be_served() -> None:
    schema = within({"type": "array", "uniqueItems": True, "items": {"not": {"type": "string"}}})
    assert list(unsupported_places(servable_schema(schema))) == [
        ("#/properties/x", "uniqueItems"),
        ("#/properties/x/items", "not"),
    ]
    assert list(unsupported_places(relaxed_schema(schema))) == []
    assert "uniqueItems" not in without_unique_items(schema)["properties"]["x"]
    ((place, keyword),) = unsupported_places({"pattern": "^(?=a)"})
    assert place == "#"
    assert "pattern" in keyword
    assert list(unsupported_places(servable_schema({"type": "string", "pattern": EMAIL}))) == []
