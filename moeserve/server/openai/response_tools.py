"""Converts the tools of a Responses API request to functions, and the functions' names in the answer back."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag

from moeserve import nested_json
from moeserve.config.limits import LIMITS
from moeserve.server.conversation import LONG_TOOL_NAME, Function, FunctionTool
from moeserve.server.schema import Body, Bounded

CUSTOM_INPUT = "input"  # parameter of the function that stands for a custom tool


class Repeated(Body):
    """A part of a tool. Unknown fields are kept, because a response repeats the tools of its request."""

    model_config = ConfigDict(extra="allow")


class FlatTool(Repeated, Function):
    type: Literal["function"]


class CustomFormat(Repeated):
    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Repeated):
    """A tool whose input is a text. For the model, it is a function with one parameter."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None


class OtherTool(Repeated):
    """A tool that only its provider can run. The model does not see it."""

    type: str


TAGS = {"function": "FlatTool", "custom": "CustomTool", "namespace": "NamespaceTool"}  # by type


def _tool_type(tool: Any) -> str:
    found = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return TAGS.get(found, "OtherTool") if isinstance(found, str) else "OtherTool"


OneTool: TypeAlias = (
    Annotated[FlatTool, Tag("FlatTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[OtherTool, Tag("OtherTool")]
)


class NamespaceTool(Repeated):
    """A group of tools."""

    type: Literal["namespace"]
    name: str
    tools: Annotated[
        list[Annotated[OneTool | Annotated[OtherTool, Tag("NamespaceTool")], Discriminator(_tool_type)]],
        Bounded(LIMITS.max_tools),
        Field(default_factory=list),
    ]


Tool: TypeAlias = Annotated[OneTool | Annotated[NamespaceTool, Tag("NamespaceTool")], Discriminator(_tool_type)]


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the model may call."""

    field: str  # the tool's field in the request
    function: Function  # as the model sees it
    name: str  # as the client calls it
    namespace: str | None
    is_custom: bool


class OfferedTools:
    """The tools of a request that the model may call.

    The function for a tool in a namespace has the tool's name. If several tools have this name, the namespace is put
    before the name.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        each = list(_flattened(tools))
        counts = Counter(tool.name for _, _, tool in each)
        self._tools: dict[str, OfferedTool] = {}  # by the function's name
        for field, namespace, tool in each:
            name = tool.name
            if namespace is not None and counts[name] > 1:
                name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{namespace}__{name}")[-LONG_TOOL_NAME:]
            is_custom = isinstance(tool, CustomTool)
            self._tools.setdefault(name, OfferedTool(field, _function(name, tool), tool.name, namespace, is_custom))
        self._names = {(tool.namespace, tool.name): name for name, tool in self._tools.items()}

    @property
    def functions(self) -> dict[str, FunctionTool]:
        """The functions, each keyed by the request field of its tool, such as "tools.2"."""
        return {tool.field: FunctionTool(function=tool.function) for tool in self._tools.values()}

    def find(self, function_name: str) -> OfferedTool | None:
        return self._tools.get(function_name)

    def function_name(self, name: str, namespace: str | None = None) -> str:
        """Return the name of the function for the client's tool `name`."""
        return self._names.get((namespace, name), name)

    def only(self, function_names: set[str]) -> OfferedTools:
        """Return only the tools whose functions have these names."""
        chosen = OfferedTools(())
        chosen._tools = {name: tool for name, tool in self._tools.items() if name in function_names}
        chosen._names = self._names
        return chosen


def _flattened(tools: Sequence[Tool]) -> Iterator[tuple[str, str | None, FlatTool | CustomTool]]:
    """Yield the tools that can be offered to the model, each with its field in the request and its namespace."""
    for place, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            for inner_place, inner in enumerate(tool.tools):
                if isinstance(inner, (FlatTool, CustomTool)):
                    yield f"tools.{place}.tools.{inner_place}", tool.name, inner
        elif isinstance(tool, (FlatTool, CustomTool)):
            yield f"tools.{place}", None, tool


def _function(name: str, tool: FlatTool | CustomTool) -> Function:
    if isinstance(tool, FlatTool):
        return Function(name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    parts = [tool.description]
    if tool.format is not None and tool.format.definition:
        parts.append(
            f"The input must match this grammar ({tool.format.syntax or 'grammar'}):\n{tool.format.definition}"
        )
    parameter = {"type": "string", "description": "the whole input of the tool"}
    return Function(
        name=name,
        description="\n\n".join(filter(None, parts)) or None,
        parameters={"type": "object", "properties": {CUSTOM_INPUT: parameter}, "required": [CUSTOM_INPUT]},
    )


def arguments_of_input(text: str) -> str:
    """Return a custom tool's input as the JSON arguments of its function."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def input_of_arguments(arguments: str) -> str:
    """Return a custom tool's input from its function's arguments; the arguments themselves if they do not have it."""
    try:
        found = nested_json.parse(arguments)
    except ValueError:
        return arguments
    text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
