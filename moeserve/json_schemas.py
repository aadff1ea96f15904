"""Rewrites JSON schemas so that grammars can be built from them, and finds the places that prevent this."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Keywords whose value is one schema, a dict of schemas by name, or a list of schemas.
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
_NOTHING: Mapping[str, Any] = {}
_MOST_TAGS = 16  # maximum number of properties that are tried as the tag of a union
# Keywords that restrict values in ways that no grammar expresses.
_UNSUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired"),
    *("dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "propertyNames", "$dynamicRef"),
    *("dependencies", "$recursiveRef"),
)
# The start of the pattern that zod writes for an e-mail address, and an equal one without look-around.
_EMAIL_WITHOUT_LOOK_AROUND = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@",
    r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@",
)
_LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")


def servable_schema(schema: Any) -> Any:
    """Return a schema that uses only keywords that grammars support, where possible.

    It allows the same values or fewer.

    - Formats that are annotations are dropped, and so are keywords that restrict nothing here, such as
      `{"propertyNames": {"type": "string"}}`.
    - A property that may not be present (`{"not": {}}`) has the schema false.
    - Branches of `anyOf` whose pattern has look-around are dropped if others remain.
    - The branches of a tagged union require their tag, also if the tag was optional because it has a default.
    - `propertyNames` is written as `properties` or `patternProperties`.
    - Bounds of numbers are at most 10^18.
    """
    document = _Document(schema)
    return _rewritten(schema, lambda node: _exact(node, document))


def relaxed_schema(schema: Any) -> Any:
    """Return a schema without the restrictions that no grammar expresses. Values that it allows may violate them."""
    servable = servable_schema(schema)
    document = _Document(servable)
    return _rewritten(servable, lambda node: _relaxed(node, document))


def without_unique_items(schema: Any) -> Any:
    """Return a schema without `uniqueItems`. The lists that it allows may have equal items."""
    return _rewritten(schema, lambda node: {key: value for key, value in node.items() if key != "uniqueItems"})


def unsupported_places(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield the places in a servable schema, as JSON pointers, each with a keyword there that no grammar expresses."""
    return _unsupported_places(schema, "#", _Document(schema))


def _unsupported_places(schema: Any, place: str, document: _Document) -> Iterator[tuple[str, str]]:
    if isinstance(schema, Mapping):
        for name in _UNSUPPORTED:
            if name in schema:
                yield place, name
        if _has_look_around(schema):
            yield place, "pattern (with look-around or a back-reference)"
        if document.is_circular(schema):
            yield place, "$ref (which leads back to itself)"
        for key, part in inner_schemas(schema):
            yield from _unsupported_places(part, f"{place}/{key}", document)


def inner_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield, for each schema directly within a schema, the part of a JSON pointer that leads there, and the schema."""
    for name in _OF_ONE:
        if isinstance(schema.get(name), Mapping):
            yield name, schema[name]
    for name in _OF_SEVERAL:
        if isinstance(schema.get(name), Mapping):
            for key, part in schema[name].items():
                if isinstance(part, Mapping):
                    yield f"{name}/{key.replace('~', '~0').replace('/', '~1')}", part
    for name in _OF_LIST:
        if isinstance(schema.get(name), list):
            for number, part in enumerate(schema[name]):
                if isinstance(part, Mapping):
                    yield f"{name}/{number}", part


def _rewritten(schema: Any, rewrite: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a schema after a function has rewritten the schema itself and, before that, each schema within it."""
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


class _Document:
    """A whole schema, which resolves references to its parts.

    Results are cached, so that rewriting takes linear time.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._constants: dict[int, tuple[Any, dict[str, Any]]] = {}  # by id of the part, which is kept alive here
        self._is_circular: dict[int, bool] = {}  # parts that references point to, by id

    def resolved(self, branch: Any) -> Mapping[str, Any]:
        """Return a schema, or the part of the document that its `$ref` names; an empty schema if there is none."""
        if not isinstance(branch, Mapping):
            return _NOTHING
        reference = branch.get("$ref")
        if not isinstance(reference, str):
            return branch
        target = self._root
        for key in reference.removeprefix("#").split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        return target if isinstance(target, Mapping) and reference.startswith("#") else _NOTHING

    def constants(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the properties of a part that allow exactly one value, with this value."""
        if id(part) not in self._constants:
            self._constants[id(part)] = part, _constants(part)
        return self._constants[id(part)][1]

    def is_circular(self, schema: Mapping[str, Any]) -> bool:
        """Return True if the references of a schema end in a circle, so that they describe nothing."""
        parts: dict[int, None] = {}
        is_circular = False
        while isinstance(schema.get("$ref"), str):
            schema = self.resolved(schema)
            is_circular = id(schema) in parts or self._is_circular.get(id(schema), False)
            if id(schema) in parts or id(schema) in self._is_circular:
                break
            parts[id(schema)] = None
        self._is_circular |= dict.fromkeys(parts, is_circular)
        return is_circular


