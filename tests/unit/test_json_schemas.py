"""Schemas as pydantic and zod write them, in keywords with which grammars can be built."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def num_calls(work: Callable[[], object]) -> int:
    """Return the number of calls of functions, in Python or C, that work makes."""
    count = 0

    def add(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(add)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


SCHEMAS_OF_A_SIZE: dict[str, Callable[[int], dict[str, Any]]] = {
    "one branch many times": lambda size: {
        "oneOf": [{"$ref": "#/$defs/a"}] * size,
        "$defs": {"a": {"properties": {f"p{number}": {"const": 1} for number in range(size)}}},
    },
    "many branches without a tag": lambda size: {
        "oneOf": [
            {"title": str(branch), "properties": {f"p{number}": {"const": 1} for number in range(30)}}
            for branch in range(size)
        ],
    },
    "a chain of references": lambda size: {
        "$defs": {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(size)}
    },
    "a circle of references": lambda size: {
        "$defs": {str(number): {"$ref": f"#/$defs/{(number + 1) % size}"} for number in range(size)}
    },
}


@pytest.mark.parametrize("kind", SCHEMAS_OF_A_SIZE)
@pytest.mark.parametrize("function", [servable_schema, relaxed_schema, lambda schema: list(unsupported_places(schema))])
def test_work_grows_with_the_size_of_a_schema_alone(kind: str, function: Callable[[Any], object]) -> None:
    small, large = (SCHEMAS_OF_A_SIZE[kind](size) for size in (50, 200))
    assert num_calls(lambda: function(large)) < 5 * num_calls(lambda: function(small))


def test_circles_of_references_are_found_from_each_of_their_parts() -> None:
    schema = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}, "c": {"$ref": "#/$defs/a"}, "d": {}}}
    places = [place for place, _ in unsupported_places(schema | {"properties": {"x": {"$ref": "#/$defs/d"}}})]
    assert places == ["#/$defs/a", "#/$defs/b", "#/$defs/c"]
