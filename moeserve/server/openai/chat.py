"""`/v1/chat/completions`: answers a conversation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moeserve.config.limits import LIMITS
from moeserve.outputs import CompletionOutput, Logprob
from moeserve.sampling_params import SamplingParams
from moeserve.server.client import Client
from moeserve.server.content import ANY_CONTENT, TEXT_TYPES, HistoryText, found_text, omitted
from moeserve.server.conversation import (
    Conversation,
    Function,
    FunctionName,
    FunctionTool,
    NamedTool,
    TurnDelta,
    turn_deltas,
)
from moeserve.server.errors import ApiError
from moeserve.server.openai.chat_tools import ToolChoice, Tools, mode_of, offered_tools
from moeserve.server.output_format import requested_outputs
from moeserve.server.reply import EVENTS, JSON, Reply, encode_json, event
from moeserve.server.schema import (
    EMPTY_IS_NULL,
    Body,
    Bounded,
    Effort,
    Ignored,
    MaxTokens,
    Refused,
    SamplingFields,
    StreamOptions,
    Usage,
    finite,
    usage,
)
from moeserve.server.service import Service

REASONING_TYPES = ("thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text")


class Part(Body):
    """A part of a message. `_content` refuses parts that are not text, or replaces them by their type."""

    type: str
    text: HistoryText | None = None
    refusal: HistoryText | None = None
    thinking: Any = None  # of parts of the types `thinking` and `reasoning`: a text, or parts
    reasoning: Any = None
    id: HistoryText | None = None  # id, name and input: of parts of the type `tool_use`
    name: HistoryText = ""
    input: Any = None

    @property
    def thought(self) -> str:
        """The text of a part of the type thinking or reasoning."""
        return found_text(self.thinking) or found_text(self.reasoning) or self.text or ""


class CalledFunction(Body):
    name: HistoryText = ""
    arguments: Any = ""  # JSON text, which may be cut off, or an object


class CustomCall(Body):
    name: HistoryText = ""
    input: HistoryText = ""


class ToolCall(Body):
    id: HistoryText | None = None
    type: str = "function"
    function: CalledFunction | None = None
    custom: CustomCall | None = None


class Message(Body):
    """A message of the conversation. Additional fields, such as reasoning_content, are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str | Annotated[list[Part], Bounded(LIMITS.max_parts)] | None, ANY_CONTENT] = None
    tool_calls: Annotated[list[ToolCall], Bounded(LIMITS.max_parts)] | None = None
    tool_call_id: HistoryText | None = None
    name: str | None = None
    function_call: CalledFunction | None = None  # the older form of tool_calls
    refusal: str | None = None
    prefix: bool | None = None  # in the last message: the answer continues it, as in Mistral's and DeepSeek's APIs
    annotations: Annotated[Any, Ignored("a part of answers")] = None
    audio: Annotated[Any, Ignored("a part of answers; their text is in `content`")] = None
    parsed: Annotated[Any, Ignored("a part of answers")] = None
    cache_control: Annotated[Any, Ignored("prefixes are always cached")] = None


class Thinking(Body):
    type: str | None = None  # "enabled", "disabled", or another name for the template's default


