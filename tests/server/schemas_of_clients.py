"""Schemas in the forms that pydantic, zod, MCP servers and OpenAI's clients write, by name."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import pathlib
import uuid
from typing import Annotated, Any, Generic, Literal, TypeVar

import annotated_types
import pydantic
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Address(BaseModel):
    street: str
    zip: Annotated[str, Field(pattern=r"^\d{5}$")]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    breed: str | None = None


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Employee(BaseModel):
    """An employee.

    Their manager is one, too.
    """

    name: str = Field(description="The full name", examples=["Ada"], max_length=20)
    manager: Employee | None = None


class Page(BaseModel, Generic[T]):
    items: list[T]
    next: str | None


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    home: Address
    work: Address | None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


PYDANTIC: dict[str, Any] = {
    "nested models": Closed,
    "extra fields": Open,
    "recursive model": Node,
    "recursive model with text": Employee,
    "generic model": Page[Address],
    "optional": int | None,
    "union": int | str | bool | None,
    "union of models": Cat | Dog,
    "tagged union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "list of tagged unions": list[Annotated[Cat | Dog, Field(discriminator="kind")]],
    "literal": Literal["a", 1, True, None],
    "enum": Colour,
    "integer enum": Level,
    "decimal": decimal.Decimal,
    "decimal with places": Annotated[decimal.Decimal, Field(max_digits=6, decimal_places=2)],
    "date-time": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "duration": datetime.timedelta,
    "uuid": uuid.UUID,
    "url": pydantic.HttpUrl,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "ip network": ipaddress.IPv4Network,
    "path": pathlib.Path,
    "bytes": bytes,
    "base64": pydantic.Base64Bytes,
    "secret": pydantic.SecretStr,
    "json text": pydantic.Json[list[int]],
    "byte size": pydantic.ByteSize,
    "dict of models": dict[str, Address],
    "dict by enum": dict[Colour, int],
    "dict by literal": dict[Literal["x", "y"], float],
    "dict by pattern": dict[Annotated[str, Field(pattern="^[a-z]{1,4}$")], int],
    "dict by length": dict[Annotated[str, Field(min_length=2, max_length=4)], int],
    "dict by integer": dict[int, str],
    "dict by uuid": dict[uuid.UUID, int],
    "short dict": Annotated[dict[str, int], Field(min_length=1, max_length=3)],
    "set": set[int],
    "frozen set of enum": frozenset[Colour],
    "short set": Annotated[set[str], Field(max_length=1)],
    "tuple": tuple[int, str, bool],
    "tuple of any length": tuple[float, ...],
    "list of lists": list[list[int]],
    "short list": Annotated[list[str], Field(min_length=2, max_length=3)],
    "int64": Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    "uint64": Annotated[int, Field(ge=0, lt=2**64)],
    "positive": pydantic.PositiveInt,
    "negative float": pydantic.NegativeFloat,
    "float in a range": Annotated[float, Field(gt=0, lt=1)],
    "multiple": Annotated[int, annotated_types.MultipleOf(5), Field(ge=0, le=100)],
    "multiple of a fraction": Annotated[float, Field(multiple_of=0.25)],
    "length": Annotated[str, Field(min_length=3, max_length=5)],
    "pattern": Annotated[str, Field(pattern=r"^[A-Z]{2}\d{3}$")],
    "unanchored pattern": Annotated[str, Field(pattern=r"\d+")],
    "pattern and length": Annotated[str, Field(pattern=r"^[a-z]+$", min_length=2, max_length=6)],
    # As pydantic 2.12 and 2.13 write Decimal; 2.14 writes no pattern.
    "decimal with a pattern": Annotated[
        float | str,
        WithJsonSchema(
            {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}
        ),
    ],
    "pattern with look-ahead": Annotated[str, Field(json_schema_extra={"pattern": r"^(?=.*\d)[a-z\d]{4}$"})],
    "any": Any,
    "object": object,
}

UUID4 = "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
IPV4 = rf"^(?:{BYTE}\.){{3}}{BYTE}$"
DATE = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))$"
)
SAFE = {"minimum": -(2**53 - 1), "maximum": 2**53 - 1}


def closed(properties: dict[str, Any], required: list[str] | None = None, **others: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        **({"required": names} if names else {}),
        "additionalProperties": False,
        **others,
    }


ZOD: dict[str, Any] = {
    "object": closed({"a": {"type": "string"}, "b": {"type": "integer", **SAFE}}),
    "loose object": {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": {},
    },
    "catchall": {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "number"}},
    "record": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
    },
    "record by enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "number"},
        "required": ["a", "b"],
    },
    "record by pattern": {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": "^x-[a-z]+$"},
        "additionalProperties": {"type": "string"},
    },
    "partial record": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "boolean"},
    },
    "record of integers": {
        "type": "object",
        "propertyNames": {"type": "string", "minLength": 1},
        "additionalProperties": {"type": "integer", **SAFE},
    },
    "discriminated union": {
        "oneOf": [
            closed({"type": {"type": "string", "const": "a"}, "x": {"type": "number"}}),
            closed({"type": {"type": "string", "const": "b"}, "y": {"type": "string"}}),
        ]
    },
    "discriminated union as anyOf": {
        "anyOf": [
            closed({"type": {"type": "string", "const": "a"}, "x": {"type": "number"}}),
            closed({"type": {"type": "string", "const": "b"}, "y": {"type": "string"}}),
        ]
    },
    "catch": closed({"x": {"type": "string", "default": "fallback"}}),
    "literals": {"enum": ["a", 12, True, None]},
    "literals of one type": {"type": "number", "enum": [1, 2.5]},
    "native enum": {"type": "string", "enum": ["apple", "pear"]},
    "never": closed({"a": {"type": "string"}, "b": {"not": {}}}, ["a"]),
    "intersection": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "number"}}, "required": ["b"]},
        ]
    },
    "intersection of closed objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "number"}}, "required": ["b"]},
        ],
        "unevaluatedProperties": False,
    },
    "email": {"type": "string", "format": "email", "pattern": EMAIL},
    "uuid": {"type": "string", "format": "uuid", "pattern": UUID4},
    "url": {"type": "string", "format": "uri"},
    "ipv4": {"type": "string", "format": "ipv4", "pattern": IPV4},
    "cidr": {"type": "string", "format": "cidrv4"},
    "cuid": {"type": "string", "format": "cuid", "pattern": "^[cC][^\\s-]{8,}$"},
    "ulid": {"type": "string", "format": "ulid", "pattern": "^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$"},
    "date": {"type": "string", "format": "date", "pattern": DATE},
    "jwt": {"type": "string", "format": "jwt"},
    "base64url": {
        "type": "string",
        "format": "base64url",
        "contentEncoding": "base64url",
        "pattern": "^[A-Za-z0-9_-]*$",
    },
    "regular expression with flags": {"type": "string", "pattern": "^[a-z\\/]{2,4}$"},
    "starts and ends": {"type": "string", "allOf": [{"pattern": "^ab.*"}, {"pattern": ".*yz$"}]},
    "lower case": {"type": "string", "format": "lowercase", "pattern": "^[^A-Z]*$"},
    "step": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
    "getter recursion": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"name": {"type": "string"}, "sub": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["name", "sub"],
        "additionalProperties": False,
    },
    "recursion of version 3": {
        "$ref": "#/definitions/node",
        "definitions": {
            "node": closed(
                {"v": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/definitions/node"}, {"type": "null"}]}}
            )
        },
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    "json": {
        "$ref": "#/$defs/__schema0",
        "$defs": {
            "__schema0": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "number"},
                    {"type": "boolean"},
                    {"type": "null"},
                    {"type": "array", "items": {"$ref": "#/$defs/__schema0"}},
                    {
                        "type": "object",
                        "propertyNames": {"type": "string"},
                        "additionalProperties": {"$ref": "#/$defs/__schema0"},
                    },
                ]
            }
        },
    },
    "meta": closed({"x": {"id": "name", "title": "Name", "deprecated": True, "examples": ["a"], "type": "string"}}),
}

PAIR = {"type": "array", "items": [{"type": "string"}, {"type": "number"}], "minItems": 2, "maxItems": 2}
ZOD_3: dict[str, Any] = {
    "tuple": PAIR,
    "tuple with rest": {
        "type": "array",
        "minItems": 1,
        "items": [{"type": "string"}],
        "additionalItems": {"type": "number"},
    },
    "set": {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
    "map": {"type": "array", "maxItems": 125, "items": PAIR},
    "nullable": {"type": ["string", "null"]},
    "record": {"type": "object", "additionalProperties": {"type": "number"}, "propertyNames": {"minLength": 2}},
}

TEXT = {"type": "string", "maxLength": 6}
MCP: dict[str, Any] = {
    "no parameters": {"type": "object"},
    "empty properties": {"type": "object", "properties": {}, "additionalProperties": False},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/tool.json",
        "$comment": "made by hand",
        "type": "object",
        "definitions": {"id": {"type": "integer", "minimum": 1, "maximum": 99}},
        "properties": {"id": {"$ref": "#/definitions/id", "description": "beside a reference"}},
        "required": ["id"],
        "additionalProperties": False,
    },
    "reference to another document": closed({"x": {"$ref": "https://example.com/other.json"}}),
    "reference to nothing": closed({"x": {"$ref": "#/$defs/missing"}}),
    "reference to itself": {"$ref": "#"},
    "OpenAPI nullable": closed({"x": {"type": "string", "nullable": True}}),
    "OpenAPI nullable enum": closed({"x": {"type": "string", "enum": ["a", "b"], "nullable": True}}),
    "OpenAPI formats": closed(
        {"x": {"type": "integer", "format": "int32"}, "y": {"type": "number", "format": "double"}}
    ),
    "OpenAPI discriminator": {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat"}},
        "$defs": {kind: closed({"kind": {"const": kind}}) for kind in ("cat", "dog")},
    },
    "enum against its type": closed({"x": {"type": "integer", "enum": ["a", 1]}}),
    "required is false": {"type": "object", "properties": {"x": {"type": "string", "required": False}}},
    "required is a number": {
        "oneOf": [{"type": "object", "properties": {"k": {"const": kind}}, "required": 5} for kind in "ab"]
    },
    "required is null": {"type": "object", "properties": {"x": TEXT}, "required": None},
    "unknown type": closed({"x": {"type": "str"}}),
    "type any": closed({"x": {"type": "any"}}),
    "type is null": closed({"x": {"type": None, "description": "anything"}}),
    "oneOf of overlapping": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]},
    "dependencies": {**closed({"a": TEXT, "b": TEXT}, []), "dependencies": {"a": ["b"]}},
    "unique objects": {"type": "array", "items": closed({"x": {"enum": [1, 2]}}), "uniqueItems": True, "maxItems": 3},
    "unique items of an enum": closed(
        {"x": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}}
    ),
    "allOf with siblings": {
        "type": "object",
        "properties": {"a": {"allOf": [{"$ref": "#/$defs/p"}], "description": "by pydantic 1", "default": 3}},
        "$defs": {"p": {"type": "integer", "minimum": 0, "maximum": 5}},
        "required": ["a"],
    },
    "impossible bounds": {"type": "integer", "minimum": 5, "maximum": 1},
    "impossible lengths": {"type": "string", "minLength": 5, "maxLength": 1},
    "large lengths": closed({"x": {"type": "string", "maxLength": 100_000}}),
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 1000},
    "many alternatives": closed({"x": {"enum": [f"value {number}" for number in range(120)]}}),
    "many properties": closed({f"property_{number}": TEXT for number in range(30)}, ["property_7"]),
    "huge pattern": closed({"x": {"type": "string", "pattern": "^(([a-z]{1,200}){1,200}){1,200}$"}}),
    "pattern that is not valid": closed({"x": {"type": "string", "pattern": "^[a-"}}),
    "pattern with a back-reference": closed({"x": {"type": "string", "pattern": r"^(a|b)\1$"}}),
    "pattern with word boundaries": closed({"x": {"type": "string", "pattern": r"^\w+\b$"}}),
    "recursive reference of 2019-09": {"type": "object", "properties": {"x": {"$recursiveRef": "#"}}},
    "bounds as texts": closed({"x": {"type": "integer", "minimum": "1"}}),
    "properties as a list": {"type": "object", "properties": [{"name": "x"}]},
    "large multiples": closed({"x": {"type": "integer", "multipleOf": 1000, "minimum": 0}}),
    "exponent bounds": closed({"x": {"type": "number", "minimum": 1e-7, "maximum": 1e20}}),
}


def _of(kind: Any) -> dict[str, Any]:
    """Return the schema of a model with a field of this type, or of this model."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_json_schema()
    model: type[BaseModel] = pydantic.create_model("Model", x=(kind, ...))
    return model.model_json_schema()


SCHEMAS = {
    **{f"pydantic: {name}": _of(kind) for name, kind in PYDANTIC.items()},
    **{
        f"zod: {name}": schema if schema.get("type") == "object" or "$ref" in schema else closed({"x": schema})
        for name, schema in ZOD.items()
    },
    **{
        f"zod 3: {name}": closed({"x": schema}, **{"$schema": "http://json-schema.org/draft-07/schema#"})
        for name, schema in ZOD_3.items()
    },
    "OpenAPI 3: exclusive bounds": closed(
        {"x": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 9}},
        **{"$schema": "http://json-schema.org/draft-04/schema#"},
    ),
    **{f"MCP: {name}": schema for name, schema in MCP.items()},
}
