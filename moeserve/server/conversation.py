"""A turn of a conversation, as every chat API describes it: the messages and tools, and what the model answers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from moeserve.outputs import CompletionOutput
from moeserve.sampling_params import SamplingParams
from moeserve.server.errors import ApiError
from moeserve.server.schema import Body
from moeserve.server.service import Client, Service


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool | None = None


class FunctionTool(Body):
    type: Literal["function"] = "function"
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: FunctionName


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation and the functions that the model may call."""

    messages: list[dict[str, Any]]  # in OpenAI's form
    tools: Sequence[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    has_parallel_calls: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    with_reasoning: bool = True  # return what the model writes before its answer

    async def prompt(self, service: Service) -> list[int]:
        """Render the conversation.

        Raises:
            ApiError: the chat template refuses it, or there is none.
        """
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        messages = [_for_template(message) for message in self.messages]
        return await service.chat_prompt(
            messages, None if self.tool_choice == "none" else tools or None, self.template_arguments
        )


@dataclass(frozen=True)
class CallDelta:
    """A part of a tool call. The first part of each call has its id and name."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class TurnDelta:
    """New text and tool calls of one output of a turn."""

    output: CompletionOutput  # as the engine generated it
    content: str
    reasoning: str
    tool_calls: tuple[CallDelta, ...]
    finish_reason: str | None
    num_prompt: int  # tokens
    num_cached: int


async def turn_deltas(
    service: Service, client: Client, conversation: Conversation, params: SamplingParams, cache_salt: str | None
) -> AsyncGenerator[TurnDelta, None]:
    """Answer a conversation, and yield what the outputs gain.

    Raises:
        ApiError: the conversation cannot be served, or the engine failed.
    """
    if conversation.tools and conversation.tool_choice not in (None, "none"):
        raise ApiError(400, "tool_choice is not supported yet, except none", param="tool_choice")
    prompt = await conversation.prompt(service)
    async for output in service.generate(client, prompt, params, cache_salt):
        for each in output.outputs:
            yield TurnDelta(
                output=each,
                content=each.text,
                reasoning="",
                tool_calls=(),
                finish_reason=each.finish_reason,
                num_prompt=len(output.prompt_token_ids),
                num_cached=output.num_cached_tokens,
            )


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates read it: with a content, and with the arguments of calls as objects."""
    calls = [_parsed_call(call) for call in message.get("tool_calls") or ()]
    return {"content": "", **message} | ({"tool_calls": calls} if calls else {})


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise ApiError(
            400, f"the arguments of the call of {function['name'][:100]!r} are no JSON", param="messages"
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}
