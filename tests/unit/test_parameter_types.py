"""The types of a tool's parameters, from schemas that refer to themselves."""

from __future__ import annotations

from typing import Any

from moeserve.parsers.json_text import ParameterTypes


def types_of(schema: dict[str, Any], text: str) -> str:
    tool = {
        "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": schema}}}
    }
    return ParameterTypes([tool]).to_json("f", "a", text=text)


def test_a_schema_may_refer_to_itself_many_times() -> None:
    """Following each reference again would take 1000 ** 8 steps."""
    schema = {"anyOf": [{"$ref": "#/$defs/x"} for _ in range(1000)] + [{"type": "integer"}]}
    assert types_of(schema, "1") == "1"
    schema["anyOf"].append({"type": "string"})
    assert types_of(schema, "one") == '"one"'
