"""`/v1/messages`: answers a conversation in Anthropic's format."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from moeserve import nested_json
from moeserve.config.limits import LIMITS
from moeserve.sampling_params import SamplingParams
from moeserve.server.blocks import Block, BlockEvent, Turn, block_events
from moeserve.server.client import Client
from moeserve.server.content import ANY_CONTENT, HistoryText, found_text, omitted
from moeserve.server.conversation import (
    LONG_TOOL_NAME,
    Conversation,
    Function,
    FunctionName,
    FunctionTool,
    NamedTool,
    turn_deltas,
    with_object,
)
from moeserve.server.errors import ApiError, anthropic_body
from moeserve.server.output_format import outputs_of_schema
from moeserve.server.reply import EVENTS, JSON, Reply, encode_json, event
from moeserve.server.schema import (
    EMPTY_IS_NULL,
    Body,
    Bounded,
    Effort,
    Ignored,
    Refused,
    RequestBody,
    Stops,
    TopP,
    TransferFields,
    given_params,
)
from moeserve.server.service import Service

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "max_tokens", "tool_calls": "tool_use"}


BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")  # a line that differs between requests
SIGNATURE = "moeserve"  # of all reasoning, because clients do not send back reasoning without a signature
UNSEEN_TYPES = ("image", "document")  # types of blocks that a user expects the model to read


class Part(Body):
    """A part of a request that may be marked as the end of a cached prefix. Marks only change how usage is reported."""

    cache_control: Any = None


class TextBlock(Part):
    type: Literal["text"]
    text: HistoryText | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: HistoryText = ""


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: HistoryText
    name: HistoryText = ""
    input: Any = Field(default_factory=dict)


class OtherBlock(Part):
    """A block of a provider's tool, or of an unknown type. It becomes text, or is left out."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def text(self) -> str:
        fields = self.model_extra or {}
        source = fields.get("source")
        if isinstance(source, dict):  # a document
            return found_text(source.get("data") if source.get("type") == "text" else source.get("content"))
        return found_text(fields.get("content"))


BLOCK_TAGS = {
    "text": "TextBlock",
    "thinking": "ThinkingBlock",
    "tool_use": "ToolUseBlock",
    "tool_result": "ToolResultBlock",
}


def _type_in(*types: str) -> Callable[[Any], str]:
    """Return a function that returns a block's tag: the tag of its type, or "OtherBlock" if `types` lacks the type."""

    def block_type(block: Any) -> str:
        found = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        return BLOCK_TAGS[found] if found in types else "OtherBlock"

    return block_type


Other = Annotated[OtherBlock, Tag("OtherBlock")]
Text = Annotated[TextBlock, Tag("TextBlock")]
ResultBlock = Annotated[Text | Other, Discriminator(_type_in("text"))]


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: HistoryText
    content: Annotated[str | Annotated[list[ResultBlock], Bounded(LIMITS.max_parts)], ANY_CONTENT] = ""


InputBlock = Annotated[
    Text
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")]
    | Other,
    Discriminator(_type_in(*BLOCK_TAGS)),
]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Annotated[list[InputBlock], Bounded(LIMITS.max_parts)] | None, ANY_CONTENT] = None


class CustomTool(Part):
    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: Annotated[Any, Ignored("arguments are always streamed")] = None
    defer_loading: Annotated[Any, Ignored("all tools are in the prompt")] = None
    input_examples: Annotated[Any, Ignored("a hint")] = None
    allowed_callers: Annotated[Any, Ignored("only the model calls tools")] = None

    @model_validator(mode="before")
    @classmethod
    def _object(cls, fields: Any) -> Any:
        return with_object(fields, "input_schema")


class ProviderTool(Part):
    """A tool that only the provider of the API can run. The model does not see it."""

    type: str


def _tool_type(tool: Any) -> str:
    found = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "CustomTool" if found in (None, "custom") else "ProviderTool"


Tool = Annotated[
    Annotated[CustomTool, Tag("CustomTool")] | Annotated[ProviderTool, Tag("ProviderTool")], Discriminator(_tool_type)
]


class AnyToolChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Any, Ignored("`max_tokens` limits reasoning and answer together")] = None
    display: Annotated[Any, Ignored("answers contain the whole reasoning")] = None


