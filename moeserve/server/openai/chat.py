"""`/v1/chat/completions`: answers a conversation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moeserve.config.settings import LIMITS
from moeserve.outputs import CompletionOutput, Logprob
from moeserve.sampling_params import SamplingParams
from moeserve.server.client import Client
from moeserve.server.conversation import Conversation, FunctionTool, NamedTool, TurnDelta, turn_deltas
from moeserve.server.errors import ApiError
from moeserve.server.output_format import requested_outputs
from moeserve.server.reply import EVENTS, JSON, Reply, encode_json, event
from moeserve.server.schema import Body, Bounded, SamplingFields, StreamOptions, Usage, usage
from moeserve.server.service import Service


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str  # JSON


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A message of the conversation. Further fields, such as reasoning_content, are passed to the template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[TextPart], Bounded(LIMITS.max_parts)] | None = None
    tool_calls: Annotated[list[ToolCall], Bounded(LIMITS.max_parts)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatRequest(SamplingFields):
    messages: Annotated[list[Message], Bounded(LIMITS.max_messages, min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # the older name of max_completion_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LIMITS.max_logprobs)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[FunctionTool], Bounded(LIMITS.max_tools)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Bounded(LIMITS.max_fields)] | None = None
    # As in vLLM.
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ChatChoice(BaseModel):
    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


async def answer(service: Service, client: Client, body: ChatRequest) -> Reply:
    """Answer a request.

    Raises:
        ApiError: the conversation or a parameter cannot be served.
    """
    model = service.begin(body)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    most_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling_params(
        service.llm.get_default_sampling_params(),
        max_tokens=most_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    template_arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template_arguments.setdefault("reasoning_effort", body.reasoning_effort)
    conversation = Conversation(
        messages=[message.model_dump(exclude_none=True) for message in body.messages],
        tools=body.tools,
        tool_choice=body.tool_choice,
        has_parallel_calls=body.parallel_tool_calls is not False,
        template_arguments=template_arguments,
        add_generation_prompt=body.add_generation_prompt,
        with_reasoning=body.include_reasoning,
        outputs=requested_outputs(body.response_format, body.structured_outputs),
    )
    turn = _Answer(service, client, conversation, params, body, model)
    return Reply(turn.events(), EVENTS) if body.stream else Reply(turn.whole(), JSON)


class _Answer:
    """The response to one request."""

    def __init__(
        self,
        service: Service,
        client: Client,
        conversation: Conversation,
        params: SamplingParams,
        body: ChatRequest,
        model: str,
    ) -> None:
        self._service, self._body = service, body
        self._head = {"id": f"chatcmpl-{client.request_id}", "created": int(time.time()), "model": model}
        self._deltas = turn_deltas(service, client, conversation, params, body.cache_salt)
        self._num_prompt = self._num_cached = self._num_output = 0

    async def whole(self) -> AsyncGenerator[bytes, None]:
        choices: dict[int, dict[str, Any]] = {}
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, delta, finish, logprobs in pieces:
                choice = choices.setdefault(
                    index,
                    {"index": index, "message": {"role": "assistant", "content": None}, "logprobs": None},
                )
                _extend(choice["message"], delta)
                if logprobs is not None:
                    choice["logprobs"] = choice["logprobs"] or {"content": []}
                    choice["logprobs"]["content"] += logprobs["content"]
                choice |= finish
        for choice in choices.values():
            if choice["message"]["content"] is None and "tool_calls" not in choice["message"]:
                choice["message"]["content"] = ""
        ordered = [choices[index] for index in sorted(choices)]
        yield encode_json({**self._head, "object": "chat.completion", "choices": ordered, "usage": self._usage()})

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options or StreamOptions()
        head = {**self._head, "object": "chat.completion.chunk"}
        begun: set[int] = set()
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, delta, finish, logprobs in pieces:
                if index not in begun:
                    begun.add(index)
                    delta = {"role": "assistant", "content": ""} | delta
                elif not delta and finish["finish_reason"] is None and logprobs is None:
                    continue
                so_far = {"usage": self._usage()} if options.continuous_usage_stats else {}
                choice = {"index": index, "delta": delta, "logprobs": logprobs, **finish}
                yield event({**head, "choices": [choice]} | so_far)
        if options.include_usage:
            yield event({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _pieces(self) -> AsyncGenerator[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any] | None], None]:
        """Yield new parts of choices: the index, a part of the message, finish reasons, and log-probabilities."""
        async with contextlib.aclosing(self._deltas):
            async for delta in self._deltas:
                self._num_prompt, self._num_cached = delta.num_prompt, delta.num_cached
                self._num_output += len(delta.output.token_ids)
                finish = {"finish_reason": delta.finish_reason, "stop_reason": delta.output.stop_reason}
                yield delta.output.index, _message_part(delta), finish, self._logprobs(delta.output)

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        content = []
        for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
            likely = sorted(position.items(), key=lambda item: item[1].rank)[: self._body.top_logprobs or 0]
            content.append(
                self._token_logprob(token_id, position[token_id])
                | {"top_logprobs": [self._token_logprob(other, logprob) for other, logprob in likely]}
            )
        return {"content": content}

    def _token_logprob(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        """Return one token with its log-probability. Its bytes are known only if the vocabulary is byte-level."""
        codec = self._service.llm.codec
        token = f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token
        content = list(codec.token_bytes(token_id)) if codec is not None and codec.is_byte_level else None
        return {"token": token, "logprob": logprob.logprob, "bytes": content}

    def _usage(self) -> dict[str, Any]:
        return usage(self._num_prompt, self._num_cached, self._num_output)


def _message_part(delta: TurnDelta) -> dict[str, Any]:
    part: dict[str, Any] = {}
    if delta.content:
        part["content"] = delta.content
    if delta.reasoning:
        part["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        part["tool_calls"] = [
            {"index": call.index}
            | ({} if call.id is None else {"id": call.id, "type": "function"})
            | {"function": ({} if call.name is None else {"name": call.name}) | {"arguments": call.arguments}}
            for call in delta.tool_calls
        ]
    return part


def _extend(message: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part to a message."""
    for name in ("content", "reasoning_content"):
        if name in part:
            message[name] = (message.get(name) or "") + part[name]
    for call in part.get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": "function", "function": call["function"]})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