def _exact(node: dict[str, Any], document: _Document) -> Any:
    """Return one schema, whose inner schemas are rewritten already, in supported keywords."""
    if node.get("not") is True or node.get("not") == {}:
        return False
    if node.get("not") is False:
        del node["not"]
    form = node.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        del node["format"]
    if node.get("uniqueItems") is False or ("uniqueItems" in node and node.get("maxItems") in (0, 1)):
        del node["uniqueItems"]
    if node.get("minContains") == 0 and "maxContains" not in node:
        node = {key: value for key, value in node.items() if key not in ("contains", "minContains")}
    for name, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        bound = node.get(name)
        if isinstance(bound, (int, float)) and sign * bound > _MOST:
            node[name] = sign * _MOST
    if isinstance(node.get("pattern"), str):
        node["pattern"] = node["pattern"].replace(*_EMAIL_WITHOUT_LOOK_AROUND)
    if isinstance(node.get("anyOf"), list):
        node["anyOf"] = _without_look_around(node["anyOf"])
    if "propertyNames" in node:
        node = _with_named_properties(node, document)
    if isinstance(node.get("oneOf"), list):
        node["oneOf"] = _with_tags(node["oneOf"], document)
    return node


def _with_named_properties(node: dict[str, Any], document: _Document) -> dict[str, Any]:
    """Return a schema without `propertyNames`, if this keyword restricts nothing or can be written as properties."""
    others = {key: value for key, value in node.items() if key != "propertyNames"}
    names = {} if node["propertyNames"] is True else node["propertyNames"]
    if isinstance(names, Mapping) and names.keys() - _ANNOTATIONS == {"$ref"}:
        names = document.resolved(names) or names
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return node
    restricted = names.keys() - _ANNOTATIONS
    if not restricted:
        return others
    if node.keys() & {"properties", "patternProperties"}:
        return node
    value = node.get("additionalProperties", True)
    if restricted == {"enum"} and isinstance(names["enum"], list):
        allowed = {name: value for name in names["enum"] if isinstance(name, str)}
        return {**others, "properties": allowed, "additionalProperties": False}
    pattern = _pattern_of(names) if restricted <= {"pattern", "minLength", "maxLength"} else None
    if pattern is None:
        return node
    return {**others, "patternProperties": {pattern: value}, "additionalProperties": False}


def _pattern_of(texts: Mapping[str, Any]) -> str | None:
    """Return a pattern for texts that a schema restricts by a pattern or by their length; None for any other schema."""
    if "pattern" in texts:
        return texts["pattern"] if isinstance(texts["pattern"], str) and len(texts.keys() - _ANNOTATIONS) == 1 else None
    least, most = texts.get("minLength", 0), texts.get("maxLength", "")
    if not isinstance(least, int) or not isinstance(most, (int, str)):
        return None
    return rf"^[\s\S]{{{least},{most}}}$"


def _with_tags(branches: list[Any], document: _Document) -> list[Any]:
    """Return the branches of `oneOf`, each of which requires the tag, if there is one.

    A tag is a property that all branches have, with a different constant in each branch.
    """
    found = [document.resolved(branch) for branch in branches]
    if not found or len({id(part) for part in found}) < len(found):  # equal branches have no tag
        return list(branches)
    constants = [document.constants(part) for part in found]
    shared = set(constants[0]).intersection(*constants[1:])
    for tag in sorted(shared)[:_MOST_TAGS]:
        if len({repr(each[tag]) for each in constants}) == len(constants):
            return [_with_tag(*each, tag) for each in zip(branches, found, strict=True)]
    return list(branches)


def _with_tag(branch: Mapping[str, Any], target: Mapping[str, Any], tag: str) -> Mapping[str, Any]:
    """Return a branch of a union, changed so that it requires the property `tag`.

    A malformed branch is returned unchanged, so that an error names its place.

    Args:
        target: the branch, or the part to which the branch refers.
    """
    required = branch.get("required", [])
    for names in (required, target.get("required", [])):
        if not isinstance(names, list) or tag in names:
            return branch
    return {**branch, "required": [*required, tag]}


def _constants(branch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a schema that allow exactly one value, with this value."""
    properties = branch.get("properties")
    constants = {}
    for name, part in properties.items() if isinstance(properties, Mapping) else ():
        if isinstance(part, Mapping) and "const" in part:
            constants[name] = part["const"]
        elif isinstance(part, Mapping) and isinstance(part.get("enum"), list) and len(part["enum"]) == 1:
            constants[name] = part["enum"][0]
    return constants


def _relaxed(node: dict[str, Any], document: _Document) -> dict[str, Any]:
    node = {key: value for key, value in node.items() if key not in _UNSUPPORTED}
    if document.is_circular(node):
        del node["$ref"]
    if _has_look_around(node):
        del node["pattern"]
    if isinstance(node.get("oneOf"), list) and "anyOf" not in node:
        node["anyOf"] = node.pop("oneOf")
    return node


def _without_look_around(branches: list[Any]) -> list[Any]:
    """Return the branches of `anyOf` except branches whose pattern has look-around, if a branch besides null remains.

    A decimal of pydantic, for example, may be a number, or a text with such a pattern.
    """
    kept = [branch for branch in branches if not _has_look_around(branch)]
    return kept if any(branch != {"type": "null"} for branch in kept) else branches


def _has_look_around(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None
