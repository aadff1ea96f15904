"""One turn of a conversation, in a form that all chat APIs share: messages, tools, and the model's answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import model_validator

from moeserve.errors import RequestError
from moeserve.outputs import CompletionOutput, RequestOutput
from moeserve.parsers.deltas import ParsedDelta, ToolCallDelta
from moeserve.sampling_params import SamplingParams
from moeserve.server.client import Client
from moeserve.server.errors import ApiError
from moeserve.server.output_format import answer_grammar, grammar_forms, parameters_schema
from moeserve.server.schema import Body, given_params
from moeserve.server.service import Service
from moeserve.structured_outputs import StructuredOutputsParams

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]+")
MAX_TOOL_NAME = 64  # characters, as in OpenAI's chat completions
LONG_TOOL_NAME = 128  # in Anthropic's API and the Responses API
TOKENS_OF_MARKER = 16  # number of last prompt tokens in which to search for the opening marker of reasoning


def with_object(fields: Any, name: str) -> Any:
    """Return the fields of a tool. A schema that is no object, such as PHP's `[]`, becomes {} if it is not strict."""
    if (
        not isinstance(fields, dict)
        or fields.get("strict") is True
        or isinstance(fields.get(name), (dict, types.NoneType))
    ):
        return fields
    return {**fields, name: {}}


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _object(cls, fields: Any) -> Any:
        return with_object(fields, "parameters")


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
    """A conversation, and the functions that the model may call."""

    messages: list[dict[str, Any]]  # in OpenAI's format
    field_of_messages: str = "messages"  # name of the request's field, for error messages
    tools: Mapping[str, FunctionTool] = field(default_factory=dict)  # tools by the path of their field in the request
    max_tool_name: int = MAX_TOOL_NAME
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    has_parallel_calls: bool = True  # False: only the first call of an answer is returned
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True  # end the prompt with the tokens that begin an answer
    continue_final_message: bool = False  # continue the last message instead of beginning an answer
    chat_template: str | None = None  # chat template in the request
    with_reasoning: bool = True  # return the model's reasoning
    outputs: StructuredOutputsParams | None = None  # required format of the content

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions that the model may call.

        Raises:
            ApiError: a tool has an invalid name, tool_choice names a function that is not among the tools, or
                tool_choice requires a call although there are no tools.
        """
        for name_of_field, tool in self.tools.items():
            name = tool.function.name
            if not TOOL_NAME.fullmatch(name) or len(name) > self.max_tool_name:
                raise ApiError(
                    400,
                    f"{name_of_field}: the name {name[:150]!r} must have 1 to {self.max_tool_name} characters, each of "
                    "a-z, A-Z, 0-9, _ and -",
                    param=name_of_field.partition(".")[0],
                )
        if self.tool_choice == "none":
            return []
        functions = [tool.function.model_dump(exclude_none=True) for tool in self.tools.values()]
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            functions = [function for function in functions if function["name"] == name]
            if not functions:
                raise ApiError(
                    400, f"tool_choice names {name[:100]!r}, which is not among the tools", param="tool_choice"
                )
        if self.tool_choice == "required" and not functions:
            raise ApiError(400, "tool_choice requires a call, but there are no tools", param="tool_choice")
        return functions

    async def prompt(self, service: Service, client: Client) -> list[int]:
        """Wait for the client's turn, and render the conversation as token ids.

        Raises:
            ApiError: there is no chat template, the template refuses the conversation, or too many conversations wait.
        """
        async with service.preparation.admitted(client.name, 1):
            return await self._render(service)

    async def _render(self, service: Service) -> list[int]:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools.values()]
        given = None if self.tool_choice == "none" else tools or None
        with self.prompt_errors():
            return await service.chat_prompt(
                self.messages,
                given,
                self.template_arguments,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                chat_template=self.chat_template,
            )

    @contextlib.contextmanager
    def prompt_errors(self) -> Iterator[None]:
        """In errors about the prompt, name the field of the request from which the prompt was made."""
        try:
            yield
        except ApiError as error:
            if error.param == "prompt":
                error.param = self.field_of_messages
            raise


@dataclass(frozen=True)
class TurnDelta:
    """New text and tool calls of one output of a turn."""

    output: CompletionOutput  # as generated by the engine
    content: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]
    finish_reason: str | None
    prompt_token_ids: list[int]
    num_cached: int


async def turn_deltas(
    service: Service, client: Client, conversation: Conversation, params: SamplingParams, cache_salt: str | None
) -> AsyncGenerator[TurnDelta, None]:
    """Answer a conversation. Yield each new part of an output.

    Raises:
        ApiError: the conversation cannot be served, or the engine failed.
    """
    functions = conversation.functions
    service.admission.require_room(params.n)
    prompt = await conversation.prompt(service, client)
    codec = service.llm.codec
    assert codec is not None, "a conversation was rendered"
    end = codec.decode(prompt[-TOKENS_OF_MARKER:], skip_special_tokens=False)
    starts_in_reasoning = service.parser.starts_in_reasoning(end)
    parsed_params = service.parsed_params(params)

    is_named = isinstance(conversation.tool_choice, NamedTool)
    must_call = is_named or conversation.tool_choice == "required"
    is_restricted = must_call or conversation.outputs is not None

    async def restricted(functions: Sequence[dict[str, Any]]) -> SamplingParams:
        if not is_restricted:
            return parsed_params
        grammar = await asyncio.to_thread(  # large schemas take a while
            answer_grammar,
            conversation.outputs,
            functions,
            must_call=must_call,
            has_parallel_calls=conversation.has_parallel_calls and not is_named,
            family=service.parser,
            codec=codec,
            starts_in_reasoning=starts_in_reasoning,
        )
        return parsed_params if grammar is None else given_params(parsed_params, {"structured_outputs": grammar})

    parsers: dict[int, _OutputParser] = {}  # by index of the output
    with conversation.prompt_errors():
        forms = grammar_forms(functions) if is_restricted else [functions]
        outputs = _generate(service, client, prompt, functions, forms, restricted, cache_salt)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                for each in output.outputs:
                    if each.index not in parsers:
                        parsers[each.index] = _OutputParser(service, conversation, functions, starts_in_reasoning)
                    parsed = parsers[each.index].parsed(each)
                    yield TurnDelta(
                        output=each,
                        content=parsed.content,
                        reasoning=parsed.reasoning if conversation.with_reasoning else "",
                        tool_calls=parsed.tool_calls,
                        finish_reason=parsers[each.index].finish_reason(each),
                        prompt_token_ids=output.prompt_token_ids,
                        num_cached=output.num_cached_tokens,
                    )


async def _generate(
    service: Service,
    client: Client,
    prompt: list[int],
    functions: Sequence[dict[str, Any]],
    forms: Iterable[Sequence[dict[str, Any]]],
    restricted: Callable[[Sequence[dict[str, Any]]], Awaitable[SamplingParams]],
    cache_salt: str | None,
) -> AsyncGenerator[RequestOutput, None]:
    """Generate with the first form of the functions whose grammar can be built and compiled.

    Args:
        forms: forms of `functions`, the most restrictive first; see `grammar_forms`.
        restricted: returns the sampling parameters with a grammar for a form of the functions.

    Raises:
        ApiError: as for `Service.generate`, with the first form. If a strict function is the cause, the error names it.
    """
    refusal: ApiError | None = None
    for form in forms:
        may_be_grammar = True
        try:
            params = await restricted(form)
            may_be_grammar = params.structured_outputs is not None
            async with contextlib.aclosing(service.generate(client, prompt, params, cache_salt)) as outputs:
                async for output in outputs:
                    may_be_grammar = False
                    yield output
            return
        except ApiError as error:
            if not may_be_grammar or error.status != 400:
                raise
            refusal = refusal or error
    assert refusal is not None, "there is at least one form"
    for function in functions:
        if function.get("strict"):
            await _require_grammar(service, function)
    raise refusal


async def _require_grammar(service: Service, function: dict[str, Any]) -> None:
    """Raise ApiError if the schema of a strict function has no grammar."""
    schema = StructuredOutputsParams(json=parameters_schema(function))
    try:
        await service.llm.check_params(given_params(service.default_params, {"structured_outputs": schema}))
    except RequestError as error:
        raise ApiError(400, f"the parameters of the tool {function['name']!r}: {error}", param="tools") from None


class _OutputParser:
    """Splits one output into content, reasoning and tool calls, according to the markers of the model's family."""

    def __init__(
        self,
        service: Service,
        conversation: Conversation,
        functions: Sequence[dict[str, Any]],
        starts_in_reasoning: bool,
    ) -> None:
        self._has_calls = False
        self._has_parallel_calls = conversation.has_parallel_calls
        self._parser = service.parser.make(
            [tool.model_dump(exclude_none=True) for tool in conversation.tools.values()],
            starts_in_reasoning=starts_in_reasoning,
            parse_tools=bool(functions),
            parse_reasoning=True,
        )

    def parsed(self, output: CompletionOutput) -> ParsedDelta:
        """Return the content, reasoning and tool calls in the new part of an output."""
        delta = self._parser.feed(output.text, output.token_ids)
        if output.finish_reason is not None:
            rest = self._parser.finish()
            delta = ParsedDelta(
                delta.content + rest.content, delta.reasoning + rest.reasoning, delta.tool_calls + rest.tool_calls
            )
        if not self._has_parallel_calls:
            first = tuple(call for call in delta.tool_calls if call.index == 0)
            delta = dataclasses.replace(delta, tool_calls=first)
        self._has_calls |= bool(delta.tool_calls)
        return delta

    def finish_reason(self, output: CompletionOutput) -> str | None:
        return "tool_calls" if output.finish_reason == "stop" and self._has_calls else output.finish_reason
