"""Turns prompts into requests, and news of requests into outputs: text, stop strings, log-probabilities.

Knows token ids and texts, never an engine, a schedule or a tensor. Whoever drives an engine hands it the requests
made here and brings its updates back.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from moeserve.api.text import OutputText, TextCodec
from moeserve.errors import RequestError, nearest, shown
from moeserve.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from moeserve.protocol import Request, RequestUpdate, TokenLogprobs
from moeserve.sampling_params import SamplingParams

# A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the dicts may have a "cache_salt".
Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
Prompts: TypeAlias = "Prompt | Sequence[Prompt]"

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True)
class Submission:
    """One prompt, ready for an engine."""

    prompt_id: str
    requests: list[Request]  # one per output


@dataclass(frozen=True)
class News:
    """What an update meant for its prompt."""

    prompt_id: str
    finished: bool  # all outputs of the prompt have ended
    abort_request_id: str | None = None  # the engine must end this request: its text has met a stop string


class Frontend:
    """Keeps the prompts in flight: `submit`, then `update` with all that the engine says, `output`, `discard`."""

    def __init__(
        self,
        codec: TextCodec | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        engine_seed: int,
    ) -> None:
        """
        Args:
            codec: None where there is no tokenizer; prompts are then token ids, and outputs have no text.
            vocab_size: tokens that the model knows.
            max_model_len: most tokens of one request, prompt and output.
            eos_token_ids: tokens that end an output.
            engine_seed: seeds the prompts that bring no seed, each differently.
        """
        self._codec = codec
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = list(eos_token_ids)
        self._engine_seed = engine_seed
        self._num_prompts = 0
        self._prompts: dict[str, _PromptInFlight] = {}
        self._place_of_request: dict[str, tuple[_PromptInFlight, _OutputSoFar]] = {}  # unfinished requests only

    def submit(self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams]) -> list[Submission]:
        """Makes the requests of one or many prompts, in order.

        Args:
            prompts: a `Prompt` or a list of them; a list of integers is one prompt.
            sampling_params: one `SamplingParams` for all prompts, or a list with one for each.

        Raises:
            RequestError: a prompt or a sampling parameter cannot be served. No prompt of the call is then kept.
        """
        pairs = normalise(prompts, sampling_params)
        names = ["prompt"] if len(pairs) == 1 else [f"prompt {place}" for place in range(len(pairs))]
        checked = [self._checked(name, prompt, params) for name, (prompt, params) in zip(names, pairs, strict=True)]
        return [self._register(prompt, params) for prompt, (_, params) in zip(checked, pairs, strict=True)]

    def update(self, update: RequestUpdate) -> News | None:
        """Takes the engine's news of one request. None: it ended here before, and the engine was still a step ahead."""
        place = self._place_of_request.get(update.request_id)
        if place is None:
            return None
        prompt, output = place
        if output.index == 0:
            prompt.take(update, self._codec)
        output.take(update, self._codec)
        if output.finish_reason is not None:
            del self._place_of_request[update.request_id]
        ended_here = output.finish_reason is not None and update.finish_reason is None
        return News(
            prompt_id=prompt.prompt_id,
            finished=all(output.finish_reason is not None for output in prompt.outputs),
            abort_request_id=update.request_id if ended_here else None,
        )

    def output(self, prompt_id: str) -> RequestOutput:
        """All outputs of a prompt, complete so far. It is built at each call and does not change later."""
        return self._prompts[prompt_id].snapshot()

    def unfinished(self, prompt_id: str) -> list[str]:
        """Requests of a prompt that have not ended. None where there is no such prompt."""
        prompt = self._prompts.get(prompt_id)
        outputs = [] if prompt is None else prompt.outputs
        return [output.request_id for output in outputs if output.finish_reason is None]

    def discard(self, prompt_id: str) -> list[str]:
        """Forgets a prompt. Returns its unfinished requests, which the engine must end."""
        unfinished = self.unfinished(prompt_id)
        del self._prompts[prompt_id]
        for request_id in unfinished:
            del self._place_of_request[request_id]
        return unfinished

    def _register(self, prompt: _CheckedPrompt, params: SamplingParams) -> Submission:
        number = self._num_prompts
        self._num_prompts += 1
        prompt_id = str(number)
        # The prompt is the same for all outputs: the first one tells its log-probabilities.
        first_params = params.for_engine()
        other_params = msgspec.structs.replace(first_params, prompt_logprobs=None)
        requests = [
            Request(
                request_id=prompt_id if params.n == 1 else f"{prompt_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                params=first_params if index == 0 else other_params,
                seed=_request_seed(params.seed, self._engine_seed, number, index),
                eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
                cache_salt=prompt.cache_salt,
            )
            for index in range(params.n)
        ]
        outputs = [
            _OutputSoFar(request.request_id, index, params, self._codec) for index, request in enumerate(requests)
        ]
        in_flight = _PromptInFlight(prompt_id, prompt, params, outputs)
        self._prompts[prompt_id] = in_flight
        self._place_of_request.update({output.request_id: (in_flight, output) for output in outputs})
        return Submission(prompt_id, requests)

    def _checked(self, name: str, prompt: Any, params: SamplingParams) -> _CheckedPrompt:
        self._check_params(params)
        fields = _prompt_fields(name, prompt)
        text = fields.get("prompt")
        if text is None:
            token_ids = self._checked_token_ids(name, fields["prompt_token_ids"])
        elif not isinstance(text, str):
            raise RequestError(f"{name}={shown(text)} must be a text (or pass token ids as prompt_token_ids)")
        elif self._codec is None:
            raise RequestError(
                f"{name}={shown(text)} is a text, but there is no tokenizer; "
                "pass token ids, or name the folder of one as tokenizer"
            )
        else:
            if not text:
                raise RequestError(f"{name} is empty; pass at least one character")
            token_ids = self._checked_token_ids(name, self._codec.encode(text))
        cache_salt = fields.get("cache_salt", "")
        if not isinstance(cache_salt, str):
            raise RequestError(f"{name}: cache_salt={shown(cache_salt)} must be a text")
        return _CheckedPrompt(text, token_ids, cache_salt)

    def _checked_token_ids(self, name: str, token_ids: Any) -> list[int]:
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise RequestError(f"{name}: prompt_token_ids={shown(token_ids)} must be a list of token ids")
        if not token_ids:
            raise RequestError(f"{name} is empty; pass at least one token")
        if len(token_ids) > self._max_model_len - 1:
            raise RequestError(
                f"{name} has {len(token_ids)} tokens, and max_model_len={self._max_model_len} leaves room for "
                f"{self._max_model_len - 1} and one to generate; shorten it, or raise max_model_len if the model allows"
            )
        for place, token_id in enumerate(token_ids):
            if not _is_integer(token_id):
                raise RequestError(f"{name}: token {place} is {shown(token_id)}; token ids are integers")
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"{name}: token {place} is {token_id}, outside the vocabulary of {self._vocab_size}; "
                    f"ids are 0 to {self._vocab_size - 1}"
                )
        return [int(token_id) for token_id in token_ids]

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop and self._codec is None:
            raise RequestError(
                f"stop={shown(params.stop)} needs a text, but there is no tokenizer; "
                "use stop_token_ids, or name the folder of a tokenizer"
            )
        for parameter, token_ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token_id in token_ids:
                if token_id >= self._vocab_size:
                    raise RequestError(
                        f"{parameter} names token {token_id}, outside the vocabulary of {self._vocab_size}; "
                        f"ids are 0 to {self._vocab_size - 1}"
                    )
        stop_ids = {*params.stop_token_ids, *([] if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and len(stop_ids) >= self._vocab_size:
            raise RequestError(
                f"min_tokens={params.min_tokens} bars the {len(stop_ids)} tokens that end an output, which are all "
                f"{self._vocab_size} there are; give fewer stop_token_ids, or min_tokens=0"
            )
        for parameter, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if number is not None and number > self._vocab_size:
                raise RequestError(f"{parameter}={number}, but the vocabulary has only {self._vocab_size} tokens")


def normalise(
    prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams]
) -> list[tuple[Prompt, SamplingParams]]:
    """Pairs one or many prompts with one or many sampling parameters. The prompts themselves are not checked.

    Raises:
        RequestError: not prompts, not `SamplingParams`, or not as many of one as of the other.
    """
    if isinstance(prompts, bytes) or not isinstance(prompts, (str, Mapping, Sequence)):
        raise RequestError(
            f"prompts={shown(prompts)} ({type(prompts).__name__}) must be a text, a list of token ids, "
            'a dict with "prompt" or "prompt_token_ids", or a list of these'
        )
    is_one = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and _is_integer(prompts[0]))
    each: Sequence[Any] = [prompts] if is_one else prompts  # type: ignore[assignment]
    if isinstance(sampling_params, (list, tuple)):
        if len(sampling_params) != len(each):
            raise RequestError(
                f"{len(each)} prompts came with {len(sampling_params)} sampling_params; "
                "pass one SamplingParams for all prompts, or one for each"
            )
        params_of_prompts = list(sampling_params)
    else:
        params_of_prompts = [sampling_params] * len(each)
    for params in params_of_prompts:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params={shown(params)} is a {type(params).__name__}; pass SamplingParams(...)"
            )
    return [(prompt, params.copy()) for prompt, params in zip(each, params_of_prompts, strict=True)]


