"""`/v1/completions`: continues one or more prompts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from moeserve.api.tokenizer import TextCodec
from moeserve.config.limits import LIMITS
from moeserve.outputs import CompletionOutput, Logprob, RequestOutput
from moeserve.sampling_params import SamplingParams
from moeserve.server.client import Client
from moeserve.server.errors import ApiError
from moeserve.server.output_format import requested_outputs
from moeserve.server.reply import EVENTS, JSON, Reply, encode_json, event, merged
from moeserve.server.schema import (
    MINUS_ONE_IS_NULL,
    Bounded,
    Refused,
    SamplingFields,
    StreamOptions,
    TokenId,
    Usage,
    by_position,
    finite,
    usage,
)
from moeserve.server.service import END_FIELDS, Service

# Offset in the text, token id, and the log-probabilities of tokens at this position; None at the start of a prompt.
_Position: TypeAlias = tuple[int, int, dict[int, Logprob] | None]
TokenIds = Annotated[list[TokenId], Bounded(LIMITS.max_token_ids, min_length=1)]
SEVERAL = Bounded(LIMITS.max_prompts, min_length=1)


class CompletionRequest(SamplingFields):
    prompt: str | TokenIds | Annotated[list[str], SEVERAL] | Annotated[list[TokenIds], SEVERAL]
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, MINUS_ONE_IS_NULL] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=LIMITS.max_logprobs)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Annotated[Any, Refused("models continue prompts only at the end")] = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=LIMITS.max_logprobs)] | None = None  # as in vLLM

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    weight_versions: list[tuple[str, int, int]] | None = None
    routed_experts: str | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


def complete(service: Service, client: Client, body: CompletionRequest) -> Reply:
    """Return the response to a request.

    Raises:
        ApiError: a parameter cannot be served.
    """
    model = service.begin(body)
    prompts = body.prompts()
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, f"best_of={body.best_of} is not supported; leave it out, or set n", param="best_of")
    # max_tokens=0 means to score the prompt. The engine generates one token nevertheless, which is dropped.
    params = body.sampling_params(
        service.default_params,
        max_tokens=None if body.max_tokens is None else max(1, body.max_tokens),
        logprobs=body.logprobs,
        structured_outputs=requested_outputs(body.response_format, body.structure),
        prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
    )
    if len(prompts) > LIMITS.max_prompts or len(prompts) * params.n > LIMITS.max_outputs:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with {params.n} outputs each are too many for one request: at most "
            f"{LIMITS.max_prompts} prompts and {LIMITS.max_outputs} outputs",
            param="prompt",
        )
    if params.kv_transfer is not None and len(prompts) > 1:
        raise ApiError(400, "kv_transfer_params need a single prompt", param="kv_transfer_params")
    answer = _Answer(service, client, body, params, model)
    if body.stream:
        return Reply(answer.events(prompts), EVENTS)
    return Reply(answer.whole(prompts), JSON)


class _Answer:
    """The response to one request."""

    def __init__(
        self, service: Service, client: Client, body: CompletionRequest, params: SamplingParams, model: str
    ) -> None:
        self._service, self._client, self._body, self._params = service, client, body, params
        self._head = {"id": f"cmpl-{client.request_id}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model
        self._lengths: dict[int, tuple[int, int]] = {}  # by prompt: number of tokens, and of cached tokens
        self._num_output = 0
        self._offsets: dict[int, _Offsets] = {}  # by choice

    async def whole(self, prompts: list[str | list[int]]) -> AsyncGenerator[bytes, None]:
        choices: dict[int, dict[str, Any]] = {}
        async with contextlib.aclosing(self._pieces(prompts)) as pieces:
            async for piece in pieces:
                choice = choices.setdefault(piece["index"], piece)
                if choice is not piece:
                    choice["text"] += piece["text"]
                    choice |= {name: piece[name] for name in ("finish_reason", "stop_reason")}
                    choice |= {name: piece[name] for name in END_FIELDS if name in piece}
                    if "token_ids" in piece:
                        choice["token_ids"] += piece["token_ids"]
                    if piece["logprobs"] is not None:
                        for name, values in piece["logprobs"].items():
                            choice["logprobs"][name] += values
        ordered = [choices[index] for index in sorted(choices)]
        yield encode_json({**self._head, "choices": ordered, "usage": self._usage()})

    async def events(self, prompts: list[str | list[int]]) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options or StreamOptions()
        async with contextlib.aclosing(self._pieces(prompts)) as pieces:
            async for piece in pieces:
                so_far = {"usage": self._usage()} if options.continuous_usage_stats else {}
                yield event({**self._head, "choices": [piece]} | so_far)
        if options.include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _pieces(self, prompts: list[str | list[int]]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield new parts of choices, each in the form of a choice."""
        params = [self._params.copy() for _ in prompts]
        streams = [
            self._service.generate(self._client, prompt, each, self._body.cache_salt)
            for prompt, each in zip(prompts, params, strict=True)
        ]
        async with contextlib.aclosing(merged(streams)) as outputs:
            async for place, output in outputs:
                self._lengths[place] = (len(output.prompt_token_ids), output.num_cached_tokens)
                for each in output.outputs:
                    yield self._piece(place * self._params.n + each.index, prompts[place], output, each)

    def _piece(
        self, index: int, prompt: str | list[int], output: RequestOutput, gained: CompletionOutput
    ) -> dict[str, Any]:
        codec, hides_special = self._service.llm.codec, self._params.skip_special_tokens
        is_first = index not in self._offsets
        if is_first:
            self._offsets[index] = _Offsets(codec, hides_special)
        offsets = self._offsets[index]
        text, logprobs = gained.text, gained.logprobs
        token_ids = gained.token_ids
        if self._body.max_tokens == 0:
            text, logprobs, token_ids = "", None if logprobs is None else [], []
        self._num_output += len(token_ids)
        positions: list[_Position] = []
        if is_first and self._body.echo:
            echo = self._echo(prompt, output)
            text = echo + text
            if output.prompt_logprobs is not None and self._body.logprobs is not None:
                before = _Offsets(codec, hides_special=isinstance(prompt, str))
                for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
                    positions.append((before.next(token_id), token_id, position))
            offsets.start = len(echo)
        if logprobs is not None:
            for token_id, position in zip(token_ids, logprobs, strict=True):
                positions.append((offsets.next(token_id), token_id, position))
        piece = {
            "index": index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(positions),
            "finish_reason": "length" if self._body.max_tokens == 0 else gained.finish_reason,
            "stop_reason": gained.stop_reason,
        }
        if is_first and self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            piece["prompt_logprobs"] = by_position(output.prompt_logprobs)
        if self._body.return_token_ids:
            piece["token_ids"] = list(token_ids)
            if is_first:
                piece["prompt_token_ids"] = output.prompt_token_ids
        return piece | self._service.end_fields(gained)

    def _echo(self, prompt: str | list[int], output: RequestOutput) -> str:
        if isinstance(prompt, str):
            return prompt
        codec = self._service.llm.codec
        return "" if codec is None else codec.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(self, positions: list[_Position]) -> dict[str, Any]:
        """Return log-probabilities as four lists by position. For the first token of a prompt, they are None."""
        tokens, chosen, most_likely = [], [], []
        for _, token_id, position in positions:
            tokens.append(self._token(token_id, None if position is None else position[token_id]))
            chosen.append(None if position is None else finite(position[token_id].logprob))
            most_likely.append(
                None
                if position is None
                else {self._token(other, at): finite(at.logprob) for other, at in position.items()}
            )
        offsets = [offset for offset, _, _ in positions]
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": most_likely, "text_offset": offsets}

    def _token(self, token_id: int, logprob: Logprob | None) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        codec = self._service.llm.codec
        return f"token_id:{token_id}" if codec is None else codec.token_text(token_id)

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(length for length, _ in self._lengths.values())
        num_cached = sum(cached for _, cached in self._lengths.values())
        num_written = sum(self._service.num_written(*lengths) for lengths in self._lengths.values())
        return usage(num_prompt, num_cached, num_written, self._num_output)


class _Offsets:
    """Offsets of tokens in a text, in characters. A token inside a character has the offset of this character."""

    def __init__(self, codec: TextCodec | None, hides_special: bool) -> None:
        self.start = 0  # offset of the next token
        self._detokenizer = None if codec is None else codec.detokenizer(skip_special_tokens=hides_special)

    def next(self, token_id: int) -> int:
        """Return the offset of the next token."""
        place = self.start
        if self._detokenizer is not None:
            self.start += len(self._detokenizer.feed(token_id))
        return place