class OutputSchema(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Effort | None = None
    format: OutputSchema | None = None


class CountRequest(Part, RequestBody):
    """A conversation, without the parameters for generating an answer."""

    model: str
    messages: Annotated[list[InputMessage], Bounded(LIMITS.max_messages, min_length=1)]
    system: str | Annotated[list[TextBlock], Bounded(LIMITS.max_parts)] | None = None
    tools: Annotated[list[Tool], Bounded(LIMITS.max_tools)] | None = None
    tool_choice: Annotated[AnyToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None  # the older name of output_config.format
    context_management: Annotated[Any, Ignored("clients shorten their conversations themselves")] = None
    speed: Annotated[Any, Ignored("there is one speed")] = None
    mcp_servers: Annotated[Any, Refused("the server calls no other servers; let the client run the tools")] = None

    @property
    def marks_cached_prefixes(self) -> bool:
        """True if the client marks cached prefixes, and so expects usage to report them."""
        contents = [message.content or "" for message in self.messages] + [self.system or ""]
        parts: list[Any] = [self, *(self.tools or ())]
        parts += [part for content in contents if not isinstance(content, str) for part in content]
        return any(getattr(part, "cache_control", None) is not None for part in parts)

    def conversation(self) -> Conversation:
        """Return the conversation in the form that chat templates expect."""
        messages = [
            converted
            for place, message in enumerate(self.messages)
            for converted in _converted(f"messages.{place}.content", message)
        ]
        if system := _instructions(self.system or ""):
            messages.insert(0, {"role": "system", "content": system})
        tools = {
            f"tools.{place}": _function(tool)
            for place, tool in enumerate(self.tools or ())
            if isinstance(tool, CustomTool)
        }
        arguments: dict[str, Any] = {}
        if self.thinking is not None:
            arguments["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort not in (None, "default"):
            arguments["reasoning_effort"] = self.output_config.effort
        schema = None if self.output_config is None else self.output_config.format
        schema = schema or self.output_format
        return Conversation(
            messages=messages,
            tools=tools,
            max_tool_name=LONG_TOOL_NAME,
            tool_choice=self._choice(),
            has_parallel_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            template_arguments=arguments,
            continue_final_message=_is_begun_answer(messages[-1]),
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
    stop_sequences: Annotated[Stops | None, EMPTY_IS_NULL] = None
    stream: bool = False
    temperature: float | None = None
    top_p: TopP | None = None
    top_k: int | None = None
    metadata: Annotated[Any, Ignored("the client's own data")] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None
    inference_geo: Annotated[Any, Ignored("there is one place")] = None
    container: Annotated[Any, Ignored("it is for tools that only their provider can run")] = None
    thread: Annotated[
        Any, Refused("conversations are not stored; send all messages", error_code="thread_unsupported_request")
    ] = None


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
    service.begin(body)
    return TokenCount(input_tokens=len(await body.conversation().prompt(service, client)))


def answer(service: Service, client: Client, body: MessagesRequest) -> Reply:
    """Return the response to a request.

    Raises:
        ApiError: the conversation or a parameter cannot be served.
    """
    model = service.begin(body)
    names = ("temperature", "top_p", "top_k", "max_tokens", "kv_transfer_params")
    sampling = {name: getattr(body, name) for name in names}
    given = {name: value for name, value in sampling.items() if value is not None} | {"stop": body.stop_sequences}
    params = given_params(service.default_params, given)
    turn = _Answer(service, client, body, params, model)
    chunks = turn.events() if body.stream else turn.whole()
    return Reply(
        chunks,
        EVENTS if body.stream else JSON,
        error_body=anthropic_body,
        error_event=lambda error: event(anthropic_body(error), "error"),
        ping=event({"type": "ping"}, "ping"),
    )


class _Answer:
    """The response to one request."""

    def __init__(
        self, service: Service, client: Client, body: MessagesRequest, params: SamplingParams, model: str
    ) -> None:
        self._turn = Turn()
        self._events = block_events(turn_deltas(service, client, body.conversation(), params, None), self._turn)
        self._service, self._reports_writes = service, body.marks_cached_prefixes
        self._head = {"id": f"msg_{client.request_id}", "type": "message", "role": "assistant", "model": model}

    async def whole(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._events):
            async for _ in self._events:
                pass
        content = [_block(block, SIGNATURE) for block in self._turn.blocks]
        yield encode_json({**self._head, "content": content, **self._end(), "usage": self._usage()})

    async def events(self) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async with contextlib.aclosing(self._events):
            async for part in self._events:
                if not has_begun:
                    yield self._start()
                    has_begun = True
                if part.kind == "end" and part.block.kind == "reasoning":
                    signature = {"type": "signature_delta", "signature": SIGNATURE}
                    yield _sent({"type": "content_block_delta", "index": part.block.index, "delta": signature})
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
        num_new = turn.num_prompt - turn.num_cached
        num_written = self._service.num_written(turn.num_prompt, turn.num_cached) if self._reports_writes else 0
        return {
            "input_tokens": num_new - num_written,
            "output_tokens": turn.num_output,
            "cache_creation_input_tokens": num_written,
            "cache_read_input_tokens": turn.num_cached,
        }


def _sent(data: Mapping[str, Any]) -> bytes:
    return event(data, data["type"])


def _block(block: Block, signature: str = "") -> dict[str, Any]:
    """Return a block in Anthropic's format.

    Args:
        signature: that of reasoning, which follows the text in a stream.
    """
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": signature}
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
    """Return the arguments of a call as an object; empty if the text was cut off or is nested too deeply."""
    try:
        found = nested_json.parse(arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_begun_answer(message: Mapping[str, Any]) -> bool:
    """Return True if the answer continues this message, which is the assistant's."""
    return message["role"] == "assistant" and bool(message["content"]) and "tool_calls" not in message


def _function(tool: CustomTool) -> FunctionTool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return FunctionTool(function=function)


def _instructions(content: str | Sequence[InputBlock]) -> str:
    """Return the text of system instructions. Billing lines are dropped: they would prevent prefix cache hits."""
    texts = [content] if isinstance(content, str) else [_block_text(block) for block in content]
    return "\n".join(
        filter(None, (BILLING_LINE.sub("", text, count=1) if BILLING_LINE.match(text) else text for text in texts))
    )


def _block_text(block: InputBlock) -> str:
    return (block.text or "") if isinstance(block, (TextBlock, OtherBlock)) else ""


def _result(content: str | Sequence[ResultBlock]) -> str:
    """Return the text of a tool's result. A block without text, such as an image, is replaced by its type."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text or ("" if isinstance(block, TextBlock) else omitted(block.type)) for block in content)


def _converted(name: str, message: InputMessage) -> list[dict[str, Any]]:
    """Return a message in OpenAI's format, where each tool result is a separate message.

    Raises:
        ApiError: a user's or system message has no content, or the user has sent an image or a document without text.
    """
    if message.content is None and message.role != "assistant":
        raise ApiError(400, f"{name}: a message of the role {message.role!r} needs a content", param="messages")
    content = message.content or ""
    if message.role == "system":
        return [{"role": "system", "content": _instructions(content)}]
    if isinstance(content, str):
        return [{"role": message.role, "content": content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    own: dict[str, Any] = {"role": message.role}
    for place, block in enumerate(content):
        match block:
            case TextBlock():
                if block.text is None and message.role == "user":
                    raise ApiError(400, f"{name}.{place}.text: a block of the user needs a text", param="messages")
                texts.append(block.text or "")
            case ThinkingBlock():
                own["reasoning_content"] = own.get("reasoning_content", "") + block.thinking
            case ToolUseBlock():
                arguments = block.input if isinstance(block.input, str) else json.dumps(block.input, ensure_ascii=False)
                function = {"name": block.name, "arguments": arguments}
                own.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block.content)}
                results.append(result)
            case OtherBlock():
                if not block.text and block.type in UNSEEN_TYPES:
                    raise ApiError(
                        400,
                        f"{name}.{place}.{block.type} is not supported here: the model reads texts only",
                        param="messages",
                    )
                texts += filter(None, [block.text])
    if texts or len(own) > 1 or not results:
        results.append({**own, "content": "\n".join(texts)})
    return results
