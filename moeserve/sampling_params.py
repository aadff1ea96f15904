"""Sampling parameters of a request."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

from moeserve.config.settings import LIMITS
from moeserve.errors import RequestError, nearest, shown

T = TypeVar("T")


def _refusing_unknown_names(cls: type[T]) -> type[T]:
    """Makes a dataclass answer a mistyped keyword with the nearest right one."""
    generated_init = cls.__init__
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(generated_init)
    def init(self: Any, **parameters: Any) -> None:
        for name in parameters:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {name!r}: {nearest(name, known)}")
        generated_init(self, **parameters)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


def _parameter(default: Any, help: str) -> Any:
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


@_refusing_unknown_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Names and meaning follow vLLM.

    The order of operations on a row of logits: `logit_bias`; stop tokens barred while below `min_tokens`;
    repetition, frequency and presence penalties; temperature; `min_p`; `top_k`; `top_p`. Log-probabilities are
    those of the model itself, before any of that.

    Raises:
        RequestError: an unknown parameter, or a value out of its range.
    """

    n: int = _parameter(1, "outputs per prompt")
    temperature: float = _parameter(1.0, "0: always the most likely token; higher: more random")
    top_p: float = _parameter(1.0, "choose among the most likely tokens that together have this probability")
    top_k: int = _parameter(0, "choose among this many most likely tokens; 0 or -1: all")
    min_p: float = _parameter(0.0, "bar tokens less likely than this share of the most likely one's probability")
    seed: int | None = _parameter(None, "same seed, same tokens; none: taken from the engine's seed")
    max_tokens: int | None = _parameter(16, "most tokens to generate; none: as many as the context holds")
    min_tokens: int = _parameter(0, "tokens to generate before the end of sequence or a stop token may come")
    stop: str | list[str] | None = _parameter(None, "texts that end the output; not part of it")
    stop_token_ids: list[int] = _parameter([], "token ids that end the output")
    include_stop_str_in_output: bool = _parameter(False, "keep the stop text in the output")
    ignore_eos: bool = _parameter(False, "go on past the end-of-sequence token")
    skip_special_tokens: bool = _parameter(True, "leave special tokens out of the text")
    logprobs: int | None = _parameter(None, "log-probabilities of this many most likely tokens per output token")
    prompt_logprobs: int | None = _parameter(None, "the same, per prompt token")
    logit_bias: dict[int, float] = _parameter(
        {}, 'added to the logits of these token ids, as a dict such as {"5": -1.5}'
    )
    presence_penalty: float = _parameter(0.0, "taken from the logits of tokens already generated")
    frequency_penalty: float = _parameter(0.0, "the same, once per occurrence")
    repetition_penalty: float = _parameter(1.0, "divides the logits of tokens in prompt or output; 1: off")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        stop = [self.stop] if isinstance(self.stop, str) else _as_list("stop", self.stop, "texts")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_list("stop_token_ids", self.stop_token_ids, "token ids"))
        object.__setattr__(self, "logit_bias", _integer_keys(self.logit_bias))

        _require_integer("n", self.n, 1, LIMITS.max_n)
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _require_integer("top_k", self.top_k, -1, None)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_integer("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _require_integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _require_integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; raise max_tokens"
            )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={shown(getattr(self, name))} must be True or False")
        _require_integer("logprobs", self.logprobs, 0, LIMITS.max_logprobs, optional=True)
        _require_integer("prompt_logprobs", self.prompt_logprobs, 0, LIMITS.max_logprobs, optional=True)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)

        if len(stop) > LIMITS.max_stop_strings:
            raise RequestError(f"stop has {len(stop)} texts; at most {LIMITS.max_stop_strings} are allowed")
        for text in stop:
            if not isinstance(text, str) or not 1 <= len(text) <= LIMITS.max_stop_string_length:
                raise RequestError(
                    f"stop={shown(text)}: each must be a text of 1 to {LIMITS.max_stop_string_length} characters"
                )
        if len(self.stop_token_ids) > LIMITS.max_stop_token_ids:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {LIMITS.max_stop_token_ids}"
            )
        for token_id in self.stop_token_ids:
            _require_integer("stop_token_ids", token_id, 0, None)
        if len(self.logit_bias) > LIMITS.max_logit_bias:
            raise RequestError(f"logit_bias has {len(self.logit_bias)} entries; at most {LIMITS.max_logit_bias}")
        for token_id, bias in self.logit_bias.items():
            _require_integer("logit_bias key", token_id, 0, None)
            _require_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def has_penalties(self) -> bool:
        """Whether choosing a token needs the tokens before it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _require_number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    bounds = f"{'above' if above else 'from'} {low:g} to {high:g}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Written so that NaN, which is neither within nor outside any bounds, is refused.
    if not is_number or not low <= value <= high or (above and value == low):
        raise RequestError(f"{name}={shown(value)} must be a number {bounds}")


def _require_integer(name: str, value: Any, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    bounds = f"from {low} to {'2**63 - 1' if high is None else high}"
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not low <= value <= (2**63 - 1 if high is None else high):
        raise RequestError(f"{name}={shown(value)} must be an integer {bounds}{' or None' if optional else ''}")


def _plain(value: Any) -> Any:
    """A number of another library, such as numpy's, as Python's own: only those cross a process border."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _as_list(name: str, values: Any, of_what: str) -> list[Any]:
    if values is None:
        return []
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RequestError(f"{name}={shown(values)} must be a list of {of_what}")
    return [_plain(value) for value in values]


def _integer_keys(logit_bias: Any) -> dict[int, float]:
    if logit_bias is None:
        return {}
    if not isinstance(logit_bias, dict):
        raise RequestError(f"logit_bias={shown(logit_bias)} must be a dict of token id to bias")
    # JSON has only texts as keys.
    return {
        int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else _plain(key): _plain(bias)
        for key, bias in logit_bias.items()
    }
