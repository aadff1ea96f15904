"""The forms of prompts that users pass, and their validation."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from moeserve.api.routes import rows_of_array
from moeserve.api.tokenizer import TextCodec
from moeserve.config.limits import LIMITS
from moeserve.config.routes import RouteShape
from moeserve.errors import PromptTooLongError, RequestError, nearest, shown
from moeserve.inputs import TextPrompt, TokensPrompt
from moeserve.sampling_params import ALL_TOKENS, LONGEST_PROMPT, RequestParams, SamplingParams
from moeserve.structured_outputs import StructuredOutputsParams
from moeserve.worker.grammars import Grammars

# A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the dicts may have a "cache_salt". Arrays and
# tensors stand for lists. With token ids, "routed_experts" [tokens, layers, top_k] forces the experts of the tokens.
Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any] | TextPrompt | TokensPrompt"
Prompts: TypeAlias = "Prompt | Iterable[Prompt]"
Params: TypeAlias = "SamplingParams | Mapping[str, Any]"

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "routed_experts")
_KEYS_OF_PICTURES = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds")


@dataclass(frozen=True)
class EncodedPrompt:
    """A valid prompt as token ids."""

    text: str | None  # None if the prompt was given as token ids
    token_ids: list[int]
    cache_salt: str
    forced_routes: bytes = b""  # see `Request`


def chat_prompt(
    codec: TextCodec | None,
    messages: Any,
    *,
    chat_template: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
    check_length: Callable[[str], None],
) -> dict[str, list[int]]:
    """Render a conversation as a prompt; see `LLM.chat_prompt`.

    Args:
        check_length: called with the rendered text; raises an error if it is too long to be tokenized.
    """
    if codec is None:
        raise RequestError("there is no tokenizer to render messages with; name the folder of one as tokenizer")
    token_ids = codec.chat_prompt(
        messages,
        chat_template=chat_template,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_arguments=chat_template_kwargs,
        check_length=check_length,
    )
    return {"prompt_token_ids": token_ids}


def pair_prompts(prompts: Prompts, sampling_params: Params | Sequence[Params]) -> list[tuple[Prompt, SamplingParams]]:
    """Pair one or many prompts with copies of one or many sampling parameters. The prompts are not validated.

    Raises:
        RequestError: a type or value is wrong, or the numbers of prompts and of parameters differ.
    """
    prompts = _plain(prompts)
    if isinstance(prompts, (bytes, Set)) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts={shown(prompts)} ({type(prompts).__name__}) must be a text, a list of token ids, "
            'a dict with "prompt" or "prompt_token_ids", or a list of these'
        )
    if not isinstance(prompts, (str, Mapping, Sequence)):
        prompts = list(prompts)
    is_one = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and _is_integer(prompts[0]))
    each: Sequence[Any] = [prompts] if is_one else prompts  # type: ignore[assignment]
    if not isinstance(sampling_params, (list, tuple)):
        sampling_params = [sampling_params] * len(each)  # type: ignore[list-item]
    if len(sampling_params) != len(each):
        raise RequestError(
            f"{len(each)} prompts came with {len(sampling_params)} sampling_params; "
            "pass one SamplingParams for all prompts, or one for each"
        )
    return [(prompt, _checked_params(params)) for prompt, params in zip(each, sampling_params, strict=True)]


def _checked_params(params: Any) -> SamplingParams:
    """Return a copy of sampling parameters, which may be given as a dict."""
    if isinstance(params, Mapping):
        return SamplingParams(**params)
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params={shown(params)} is a {type(params).__name__}; pass SamplingParams(...)")
    return params.copy()


class PromptEncoder:
    """Validates prompts and sampling parameters for one model, and tokenizes texts."""

    def __init__(
        self,
        codec: TextCodec | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        grammars: Grammars | None = None,
        routes: RouteShape | None = None,
    ) -> None:
        self._codec = codec
        self._routes = routes
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids

    def encode(self, name: str, prompt: Any, num_kept: int | None = None) -> EncodedPrompt:
        """Return a prompt as token ids.

        Args:
            name: name of the prompt in error messages.
            num_kept: `SamplingParams.truncate_prompt_tokens`.

        Raises:
            RequestError: the prompt cannot be served.
        """
        fields = _fields(name, prompt)
        text = fields.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"{name}={shown(text)} must be a text (or pass token ids as prompt_token_ids)")
        if fields.get("prompt_token_ids") is not None:
            token_ids = self._checked(name, self._truncated(_plain(fields["prompt_token_ids"]), num_kept))
        elif self._codec is None:
            raise RequestError(
                f"{name}={shown(text)} is a text, but there is no tokenizer; "
                "pass token ids, or name the folder of one as tokenizer"
            )
        elif not text:
            raise RequestError(f"{name} is empty; pass at least one character", parameter="prompt")
        else:
            self.check_length(name, text, is_truncated=num_kept is not None)
            token_ids = self._checked(name, self._truncated(self._codec.encode(text), num_kept))
        cache_salt = fields.get("cache_salt", "")
        if not isinstance(cache_salt, str):
            raise RequestError(f"{name}: cache_salt={shown(cache_salt)} must be a text")
        forced_routes = b""
        if (routes := fields.get("routed_experts")) is not None:
            forced_routes = rows_of_array(name, routes, self._routes, len(token_ids))
        return EncodedPrompt(text, token_ids, cache_salt, forced_routes)

    def _truncated(self, token_ids: Any, num_kept: int | None) -> Any:
        """Return the tokens that `truncate_prompt_tokens` leaves."""
        if num_kept is None or not isinstance(token_ids, Sequence):
            return token_ids
        return token_ids[-(self._max_model_len - 1 if num_kept == LONGEST_PROMPT else num_kept) :]

    def check_length(self, name: str, text: str, *, is_truncated: bool = False) -> None:
        """Raise RequestError for a text that is too long for the model, before time and memory are spent on it.

        Args:
            is_truncated: the text may be longer than the context, because only its last tokens are used.
        """
        if is_truncated:
            if len(text) > LIMITS.max_text_length:
                raise RequestError(
                    f"{name} has {len(text)} characters; with truncate_prompt_tokens at most {LIMITS.max_text_length} "
                    "are allowed; shorten it",
                    parameter="prompt",
                )
            return
        if self._codec is None or len(text) < self._max_model_len:  # a token has at least one character
            return
        num_tokens = self._codec.least_tokens(text)
        if num_tokens > self._max_model_len - 1:
            raise PromptTooLongError(
                f"{name} has {len(text)} characters, which are at least {num_tokens} tokens, and max_model_len="
                f"{self._max_model_len} leaves room for {self._max_model_len - 1} and one to generate; shorten it",
                num_tokens=num_tokens,
                max_tokens=self._max_model_len - 1,
            )

    def check_prompt_logprobs(self, name: str, num_tokens: int, params: SamplingParams) -> None:
        """Raise RequestError if the log-probabilities of a prompt exceed the limit."""
        if params.prompt_logprobs is None:
            return
        width = 1 + (self._vocab_size if params.prompt_logprobs == ALL_TOKENS else params.prompt_logprobs)
        if num_tokens * width > LIMITS.max_prompt_logprobs_entries:
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs} for the {num_tokens} tokens of {name} are "
                f"{num_tokens * width} entries; at most {LIMITS.max_prompt_logprobs_entries} are allowed. Shorten the "
                "prompt, or lower prompt_logprobs",
                parameter="prompt_logprobs",
            )

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError for parameters that this model or tokenizer cannot serve."""
        if params.stop and self._codec is None:
            raise RequestError(
                f"stop={shown(params.stop)} needs a text, but there is no tokenizer; "
                "use stop_token_ids, or name the folder of a tokenizer",
                parameter="stop",
            )
        for parameter in ("stop_token_ids", "logit_bias", "allowed_token_ids", "trace_decode_token_ids"):
            highest = max(getattr(params, parameter) or [0])
            if highest >= self._vocab_size:
                raise RequestError(
                    f"{parameter} names token {highest}, {self._outside_vocabulary()}", parameter=parameter
                )
        if params.bad_words and self._codec is None:
            raise RequestError(
                f"bad_words={shown(params.bad_words)} needs a tokenizer; name the folder of one as tokenizer",
                parameter="bad_words",
            )
        self.engine_params(params)  # raises for bad_words that are not valid Unicode
        stop_ids = {*params.stop_token_ids, *([] if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and len(stop_ids) >= self._vocab_size:
            raise RequestError(
                f"min_tokens={params.min_tokens} excludes the {len(stop_ids)} tokens that end an output, which are all "
                f"{self._vocab_size} of the vocabulary; give fewer stop_token_ids, or min_tokens=0",
                parameter="min_tokens",
            )
        for parameter, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if number is not None and number > self._vocab_size:
                raise RequestError(
                    f"{parameter}={number}, but the vocabulary has only {self._vocab_size} tokens", parameter=parameter
                )
        num_entries = (params.max_tokens or self._max_model_len) * params.n * (1 + self._vocab_size)
        if params.logprobs == ALL_TOKENS and num_entries > LIMITS.max_logprobs_entries:
            raise RequestError(
                f"logprobs=-1 for max_tokens={params.max_tokens} and n={params.n} are up to {num_entries} entries; at "
                f"most {LIMITS.max_logprobs_entries} are allowed. Lower max_tokens, or give a number of logprobs",
                parameter="logprobs",
            )
        if params.structured_outputs is not None:
            self._check_structured_outputs(params, params.structured_outputs)

    def engine_params(self, params: SamplingParams) -> RequestParams:
        """Return the parameters that the engine needs, after they were checked."""
        bad_token_ids = [] if self._codec is None else _tokens_of_words(params.bad_words, self._codec)
        return params.for_engine(vocab_size=self._vocab_size, bad_token_ids=bad_token_ids)

    def _check_structured_outputs(self, params: SamplingParams, structured_outputs: StructuredOutputsParams) -> None:
        """Compile the grammar. Raise RequestError if it cannot be served."""
        if self._codec is None or self._grammars is None:
            raise RequestError("structured_outputs need a tokenizer; name the folder of one as tokenizer")
        if params.min_tokens:
            raise RequestError(
                f"min_tokens={params.min_tokens} contradicts structured_outputs, which may be complete before; leave "
                "min_tokens out, and let the grammar demand a length",
                parameter="min_tokens",
            )
        if not params.stop_token_ids and (params.ignore_eos or not self._eos_token_ids):
            why = "ignore_eos=True" if params.ignore_eos else "this model has no end-of-sequence token"
            raise RequestError(
                f"structured_outputs need a token that ends a complete output, and {why}; "
                f"{'leave ignore_eos out, or ' if params.ignore_eos else ''}give stop_token_ids"
            )
        self._grammars.check(structured_outputs.for_engine())

    def _checked(self, name: str, token_ids: Any) -> list[int]:
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise RequestError(f"{name}: prompt_token_ids={shown(token_ids)} must be a list of token ids")
        if not token_ids:
            raise RequestError(f"{name} is empty; pass at least one token", parameter="prompt")
        if len(token_ids) > self._max_model_len - 1:
            raise PromptTooLongError(
                f"{name} has {len(token_ids)} tokens, and max_model_len={self._max_model_len} leaves room for "
                f"{self._max_model_len - 1} and one to generate; shorten it, or raise max_model_len if the model "
                "allows",
                num_tokens=len(token_ids),
                max_tokens=self._max_model_len - 1,
            )
        for place, token_id in enumerate(token_ids):
            if not _is_integer(token_id):
                raise RequestError(
                    f"{name}: token {place} is {shown(token_id)}; token ids are integers", parameter="prompt"
                )
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"{name}: token {place} is {token_id}, {self._outside_vocabulary()}", parameter="prompt"
                )
        return [int(token_id) for token_id in token_ids]

    def _outside_vocabulary(self) -> str:
        return f"outside the vocabulary of {self._vocab_size}; ids are 0 to {self._vocab_size - 1}"


def _fields(name: str, prompt: Any) -> Mapping[str, Any]:
    """Return a prompt as a dict with "prompt", "prompt_token_ids", or both."""
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise RequestError(
            f"{name}={shown(prompt)} ({type(prompt).__name__}) must be a text, a list of token ids, "
            'or a dict with "prompt" or "prompt_token_ids"'
        )
    for key, value in prompt.items():
        if key in _KEYS_OF_PICTURES:
            if value is not None and value != {}:
                raise RequestError(f"{name} has {key!r}, but models read texts only: leave it out", parameter="prompt")
        elif key not in _PROMPT_KEYS:
            raise RequestError(f"{name} has an unknown key {key!r}: {nearest(str(key), _PROMPT_KEYS)}")
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        raise RequestError(f'{name} has neither key: give "prompt" or "prompt_token_ids"')
    return prompt


def _plain(value: Any) -> Any:
    """Return an array, a tensor or a column of a table as a list; other values unchanged."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _tokens_of_words(words: Sequence[str], codec: TextCodec) -> list[list[int]]:
    """Return the tokens of each word twice: as encoded alone, and as encoded after a space. Omit duplicates."""
    texts = [f"{before}{word.lstrip()}" for word in words for before in ("", " ")]
    found = [codec.encode(text, add_special_tokens=False) for text in texts if text.strip()]
    return [list(tokens) for tokens in dict.fromkeys(map(tuple, found)) if tokens]


def _is_integer(value: Any) -> bool:
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))
