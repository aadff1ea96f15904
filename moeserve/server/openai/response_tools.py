"""The tools of a request to the Responses API as functions of the model, and the names by which its answer has them."""

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

CUSTOM_INPUT = "input"  # the parameter of a custom tool, which has a text instead of arguments


class Repeated(Body):
    """A part of a tool. Responses contain the tools of their requests, with all fields."""

    model_config = ConfigDict(extra="allow")


class FlatTool(Repeated, Function):
    type: Literal["function"]


class CustomFormat(Repeated):
    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Repeated):
    """A tool whose input is a text. The model calls it as a function with one parameter."""

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

    field: str  # of the request
    function: Function  # as the model sees it
    name: str  # as the client calls it
    namespace: str | None
    is_custom: bool


class OfferedTools:
    """The tools of a request that the model may call.

    A tool inside a namespace has its own name, or, if several tools have that name, one that begins with the namespace.
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
        """The functions, each keyed by the request field of its tool, such as `tools[2]`."""
        return {tool.field: FunctionTool(function=tool.function) for tool in self._tools.values()}

    def find(self, function_name: str) -> OfferedTool | None:
        return self._tools.get(function_name)

    def function_name(self, name: str, namespace: str | None = None) -> str:
        """Return the name of the function that stands for a tool of the client."""
        return self._names.get((namespace, name), name)

    def only(self, function_names: set[str]) -> OfferedTools:
        """Return the tools whose functions have these names."""
        chosen = OfferedTools(())
        chosen._tools = {name: tool for name, tool in self._tools.items() if name in function_names}
        chosen._names = self._names
        return chosen


def _flattened(tools: Sequence[Tool]) -> Iterator[tuple[str, str | None, FlatTool | CustomTool]]:
    """Yield the tools that can be offered, each with its field in the request and its namespace."""
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
    """Return the input of a custom tool as arguments of its function."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def input_of_arguments(arguments: str) -> str:
    """Return the input of a custom tool. Arguments of another form are the input themselves."""
    try:
        found = nested_json.parse(arguments)
    except ValueError:
        return arguments
    text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