class ChatRequest(SamplingFields):
    messages: Annotated[list[Message], Bounded(LIMITS.max_messages, min_length=1)]
    max_completion_tokens: MaxTokens = None
    max_tokens: MaxTokens = None  # the older name of max_completion_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LIMITS.max_logprobs)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Tools | None = None
    tool_choice: Annotated[ToolChoice | None, EMPTY_IS_NULL] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Bounded(LIMITS.max_tools)] | None = None  # the older name of tools
    function_call: Literal["none", "auto"] | FunctionName | None = None  # the older name of tool_choice
    modalities: Annotated[Any, Refused("answers are texts", harmless=(["text"],))] = None
    audio: Annotated[Any, Refused("answers are texts")] = None
    web_search_options: Annotated[Any, Refused("the server runs no tools")] = None
    prediction: Annotated[Any, Ignored("a hint")] = None
    verbosity: Annotated[Any, Ignored("a hint; say it in the instructions")] = None
    # vLLM's fields.
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    enable_thinking: bool | None = None  # for chat_template_kwargs, as in other providers' APIs
    thinking: Thinking | None = None  # the same, as in the APIs of DeepSeek, GLM and Kimi
    documents: Annotated[Any, Refused("write their texts into messages")] = None
    echo: Annotated[Any, Refused("answers do not repeat the prompt")] = None
    add_special_tokens: Annotated[Any, Refused("the chat template adds them")] = None
    prompt_logprobs: Annotated[Any, Refused("use `/v1/completions`")] = None
    mm_processor_kwargs: Annotated[Any, Refused("the model reads texts only")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    reasoning_effort: Effort | None = None

    @property
    def has_functions(self) -> bool:
        """True if the request uses the older fields for functions, so that the answer does too."""
        return self.functions is not None and self.tools is None

    @property
    def continues_last(self) -> bool:
        """True if the answer continues the last message."""
        return self.continue_final_message or (self.messages[-1].role == "assistant" and bool(self.messages[-1].prefix))

    def offered_tools(self) -> dict[str, FunctionTool]:
        if not self.has_functions:
            return offered_tools(self.tools or (), self.tool_choice)
        return {f"functions.{place}": FunctionTool(function=each) for place, each in enumerate(self.functions or ())}

    def choice(self) -> Literal["none", "auto", "required"] | NamedTool | None:
        if not self.has_functions:
            return mode_of(self.tool_choice)
        if isinstance(self.function_call, FunctionName):
            return NamedTool(function=self.function_call)
        return self.function_call


class ChatChoice(BaseModel):
    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call", "abort"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    weight_versions: list[tuple[str, int, int]] | None = None
    routed_experts: str | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


async def answer(service: Service, client: Client, body: ChatRequest) -> Reply:
    """Return the response to a request.

    Raises:
        ApiError: the conversation or a parameter cannot be served.
    """
    model = service.begin(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    most_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling_params(
        service.default_params,
        max_tokens=most_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    template_arguments = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        template_arguments.setdefault("enable_thinking", body.enable_thinking)
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        template_arguments.setdefault("enable_thinking", body.thinking.type == "enabled")
    if body.reasoning_effort not in (None, "default"):
        template_arguments.setdefault("reasoning_effort", body.reasoning_effort)
    conversation = Conversation(
        messages=template_input(body.messages),
        tools=body.offered_tools(),
        tool_choice=body.choice(),
        has_parallel_calls=body.parallel_tool_calls is not False and not body.has_functions,
        template_arguments=template_arguments,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continues_last,
        chat_template=service.allowed_template(body.chat_template),
        with_reasoning=body.include_reasoning,
        outputs=requested_outputs(body.response_format, body.structure),
    )
    turn = _Answer(service, client, conversation, params, body, model)
    return Reply(turn.events(), EVENTS) if body.stream else Reply(turn.whole(), JSON)


def template_input(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template, with contents as texts, and all tool calls as calls of functions.

    Raises:
        ApiError: a message has a part that the model cannot read.
    """
    converted: list[dict[str, Any]] = []
    last_id = None  # id of the last call in the older form, whose result does not name it
    for place, message in enumerate(messages):
        fields = message.model_dump(exclude_none=True, exclude={"content", "tool_calls", "function_call", "prefix"})
        fields["content"] = _content(f"messages.{place}.content", message)
        calls = [_call(call) for call in message.tool_calls or ()]
        if message.function_call is not None and not calls:
            last_id = f"call_{place}"
            calls = [_call(ToolCall(id=last_id, function=message.function_call))]
        if message.role == "assistant" and isinstance(message.content, list):
            if thoughts := [part.thought for part in message.content if part.type in REASONING_TYPES and part.thought]:
                fields.setdefault("reasoning_content", "\n".join(thoughts))
            calls = calls or [
                _call(ToolCall(id=part.id, function=CalledFunction(name=part.name, arguments=part.input or {})))
                for part in message.content
                if part.type == "tool_use"
            ]
        if message.role == "function":
            fields |= {"role": "tool"} | ({} if last_id is None else {"tool_call_id": last_id})
        if fields["content"] is None and not calls:
            fields["content"] = message.refusal or ""
        converted.append({**fields, "tool_calls": calls} if calls else fields)
    return converted


def _call(call: ToolCall) -> dict[str, Any]:
    if call.function is not None:
        function = {"name": call.function.name, "arguments": call.function.arguments}
    elif call.custom is not None:
        function = {"name": call.custom.name, "arguments": {"input": call.custom.input}}
    else:
        function = {"name": call.type, "arguments": {}}
    return ({} if call.id is None else {"id": call.id}) | {"type": "function", "function": function}


def _content(name: str, message: Message) -> str | None:
    """Return the content of a message as text.

    In messages of the user or system, parts that are not text are refused. In the assistant's and tools' messages, they
    are replaced by their type, because the client cannot change its history. The assistant's reasoning and tool calls
    are left out.
    """
    if message.content is None or isinstance(message.content, str):
        return message.content
    texts = []
    for place, part in enumerate(message.content):
        if message.role == "assistant" and part.type in (*REASONING_TYPES, "tool_use"):
            continue
        text = part.refusal if part.text is None else part.text
        is_written = message.role not in ("assistant", "tool", "function")
        if text is None and part.type in TEXT_TYPES:
            if is_written:
                raise ApiError(400, f"{name}.{place}.text: a part of type {part.type!r} needs a text", param="messages")
            text = ""
        if text is None and is_written:
            raise ApiError(
                400,
                f"{name}.{place}.{part.type[:100]} is not supported here: the model reads texts only",
                param="messages",
                code="unsupported_parameter",
            )
        texts.append(omitted(part.type) if text is None else text)
    return "\n".join(texts)


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
        self._prompt_token_ids: list[int] = []
        self._num_cached = self._num_output = 0

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
                if "token_ids" in finish:
                    finish["token_ids"] = choice.get("token_ids", []) + finish["token_ids"]
                choice |= finish
        for choice in choices.values():
            if choice["message"]["content"] is None and not choice["message"].keys() & {"tool_calls", "function_call"}:
                choice["message"]["content"] = ""
        ordered = [choices[index] for index in sorted(choices)]
        head = {**self._head, "object": "chat.completion", "choices": ordered, "usage": self._usage()}
        yield encode_json(head | self._prompt())

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options or StreamOptions()
        head = {**self._head, "object": "chat.completion.chunk"}
        begun: set[int] = set()
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, delta, finish, logprobs in pieces:
                prompt = {} if begun else self._prompt()
                if index not in begun:
                    begun.add(index)
                    delta = {"role": "assistant", "content": ""} | delta
                elif not delta and finish["finish_reason"] is None and logprobs is None and "token_ids" not in finish:
                    continue
                so_far = {"usage": self._usage()} if options.continuous_usage_stats else {}
                choice = {"index": index, "delta": delta, "logprobs": logprobs, **finish}
                yield event({**head, "choices": [choice]} | so_far | prompt)
        if options.include_usage:
            yield event({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _pieces(self) -> AsyncGenerator[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any] | None], None]:
        """Yield new parts of choices: index, part of the message, other fields of the choice, and log-probabilities."""
        async with contextlib.aclosing(self._deltas):
            async for delta in self._deltas:
                self._prompt_token_ids, self._num_cached = delta.prompt_token_ids, delta.num_cached
                self._num_output += len(delta.output.token_ids)
                part, reason = _message_part(delta), delta.finish_reason
                if self._body.has_functions:
                    part = _with_function_call(part)
                    reason = "function_call" if reason == "tool_calls" else reason
                finish: dict[str, Any] = {"finish_reason": reason, "stop_reason": delta.output.stop_reason}
                if self._body.return_token_ids:
                    finish["token_ids"] = delta.output.token_ids
                finish |= self._service.end_fields(delta.output)
                yield delta.output.index, part, finish, self._logprobs(delta.output)

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
        """Return one token with its log-probability and its bytes, which may be an incomplete character."""
        codec = self._service.llm.codec
        is_text = logprob.decoded_token is not None and not self._body.return_tokens_as_token_ids
        token = logprob.decoded_token if is_text else f"token_id:{token_id}"
        content = None if codec is None else list(codec.token_bytes(token_id))
        return {"token": token, "logprob": finite(logprob.logprob), "bytes": content}

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_token_ids} if self._body.return_token_ids else {}

    def _usage(self) -> dict[str, Any]:
        num_prompt = len(self._prompt_token_ids)
        num_written = self._service.num_written(num_prompt, self._num_cached)
        return usage(num_prompt, self._num_cached, num_written, self._num_output)


def _message_part(delta: TurnDelta) -> dict[str, Any]:
    part: dict[str, Any] = {}
    if delta.content:
        part["content"] = delta.content
    if delta.reasoning:
        part["reasoning_content"] = part["reasoning"] = delta.reasoning  # the names that DeepSeek and vLLM use
    if delta.tool_calls:
        part["tool_calls"] = [
            {"index": call.index}
            | ({} if call.id is None else {"id": call.id, "type": "function"})
            | {"function": ({} if call.name is None else {"name": call.name}) | {"arguments": call.arguments}}
            for call in delta.tool_calls
        ]
    return part


def _with_function_call(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a message with its only call in the older form."""
    calls = [call["function"] for call in part.get("tool_calls", [])]
    others = {name: value for name, value in part.items() if name != "tool_calls"}
    return others | ({"function_call": calls[0]} if calls else {})


def _extend(message: dict[str, Any], part: dict[str, Any]) -> None:
    """Append a new part to a message."""
    for name in ("content", "reasoning_content", "reasoning"):
        if name in part:
            message[name] = (message.get(name) or "") + part[name]
    if "function_call" in part:
        call = message.setdefault("function_call", {"arguments": ""})
        call |= part["function_call"] | {"arguments": call["arguments"] + part["function_call"]["arguments"]}
    for call in part.get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": "function", "function": call["function"]})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