@dataclass(frozen=True)
class _CheckedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str


class _OutputSoFar:
    """One output of a prompt: all that its updates have told."""

    def __init__(self, request_id: str, index: int, params: SamplingParams, codec: TextCodec | None) -> None:
        self.request_id = request_id
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._token_ids: list[int] = []
        self._keeps_stop = params.include_stop_str_in_output
        self._text = None if codec is None else OutputText(codec, params)
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0

    def take(self, update: RequestUpdate, codec: TextCodec | None) -> None:
        for place, token_id in enumerate(update.token_ids):
            self._token_ids.append(token_id)
            if self._logprobs is not None:
                self._logprobs.append(_logprob_of_token(update.logprobs[place], codec))
                self._cumulative_logprob += update.logprobs[place].logprobs[0]
            # As in vLLM, the token that ended the output is among its ids but not in its text.
            is_stop_token = update.finish_reason == "stop" and place == len(update.token_ids) - 1
            if self._text is not None and (self._keeps_stop or not is_stop_token):
                stop = self._text.add(token_id)
                if stop is not None:  # what the engine generated after it is dropped
                    self.finish_reason, self._stop_reason = "stop", stop
                    return
        if update.finish_reason is not None:
            self.finish_reason, self._stop_reason = update.finish_reason, update.stop_reason
            if self._text is not None:
                self._text.finish()

    def snapshot(self) -> CompletionOutput:
        has_logprobs = self._logprobs is not None
        return CompletionOutput(
            index=self.index,
            text="" if self._text is None else self._text.text,
            token_ids=self._token_ids.copy(),
            logprobs=None if self._logprobs is None else self._logprobs.copy(),
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )


