"""`/v1/responses`: answers a conversation in the format of OpenAI's Responses API. Nothing is stored."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from moeserve.config.settings import LIMITS
from moeserve.sampling_params import SamplingParams
from moeserve.server.blocks import Block, BlockEvent, Turn, block_events
from moeserve.server.client import Client
from moeserve.server.conversation import Conversation, Function, FunctionName, FunctionTool, NamedTool, turn_deltas
from moeserve.server.errors import ApiError
from moeserve.server.output_format import outputs_of_schema, requested_outputs
from moeserve.server.reply import EVENTS, JSON, Reply, encode_json, event
from moeserve.server.schema import (
    Body,
    Bounded,
    JsonObjectFormat,
    JsonSchema,
    Metadata,
    TextFormat,
    TransferFields,
    given_params,
)
from moeserve.server.service import Service

# Accepted because responses contain it anyway: reasoning is plain text, and may be sent back in the next request.
INCLUDED = ("reasoning.encrypted_content",)


class InputText(Body):
    model_config = ConfigDict(extra="ignore", strict=True)  # clients send output texts back with annotations

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


InputTexts: TypeAlias = Annotated[list[InputText], Bounded(LIMITS.max_parts)]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | InputTexts
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | InputTexts
    id: str | None = None
    status: str | None = None


class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[InputTexts, Field(default_factory=list)]
    content: InputTexts | None = None
    encrypted_content: None = None
    status: str | None = None


def _item_type(item: Any) -> Any:
    """Return the type of an item. Messages may omit it."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class FlatTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatToolChoice(Body):
    type: Literal["function"]
    name: str


class FlatSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextOptions(Body):
    format: Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(TransferFields):
    model: str | None = None
    input: (
        str
        | Annotated[
            list[Item],
            Bounded(LIMITS.max_messages, min_length=1),
        ]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: Annotated[list[FlatTool], Bounded(LIMITS.max_tools)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: Annotated[list[str], Bounded(LIMITS.max_fields)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    store: bool | None = None  # accepted, although nothing is stored
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default"] | None = None

    def conversation(self) -> Conversation:
        """Return the conversation in the form that chat templates expect."""
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = _messages(items)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        tools = [FunctionTool(function=Function(**tool.model_dump(exclude={"type"}))) for tool in self.tools or ()]
        wanted = None if self.text is None else self.text.format
        effort = None if self.reasoning is None else self.reasoning.effort
        return Conversation(
            messages=messages,
            field_of_messages="input",
            tools=tools or None,
            tool_choice=self._choice(),
            has_parallel_calls=self.parallel_tool_calls is not False,
            template_arguments={} if effort is None else {"reasoning_effort": effort},
            outputs=outputs_of_schema("text", wanted.schema_)
            if isinstance(wanted, FlatSchemaFormat)
            else requested_outputs(wanted),
        )

    def _choice(self) -> Literal["none", "auto", "required"] | NamedTool | None:
        if isinstance(self.tool_choice, FlatToolChoice):
            return NamedTool(function=FunctionName(name=self.tool_choice.name))
        return self.tool_choice


class ResponseAnswer(BaseModel):
    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


def answer(service: Service, client: Client, body: ResponsesRequest) -> Reply:
    """Answer a request.

    Raises:
        ApiError: the conversation or a parameter cannot be served.
    """
    model = service.require_model(body.model)
    for name in body.include or ():
        if name not in INCLUDED:
            raise ApiError(400, f"include={name[:100]!r} is not supported here", param="include")
    sampling = {name: getattr(body, name) for name in ("temperature", "top_p", "kv_transfer_params")}
    given = {name: value for name, value in sampling.items() if value is not None}
    params = given_params(service.llm.get_default_sampling_params(), given | {"max_tokens": body.max_output_tokens})
    turn = _Answer(service, client, body, params, model)
    return Reply(turn.events(), EVENTS, error_event=turn.error_event) if body.stream else Reply(turn.whole(), JSON)


class _Answer:
    """The response to one request."""

    def __init__(
        self, service: Service, client: Client, body: ResponsesRequest, params: SamplingParams, model: str
    ) -> None:
        self._turn = Turn()
        self._events = block_events(turn_deltas(service, client, body.conversation(), params, None), self._turn)
        self._num_sent = 0
        self._head = {
            "id": f"resp_{client.request_id}",
            "object": "response",
            "created_at": time.time(),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} if body.text is None else _plain(body.text.format)},
            "tool_choice": "auto" if body.tool_choice is None else _plain(body.tool_choice),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    async def whole(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._events):
            async for _ in self._events:
                pass
        yield encode_json(self._response())

    async def events(self) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async with contextlib.aclosing(self._events):
            async for part in self._events:
                if not has_begun:
                    yield self._begin()
                    has_begun = True
                yield self._event(part)
        if not has_begun:
            yield self._begin()
        response = self._response()
        yield self._sent(f"response.{response['status']}", response=response)

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends the stream with an error."""
        return self._sent("error", code=error.code or error.type, message=error.message, param=error.param)

    def _begin(self) -> bytes:
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return b"".join(self._sent(f"response.{kind}", response=begun) for kind in ("created", "in_progress"))

    def _is_cut(self, block: Block) -> bool:
        return self._turn.finish_reason == "length" and block is self._turn.blocks[-1]

    def _response(self) -> dict[str, Any]:
        is_cut = self._turn.finish_reason == "length"
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [_item(block, self._is_cut(block)) for block in self._turn.blocks],
            "usage": {
                "input_tokens": self._turn.num_prompt,
                "input_tokens_details": {"cached_tokens": self._turn.num_cached},
                "output_tokens": self._turn.num_output,
                "output_tokens_details": {"reasoning_tokens": self._turn.num_reasoning},
                "total_tokens": self._turn.num_prompt + self._turn.num_output,
            },
        }

    def _event(self, part: BlockEvent) -> bytes:
        block = part.block
        place = {"item_id": _item_id(block), "output_index": block.index}
        in_part = place if block.kind == "call" else {**place, "content_index": 0}
        name = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[block.kind]
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        match part.kind:
            case "begin":
                empty = Block(block.index, block.kind, "", block.call_id, block.name, block.id)
                item = {**_item(empty, False), "status": "in_progress"} | (
                    {} if block.kind == "call" else {"content": []}
                )
                sent = self._sent("response.output_item.added", output_index=block.index, item=item)
                if block.kind != "call":
                    sent += self._sent("response.content_part.added", **in_part, part=_content(empty))
                return sent
            case "piece":
                return self._sent(f"response.{name}.delta", **in_part, delta=part.piece, **logprobs)
            case "end":
                if block.kind == "call":
                    sent = self._sent(f"response.{name}.done", **in_part, name=block.name, arguments=block.text)
                else:
                    sent = self._sent(f"response.{name}.done", **in_part, text=block.text, **logprobs)
                    sent += self._sent("response.content_part.done", **in_part, part=_content(block))
                item = _item(block, self._is_cut(block))
                return sent + self._sent("response.output_item.done", output_index=block.index, item=item)

    def _sent(self, kind: str, **data: Any) -> bytes:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)


def _item_id(block: Block) -> str:
    return {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind] + block.id


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block, is_cut: bool) -> dict[str, Any]:
    """Return a block as an output item."""
    head = {"id": _item_id(block), "status": "incomplete" if is_cut else "completed"}
    match block.kind:
        case "text":
            return {**head, "type": "message", "role": "assistant", "content": [_content(block)]}
        case "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": [_content(block)]}
        case "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**head, "type": "function_call", **call}


def _plain(part: str | Body | None) -> Any:
    return part.model_dump(by_alias=True, exclude_none=True) if isinstance(part, Body) else part


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return items as chat messages, in which reasoning and calls are parts of one assistant message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem():
                if item.role == "assistant":
                    _assistant(messages, "content")["content"] = _text(item.content)
                else:
                    messages.append({"role": item.role, "content": _text(item.content)})
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                output = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                messages.append(output)
            case ReasoningItem():
                _assistant(messages, "content")["reasoning_content"] = _text(item.content or item.summary)
    return messages


def _assistant(messages: list[dict[str, Any]], unless: str | None = None) -> dict[str, Any]:
    """Return the last message if it is the assistant's and lacks the field `unless`, else a new one, appended."""
    if not messages or messages[-1]["role"] != "assistant" or (unless is not None and unless in messages[-1]):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
