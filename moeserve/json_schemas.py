"""Rewrites JSON schemas into ones with which grammars can be built, and finds the places that prevent it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Keywords whose values are schemas: one, several by name, and a list.
_OF_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_OF_SEVERAL = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_LIST = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
# Formats that grammars enforce. JSON Schema defines others as annotations.
_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
_ANNOTATIONS = frozenset(["type", "title", "description", "$comment", "examples", "default", "deprecated"])
_MOST = 10**18  # larger bounds cannot be expressed
# Keywords that restrict values in ways that no grammar expresses.
_UNSUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired"),
    *("dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "propertyNames", "$dynamicRef"),
)
# The start of the pattern that zod writes for an e-mail address, and an equal one without look-around.
_EMAIL_WITHOUT_LOOK_AROUND = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@",
    r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@",
)
_LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")


def servable_schema(schema: Any) -> Any:
    """Return a schema that allows the same values, or fewer of them, in keywords with which grammars can be built.

    - Formats that are annotations are dropped, and so are keywords that restrict nothing here, such as
      `{"propertyNames": {"type": "string"}}`.
    - A property that may not be present (`{"not": {}}`) has the schema false.
    - The branches of a tagged union require their tag, which otherwise may be left out for its default.
    - Bounds of numbers are at most 10^18.
    """
    return _rewritten(schema, lambda node: _exact(node, schema))


def relaxed_schema(schema: Any) -> Any:
    """Return a schema without the restrictions with which no grammar can be built. Its values may violate them."""
    return _rewritten(servable_schema(schema), _relaxed)


def without_unique_items(schema: Any) -> Any:
    """Return a schema without `uniqueItems`. Lists of its values may have equal items."""
    return _rewritten(schema, lambda node: {key: value for key, value in node.items() if key != "uniqueItems"})


def unsupported_places(schema: Any, place: str = "#") -> Iterator[tuple[str, str]]:
    """Yield the places of a servable schema, as JSON pointers, and the keywords there that no grammar expresses."""
    if isinstance(schema, Mapping):
        for name in _UNSUPPORTED:
            if name in schema:
                yield place, name
        if _has_look_around(schema):
            yield place, "pattern (with look-around or a back-reference)"
        for key, part in _parts(schema):
            yield from unsupported_places(part, f"{place}/{key}")


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly within a schema, with their places in it."""
    for name in _OF_ONE:
        if isinstance(schema.get(name), Mapping):
            yield name, schema[name]
    for name in _OF_SEVERAL:
        if isinstance(schema.get(name), Mapping):
            yield from ((f"{name}/{key}", part) for key, part in schema[name].items())
    for name in _OF_LIST:
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{number}", part) for number, part in enumerate(schema[name]))


def _rewritten(schema: Any, rewrite: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a schema in which a function has rewritten each schema, the inner ones first."""
    if not isinstance(schema, Mapping):
        return schema
    node = dict(schema)
    for name in _OF_ONE:
        if isinstance(node.get(name), Mapping):
            node[name] = _rewritten(node[name], rewrite)
    for name in _OF_SEVERAL:
        if isinstance(node.get(name), Mapping):
            node[name] = {key: _rewritten(part, rewrite) for key, part in node[name].items()}
    for name in _OF_LIST:
        if isinstance(node.get(name), list):
            node[name] = [_rewritten(part, rewrite) for part in node[name]]
    return rewrite(node)


def _exact(node: dict[str, Any], root: Any) -> Any:
    """Return one schema in supported keywords. `root` is the whole schema, to which references point."""
    if node.get("not") is True or node.get("not") == {}:
        return False
    if node.get("not") is False:
        del node["not"]
    form = node.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        del node["format"]
    if node.get("uniqueItems") is False or ("uniqueItems" in node and node.get("maxItems") in (0, 1)):
        del node["uniqueItems"]
    for name, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        bound = node.get(name)
        if isinstance(bound, (int, float)) and sign * bound > _MOST:
            node[name] = sign * _MOST
    if isinstance(node.get("pattern"), str):
        node["pattern"] = node["pattern"].replace(*_EMAIL_WITHOUT_LOOK_AROUND)
    if "propertyNames" in node:
        node = _with_named_properties(node)
    if isinstance(node.get("oneOf"), list):
        node["oneOf"] = _with_tags(node, root)
    return node


def _with_named_properties(node: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without propertyNames, if it restricts nothing or is a list of names."""
    names = node["propertyNames"]
    others = {key: value for key, value in node.items() if key != "propertyNames"}
    if names is True or (isinstance(names, Mapping) and names.keys() <= _ANNOTATIONS and _may_be_string(names)):
        return others
    is_list = isinstance(names, Mapping) and isinstance(names.get("enum"), list)
    if is_list and names.keys() <= _ANNOTATIONS | {"enum"} and not node.keys() & {"properties", "patternProperties"}:
        value = node.get("additionalProperties", True)
        allowed = {name: value for name in names["enum"] if isinstance(name, str)}
        return {**others, "properties": allowed, "additionalProperties": False}
    return node


def _may_be_string(schema: Mapping[str, Any]) -> bool:
    return schema.get("type", "string") == "string"


def _with_tags(node: dict[str, Any], root: Any) -> list[Any]:
    """Return the branches of oneOf, each of which requires its tag: a property with a different constant in each."""
    branches = node["oneOf"]
    found = [_resolved(branch, root) for branch in branches]
    tags = [set(_constants(branch)) for branch in found]
    for tag in sorted(set.intersection(*tags)) if tags else ():
        constants = [_constants(branch)[tag] for branch in found]
        if len({repr(constant) for constant in constants}) == len(constants):
            return [
                branch if tag in target.get("required", ()) else {**branch, "required": [*_required(branch), tag]}
                for branch, target in zip(branches, found, strict=True)
            ]
    return list(branches)


def _required(branch: Mapping[str, Any]) -> list[Any]:
    required = branch.get("required")
    return required if isinstance(required, list) else []


def _constants(branch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a schema that have one possible value, with it."""
    properties = branch.get("properties")
    constants = {}
    for name, part in properties.items() if isinstance(properties, Mapping) else ():
        if isinstance(part, Mapping) and "const" in part:
            constants[name] = part["const"]
        elif isinstance(part, Mapping) and isinstance(part.get("enum"), list) and len(part["enum"]) == 1:
            constants[name] = part["enum"][0]
    return constants


def _resolved(branch: Any, root: Any) -> Mapping[str, Any]:
    """Return a schema, or the one in the same document to which it refers; an empty one if there is none."""
    if not isinstance(branch, Mapping):
        return {}
    reference = branch.get("$ref")
    if not isinstance(reference, str):
        return branch
    target = root
    for key in reference.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) and reference.startswith("#") else {}


def _relaxed(node: dict[str, Any]) -> dict[str, Any]:
    node = {key: value for key, value in node.items() if key not in _UNSUPPORTED}
    if _has_look_around(node):
        del node["pattern"]
    if isinstance(node.get("oneOf"), list) and "anyOf" not in node:
        node["anyOf"] = node.pop("oneOf")
    return node


def _has_look_around(schema: Mapping[str, Any]) -> bool:
    pattern = schema.get("pattern")
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None