class _PromptInFlight:
    """One prompt and its outputs."""

    def __init__(
        self, prompt_id: str, prompt: _CheckedPrompt, params: SamplingParams, outputs: list[_OutputSoFar]
    ) -> None:
        self.prompt_id = prompt_id
        self.outputs = outputs
        self._prompt = prompt
        self._wants_logprobs = params.prompt_logprobs is not None
        self._logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached_tokens = 0

    def take(self, update: RequestUpdate, codec: TextCodec | None) -> None:
        """What the first output's updates tell of the prompt."""
        self._num_cached_tokens = max(self._num_cached_tokens, update.num_cached_tokens)
        if self._wants_logprobs and self._logprobs is None and update.token_ids:
            # Nothing comes before the first token, so it has no log-probability.
            self._logprobs = [None, *(_logprob_of_token(logprobs, codec) for logprobs in update.prompt_logprobs)]

    def snapshot(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.prompt_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[output.snapshot() for output in self.outputs],
            finished=all(output.finish_reason is not None for output in self.outputs),
            prompt_logprobs=self._logprobs,
            num_cached_tokens=self._num_cached_tokens,
        )


def _prompt_fields(name: str, prompt: Any) -> Mapping[str, Any]:
    """A prompt as a dict with exactly one of "prompt" and "prompt_token_ids"."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise RequestError(
            f"{name}={shown(prompt)} ({type(prompt).__name__}) must be a text, a list of token ids, "
            'or a dict with "prompt" or "prompt_token_ids"'
        )
    for key in prompt:
        if key not in _PROMPT_KEYS:
            raise RequestError(f"{name} has an unknown key {key!r}: {nearest(str(key), _PROMPT_KEYS)}")
    given = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
    if len(given) != 1:
        raise RequestError(f'{name} has {" and ".join(given) or "neither key"}: give "prompt" or "prompt_token_ids"')
    return prompt


def _is_integer(value: Any) -> bool:
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def _request_seed(seed: int | None, engine_seed: int, prompt_number: int, index: int) -> int:
    """The seed of one output: 0 to 2**64 - 1, different for each output of a prompt."""
    if seed is not None and index == 0:
        return seed % 2**64
    source = f"seed {seed}, output {index}"
    if seed is None:
        source = f"engine seed {engine_seed}, prompt {prompt_number}, output {index}"
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "little")


def _logprob_of_token(logprobs: TokenLogprobs, codec: TextCodec | None) -> dict[int, Logprob]:
    """Log-probabilities at one position by token id: the chosen or given token first, then the most likely ones."""
    by_token: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(logprobs.token_ids, logprobs.logprobs, logprobs.ranks, strict=True):
        if token_id not in by_token:  # the chosen token may also be one of the most likely
            by_token[token_id] = Logprob(logprob, rank, None if codec is None else codec.token_text(token_id))
    return by_token
