"""`/v1/responses`: answers a conversation in the format of OpenAI's Responses API."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import BaseModel, Field

from moeserve.config.limits import LIMITS
from moeserve.sampling_params import SamplingParams
from moeserve.server.blocks import Block, BlockEvent, Turn, block_events
from moeserve.server.client import Client
from moeserve.server.conversation import LONG_TOOL_NAME, Conversation, FunctionName, NamedTool, TurnDelta, turn_deltas
from moeserve.server.errors import ApiError
from moeserve.server.openai.response_items import ITEMS, Item, Items, MessageItem, chat_messages, encoded_reasoning
from moeserve.server.openai.response_store import ResponseStore, StoredResponse, joined
from moeserve.server.openai.response_tools import OfferedTools, Tool, input_of_arguments
from moeserve.server.openai.stored_responses import previous, without_references
from moeserve.server.openai.truncation import shortened
from moeserve.server.output_format import outputs_of_schema, requested_outputs
from moeserve.server.reply import EVENTS, JSON, Reply, encode_json, event
from moeserve.server.schema import (
    EMPTY_IS_NULL,
    Body,
    Bounded,
    ClientFields,
    Effort,
    Ignored,
    JsonObjectFormat,
    JsonSchema,
    MaxTokens,
    Refused,
    TextFormat,
    TopP,
    TransferFields,
    given_params,
)
from moeserve.server.service import Service

TOO_LONG = "context_length_exceeded"  # code of the error for a prompt that is too long
ENCODED_REASONING = "reasoning.encrypted_content"
NOT_INCLUDED = ("message.output_text.logprobs",)  # other values are about tools that only their provider can run


class NamedChoice(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], Bounded(LIMITS.max_tools)]


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


class FlatSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextOptions(Body):
    format: Annotated[
        TextFormat | JsonObjectFormat | FlatSchemaFormat | None, Field(discriminator="type"), EMPTY_IS_NULL
    ] = None
    verbosity: Annotated[Any, Ignored("a hint for OpenAI's models")] = None


class Reasoning(Body):
    effort: Effort | None = None
    summary: Annotated[Any, Ignored("answers contain the whole reasoning")] = None
    generate_summary: Annotated[Any, Ignored("answers contain the whole reasoning")] = None


class ResponsesRequest(TransferFields, ClientFields):
    input: str | Items
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: MaxTokens = None
    temperature: float | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    tools: Annotated[list[Tool], Bounded(LIMITS.max_tools)] | None = None
    tool_choice: Annotated[ToolChoice | None, EMPTY_IS_NULL] = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: Annotated[list[str], Bounded(LIMITS.max_fields)] | None = None
    store: bool = True
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Annotated[Any, Ignored("it limits tools that only their provider can run")] = None
    client_metadata: Annotated[Any, Ignored("the client's own data")] = None
    context_management: Annotated[Any, Ignored("clients shorten their conversations themselves")] = None
    stream_options: Annotated[Any, Ignored("nothing is added to events")] = None
    background: Annotated[Any, Refused("responses are sent as they are generated")] = None
    conversation: Annotated[Any, Refused("send the items, or use `previous_response_id`")] = None
    prompt: Annotated[Any, Refused("there are no stored prompts")] = None
    top_logprobs: Annotated[Any, Refused("use chat completions for log-probabilities")] = None

    def offered_tools(self) -> OfferedTools:
        """Return the tools that the model may call."""
        tools = OfferedTools(self.tools or ())
        if not isinstance(self.tool_choice, AllowedChoice):
            return tools
        names = [(choice.get("name"), choice.get("namespace")) for choice in self.tool_choice.tools]
        return tools.only({tools.function_name(str(name), namespace) for name, namespace in names})

    def turn(self, items: list[Item], tools: OfferedTools) -> Conversation:
        """Return the conversation in the form that chat templates expect.

        Args:
            items: items of earlier responses and of the request, with references replaced by the items.
            tools: the result of `offered_tools`.

        Raises:
            ApiError: an item or the format of the answer is not supported.
        """
        messages = chat_messages(items, tools)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if all(message["role"] in ("system", "developer") for message in messages):
            messages.append({"role": "user", "content": ""})  # chat templates need a user message
        wanted = None if self.text is None else self.text.format
        effort = None if self.reasoning is None else self.reasoning.effort
        return Conversation(
            messages=messages,
            field_of_messages="input",
            tools=tools.functions,
            max_tool_name=LONG_TOOL_NAME,
            tool_choice=self._choice(tools),
            has_parallel_calls=self.parallel_tool_calls is not False,
            template_arguments={} if effort in (None, "default") else {"reasoning_effort": effort},
            outputs=outputs_of_schema("text", wanted.schema_, is_strict=wanted.strict is True)
            if isinstance(wanted, FlatSchemaFormat)
            else requested_outputs(wanted),
        )

    def _choice(self, tools: OfferedTools) -> Literal["none", "auto", "required"] | NamedTool | None:
        match self.tool_choice:
            case NamedChoice(name=name, namespace=namespace):
                return NamedTool(function=FunctionName(name=tools.function_name(name, namespace)))
            case AllowedChoice(mode=mode):
                return mode
            case choice:
                return choice


class ResponseAnswer(BaseModel):
    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


def answer(service: Service, store: ResponseStore | None, client: Client, body: ResponsesRequest) -> Reply:
    """Return the response to a request.

    Args:
        store: keeps the response if the request allows it; None: no responses are kept.

    Raises:
        ApiError: the conversation or a parameter cannot be served.
    """
    model = service.begin(body)
    for name in body.include or ():
        if name in NOT_INCLUDED:
            raise ApiError(400, f"include={name!r} is not supported here", param="include")
    sampling = {name: getattr(body, name) for name in ("temperature", "top_p", "kv_transfer_params")}
    given = {name: value for name, value in sampling.items() if value is not None}
    params = given_params(service.default_params, given | {"max_tokens": body.max_output_tokens})
    turn = _Answer(service, store, client, body, params, model)
    return Reply(turn.events(), EVENTS, error_event=turn.error_event) if body.stream else Reply(turn.whole(), JSON)


class _Answer:
    """The response to one request."""

    def __init__(
        self,
        service: Service,
        store: ResponseStore | None,
        client: Client,
        body: ResponsesRequest,
        params: SamplingParams,
        model: str,
    ) -> None:
        self._store = store if body.store else None
        self._client = client
        given: list[Item]
        given = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
        items = without_references(store, client, given)
        earlier: tuple[bytes, ...] = ()
        if body.previous_response_id is not None:
            earlier = previous(store, client, body.previous_response_id).context
        # The conversation before the response, as in `StoredResponse`.
        self._context = earlier if self._store is None else (*earlier, ITEMS.dump_json(items, exclude_none=True))
        if earlier:
            items = ITEMS.validate_json(joined(earlier)) + items
        if len(items) > LIMITS.max_messages:
            raise ApiError(
                400,
                f"the conversation has {len(items)} items; at most {LIMITS.max_messages} are allowed",
                param="input",
            )
        self._tools = body.offered_tools()
        self._encodes_reasoning = ENCODED_REASONING in (body.include or ())
        self._turn = Turn()
        self._service, self._body, self._items, self._params = service, body, items, params
        self._events = block_events(self._deltas(body.turn(items, self._tools)), self._turn)
        self._num_sent = 0
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": time.time(),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata if isinstance(body.metadata, dict) else {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": self._store is not None,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} if body.text is None else _plain(body.text.format)},
            "tool_choice": "auto" if body.tool_choice is None else _plain(body.tool_choice),
            "tools": [_plain(tool) for tool in body.tools or ()],
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
        }

    async def _deltas(self, conversation: Conversation) -> AsyncGenerator[TurnDelta, None]:
        """Answer a conversation. If it is too long and the request allows truncation, leave out its oldest items."""
        has_begun = False
        deltas = turn_deltas(self._service, self._client, conversation, self._params, None)
        try:
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    has_begun = True
                    yield delta
            return
        except ApiError as error:
            if has_begun or self._body.truncation != "auto" or error.code != TOO_LONG:
                raise
            items = await shortened(self._items, self._num_tokens, self._max_prompt())
            if items is None:
                raise
        conversation = self._body.turn(items, self._tools)
        deltas = turn_deltas(self._service, self._client, conversation, self._params, None)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def _num_tokens(self, items: list[Item]) -> int:
        """Return the number of prompt tokens; more than the maximum context if the text is too long to be tokenized."""
        try:
            return len(await self._body.turn(items, self._tools).prompt(self._service, self._client))
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            return self._service.max_model_len + 1

    def _max_prompt(self) -> int:
        """Return the maximum number of tokens of a shortened prompt, which leaves room for the answer."""
        most = self._service.max_model_len
        room = most // 4 if self._body.max_output_tokens is None else min(most // 4, self._body.max_output_tokens)
        return most - max(room, 1)

    async def whole(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._events):
            async for _ in self._events:
                pass
        yield self._stored_response()

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
        yield self._sent(f"response.{self._status}", response=msgspec.Raw(self._stored_response()))

    def error_event(self, error: ApiError) -> bytes:
        """Return the events that end the stream with an error."""
        code = error.code or error.type
        failed = {
            **self._head,
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "incomplete_details": None,
            "output": [self._item(block, block is self._turn.blocks[-1]) for block in self._turn.blocks],
            "usage": None,
        }
        sent = self._sent("response.failed", response=failed)
        return sent + self._sent("error", code=code, message=error.message, param=error.param)

    def _begin(self) -> bytes:
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return b"".join(self._sent(f"response.{kind}", response=begun) for kind in ("created", "in_progress"))

    def _is_cut(self, block: Block) -> bool:
        return self._turn.finish_reason in ("length", "abort") and block is self._turn.blocks[-1]

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._turn.finish_reason in ("length", "abort") else "completed"

    def _stored_response(self) -> bytes:
        """Return the complete response as JSON. Store the response if the request allows it."""
        output = [self._item(block, self._is_cut(block)) for block in self._turn.blocks]
        response = encode_json(
            {
                **self._head,
                "status": self._status,
                "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
                "output": output,
                "usage": {
                    "input_tokens": self._turn.num_prompt,
                    "input_tokens_details": {
                        "cached_tokens": self._turn.num_cached,
                        "cache_write_tokens": self._service.num_written(self._turn.num_prompt, self._turn.num_cached),
                    },
                    "output_tokens": self._turn.num_output,
                    "output_tokens_details": {"reasoning_tokens": self._turn.num_reasoning},
                    "total_tokens": self._turn.num_prompt + self._turn.num_output,
                },
            }
        )
        if self._store is not None:
            items = {item["id"]: encode_json(item) for item in output}
            context = (*self._context, b"[" + b",".join(items.values()) + b"]")
            self._store.add(self._client.name, str(self._head["id"]), StoredResponse(response, context, items))
        return response

    def _event(self, part: BlockEvent) -> bytes:
        block = part.block
        if part.kind == "begin":
            empty = Block(block.index, block.kind, "", block.call_id, block.name, block.id)
            item = {**self._item(empty, False), "status": "in_progress"}
            if block.kind != "call":
                item["content"] = []
            sent = self._sent("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                sent += self._sent("response.content_part.added", **_place(block), part=_content(empty))
            return sent
        if self._is_custom(block):  # a custom tool's input is known only when its arguments are complete
            sent = b"" if part.kind == "piece" else self._custom_input(block)
        elif part.kind == "piece":
            return self._sent(f"response.{_kind(block)}.delta", **_place(block), delta=part.piece, **_logprobs(block))
        elif block.kind == "call":
            done = {"name": block.name, "arguments": block.text}
            sent = self._sent(f"response.{_kind(block)}.done", **_place(block), **done)
        else:
            sent = self._sent(f"response.{_kind(block)}.done", **_place(block), text=block.text, **_logprobs(block))
            sent += self._sent("response.content_part.done", **_place(block), part=_content(block))
        if part.kind == "end":
            item = self._item(block, self._is_cut(block))
            sent += self._sent("response.output_item.done", output_index=block.index, item=item)
        return sent

    def _custom_input(self, block: Block) -> bytes:
        """Return the events with the input of a custom tool."""
        text = input_of_arguments(block.text)
        name = "response.custom_tool_call_input"
        sent = self._sent(f"{name}.delta", **_place(block), delta=text)
        return sent + self._sent(f"{name}.done", **_place(block), input=text)

    def _is_custom(self, block: Block) -> bool:
        tool = self._tools.find(block.name) if block.kind == "call" else None
        return tool is not None and tool.is_custom

    def _item(self, block: Block, is_cut: bool) -> dict[str, Any]:
        """Return a block as an output item."""
        head = {"id": _item_id(block), "status": "incomplete" if is_cut else "completed"}
        if block.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": [_content(block)]}
        if block.kind == "reasoning":
            encoded = {"encrypted_content": encoded_reasoning(block.text)} if self._encodes_reasoning else {}
            return {**head, "type": "reasoning", "summary": [], "content": [_content(block)], **encoded}
        tool = self._tools.find(block.name)
        name = block.name if tool is None else tool.name
        call = {**head, "call_id": block.call_id, "name": name}
        if tool is not None and tool.namespace is not None:
            call["namespace"] = tool.namespace
        if tool is not None and tool.is_custom:
            return {**call, "type": "custom_tool_call", "input": input_of_arguments(block.text)}
        return {**call, "type": "function_call", "arguments": block.text}

    def _sent(self, kind: str, **data: Any) -> bytes:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)


def _item_id(block: Block) -> str:
    return {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind] + block.id


def _place(block: Block) -> dict[str, Any]:
    """Return the fields of an event that name the item, and the part of the item, to which the event belongs."""
    place = {"item_id": _item_id(block), "output_index": block.index}
    return place if block.kind == "call" else {**place, "content_index": 0}


def _kind(block: Block) -> str:
    return {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[block.kind]


def _logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _plain(part: str | Body | None) -> Any:
    return part.model_dump(by_alias=True, exclude_none=True) if isinstance(part, Body) else part
