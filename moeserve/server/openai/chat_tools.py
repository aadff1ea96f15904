"""The tools of a chat completion, and `tool_choice`, which selects the functions that the model may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Tag

from moeserve.config.limits import LIMITS
from moeserve.server.conversation import FunctionTool, NamedTool
from moeserve.server.schema import Body, Bounded


class OtherTool(Body):
    """A tool that is not a function, such as a provider's web search. The model does not see it."""


def _tool_type(tool: Any) -> str:
    if not isinstance(tool, dict):
        return type(tool).__name__ if isinstance(tool, Body) else "FunctionTool"
    is_function = tool.get("type") == "function" or (tool.get("type") is None and "function" in tool)
    return "FunctionTool" if is_function else "OtherTool"


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[OtherTool, Tag("OtherTool")], Discriminator(_tool_type)
]
Tools: TypeAlias = Annotated[list[Tool], Bounded(LIMITS.max_tools)]
Mode: TypeAlias = Literal["none", "auto", "required", "any"]


class ModeChoice(Body):
    type: Mode


class AllowedTools(Body):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], Bounded(LIMITS.max_tools)]

    @property
    def names(self) -> set[Any]:
        """The names of the allowed functions."""
        functions = [tool.get("function") for tool in self.tools]
        return {str(function.get("name")) for function in functions if isinstance(function, dict)}


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_type(choice: Any) -> str:
    if not isinstance(choice, dict):
        return type(choice).__name__ if isinstance(choice, Body) else "Mode"
    if choice.get("type") == "allowed_tools":
        return "AllowedChoice"
    return "NamedTool" if choice.get("type") in (None, "function") else "ModeChoice"


ToolChoice: TypeAlias = Annotated[
    Annotated[Mode, Tag("Mode")]
    | Annotated[ModeChoice, Tag("ModeChoice")]
    | Annotated[AllowedChoice, Tag("AllowedChoice")]
    | Annotated[NamedTool, Tag("NamedTool")],
    Discriminator(_choice_type),
]


def offered_tools(tools: Sequence[Tool], choice: ToolChoice | None = None) -> dict[str, FunctionTool]:
    """Return the functions that the model may call, keyed by their field in the request, such as "tools.0"."""
    functions = {f"tools.{place}": tool for place, tool in enumerate(tools) if isinstance(tool, FunctionTool)}
    if not isinstance(choice, AllowedChoice):
        return functions
    names = choice.allowed_tools.names
    return {field: tool for field, tool in functions.items() if tool.function.name in names}


def mode_of(choice: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedTool | None:
    """Return a choice in the form of `Conversation`. A list of allowed tools is reduced to its mode."""
    match choice:
        case AllowedChoice():
            return choice.allowed_tools.mode
        case ModeChoice():
            return mode_of(choice.type)
        case "any":
            return "required"
        case _:
            return choice
