"""`/v1/messages`: answers a conversation in Anthropic's format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from moeserve.config.settings import LIMITS
from moeserve.sampling_params import SamplingParams
from moeserve.server.blocks import Block, BlockEvent, Turn, block_events
from moeserve.server.client import Client
from moeserve.server.conversation import Conversation, Function, FunctionName, FunctionTool, NamedTool, turn_deltas
from moeserve.server.errors import anthropic_body
from moeserve.server.output_format import outputs_of_schema
from moeserve.server.reply import EVENTS, JSON, Reply, encode_json, event
from moeserve.server.schema import Body, Bounded, TransferFields, given_params
from moeserve.server.service import Service

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CacheControl(Body):
    """Accepted and ignored: prefixes are always cached."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


TextBlocks = Annotated[list[TextBlock], Bounded(LIMITS.max_parts)]


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks = ""
    is_error: bool = False
    cache_control: CacheControl | None = None


InputBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[InputBlock], Bounded(LIMITS.max_parts)]


class Tool(Body):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None


class AnyToolChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputSchema(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class Metadata(Body):
    user_id: str | None = None


class CountRequest(Body):
    """A conversation, without parameters for generating the answer."""

    model: str
    messages: Annotated[list[InputMessage], Bounded(LIMITS.max_messages, min_length=1)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[Tool], Bounded(LIMITS.max_tools)] | None = None
    tool_choice: Annotated[AnyToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    def conversation(self) -> Conversation:
        """Return the conversation in the form that chat templates expect."""
        messages = [converted for message in self.messages for converted in _converted(message)]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": _text(self.system)})
        tools = [
            FunctionTool(function=Function(name=tool.name, description=tool.description, parameters=tool.input_schema))
            for tool in self.tools or ()
        ]
        arguments: dict[str, Any] = {}
        if self.thinking is not None:
            arguments["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            arguments["reasoning_effort"] = self.output_config.effort
        schema = None if self.output_config is None else self.output_config.format
        return Conversation(
            messages=messages,
            tools=tools or None,
            tool_choice=self._choice(),
            has_parallel_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            template_arguments=arguments,
            outputs=None if schema is None else outputs_of_schema("output_config", schema.schema_),
        )

    def _choice(self) -> Literal["none", "auto", "required"] | NamedTool | None:
        match self.tool_choice:
            case None:
                return None
            case NamedToolChoice(name=name):
                return NamedTool(function=FunctionName(name=name))
            case choice:
                return "required" if choice.type == "any" else choice.type


class MessagesRequest(CountRequest, TransferFields):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Bounded(LIMITS.max_stop_strings)] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class MessagesUsage(BaseModel):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(BaseModel):
    input_tokens: int


async def count_tokens(service: Service, client: Client, body: CountRequest) -> TokenCount:
    """Return the number of tokens in a conversation."""
    service.require_model(body.model)
    return TokenCount(input_tokens=len(await body.conversation().prompt(service, client)))


def answer(service: Service, client: Client, body: MessagesRequest) -> Reply:
    """Answer a request.

    Raises:
        ApiError: the conversation or a parameter cannot be served.
    """
    model = service.require_model(body.model)
    names = ("temperature", "top_p", "top_k", "max_tokens", "kv_transfer_params")
    sampling = {name: getattr(body, name) for name in names}
    given = {name: value for name, value in sampling.items() if value is not None} | {"stop": body.stop_sequences}
    params = given_params(service.llm.get_default_sampling_params(), given)
    turn = _Answer(service, client, body.conversation(), params, model)
    chunks = turn.events() if body.stream else turn.whole()
    return Reply(
        chunks,
        EVENTS if body.stream else JSON,
        error_body=anthropic_body,
        error_event=lambda error: event(anthropic_body(error), "error"),
    )


class _Answer:
    """The response to one request."""

    def __init__(
        self, service: Service, client: Client, conversation: Conversation, params: SamplingParams, model: str
    ) -> None:
        self._turn = Turn()
        self._events = block_events(turn_deltas(service, client, conversation, params, None), self._turn)
        self._head = {"id": f"msg_{client.request_id}", "type": "message", "role": "assistant", "model": model}

    async def whole(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._events):
            async for _ in self._events:
                pass
        content = [_block(block) for block in self._turn.blocks]
        yield encode_json({**self._head, "content": content, **self._end(), "usage": self._usage()})

    async def events(self) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async with contextlib.aclosing(self._events):
            async for part in self._events:
                if not has_begun:
                    yield self._start()
                    has_begun = True
                yield _sent(_event(part))
        if not has_begun:
            yield self._start()
        yield _sent({"type": "message_delta", "delta": self._end(), "usage": self._usage()})
        yield _sent({"type": "message_stop"})

    def _start(self) -> bytes:
        usage = {**self._usage(), "output_tokens": 0}
        no_end = {"stop_reason": None, "stop_sequence": None}
        return _sent({"type": "message_start", "message": {**self._head, "content": [], **no_end, "usage": usage}})

    def _end(self) -> dict[str, Any]:
        sequence = self._turn.stop_reason if isinstance(self._turn.stop_reason, str) else None
        reason = STOP_REASONS[self._turn.finish_reason or "stop"] if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, int]:
        turn = self._turn
        return {
            "input_tokens": turn.num_prompt - turn.num_cached,
            "output_tokens": turn.num_output,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": turn.num_cached,
        }


def _sent(data: Mapping[str, Any]) -> bytes:
    return event(data, data["type"])


def _block(block: Block) -> dict[str, Any]:
    """Return a complete block in Anthropic's format."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _object(block.text)}


def _event(part: BlockEvent) -> dict[str, Any]:
    block = part.block
    match part.kind:
        case "begin":
            empty = Block(block.index, block.kind, "", block.call_id, block.name)
            return {"type": "content_block_start", "index": block.index, "content_block": _block(empty)}
        case "piece":
            names = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
            kind, name = names.get(block.kind, ("input_json_delta", "partial_json"))
            return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: part.piece}}
        case "end":
            return {"type": "content_block_stop", "index": block.index}


def _object(arguments: str) -> Any:
    """Return the arguments of a call as an object; empty if the output was cut off within them."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(content: str | TextBlocks) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _converted(message: InputMessage) -> list[dict[str, Any]]:
    """Return a message in OpenAI's format, where each tool result is a separate message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    own: dict[str, Any] = {"role": message.role}
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                own["reasoning_content"] = block.thinking
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                own.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
                results.append(result)
    if texts or len(own) > 1 or not results:
        results.append({**own, "content": "\n".join(texts)})
    return results
