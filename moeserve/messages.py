"""What crosses between the towers and, later, between processes: requests in, plans down, results up, tokens out.

Plain data only: token ids and block ids are Python integers, never tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from moeserve.config import LIMITS
from moeserve.errors import RequestError, nearest, shown
from moeserve.telemetry.expert_load import LoadWindow

FinishReason = Literal["stop", "length", "abort"]
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


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A prompt with `n` > 1 becomes n requests."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # 0 to 2**64 - 1: params.seed, or derived from the engine's
    eos_token_ids: list[int] = []  # empty where params.ignore_eos
    cache_salt: str = ""  # requests share cached prefixes only where their salts are equal


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the token that follows a chunk is chosen."""

    params: SamplingParams
    seed: int
    position: int  # how many output tokens came before; (seed, position) decides a random choice
    barred_token_ids: list[int] = []  # may not be chosen (stop tokens, while below min_tokens)
    prompt_token_ids: list[int] = []  # filled only where params.has_penalties
    output_token_ids: list[int] = []  # filled only where params.has_penalties


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one request that one step computes: a piece of its prompt, or its newest token."""

    token_ids: list[int]
    start: int  # position of the first of them in the request
    block_ids: list[int]  # KV blocks of positions 0 to start + len(token_ids) - 1
    sample: SampleSpec | None = None  # None: the rest of the prompt comes first
    num_prompt_logprobs: int | None = None
    prompt_targets: list[int] = []  # tokens that rows 0, 1, ... should predict; filled only where asked for


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one step computes. Complete in itself: a rank keeps nothing of a request from step to step."""

    step: int
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def is_decode_only(self) -> bool:
        """Whether each request computes one token."""
        return all(len(chunk.token_ids) == 1 for chunk in self.chunks)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: of the token chosen or given (first), then of the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1: the most likely


class ChunkResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk gave: the token that follows it, where one was asked for."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = []  # one per prompt target


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave, chunk by chunk in the order of the plan."""

    step: int
    chunks: list[ChunkResult]
    load: LoadWindow | None = None  # of the steps before it, where it was agreed to collect that
    placement_epoch: int = 0  # the newest placement of experts whose weights this rank holds


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """News of one request after a step: its new tokens, or its end."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []  # complete, once, with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it; None for the end-of-sequence token
    num_cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache
    error: str | None = None  # why it ended before its time; finish_reason is then "abort"


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """To a replica: serve this request. Its id is no other's, now or later."""

    request: Request


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """To a replica: end this request now. Means nothing where it has ended already."""

    request_id: str


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """To a replica: another one has work. It cuts the wait for the next heartbeat; nothing depends on it."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """To every replica, and the last message to each: end all requests, and leave together."""


class CollectLoad(msgspec.Struct, frozen=True, tag="collect-load"):
    """To the first replica: have all ranks tell what their experts were given, now."""


ReplicaMessage: TypeAlias = AddRequest | AbortRequest | Wake | CollectLoad | Shutdown


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a replica is, for whoever chooses one for a new request, and for those who watch it."""

    num_free_blocks: int  # of KV cache, those of the prefix cache included
    num_waiting: int  # requests
    num_running: int  # requests
    step: int  # agreements made so far; it grows while the replicas are alive, even if they idle


@dataclass(frozen=True)
class Logprob:
    """Log-probability (natural logarithm) of one token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a prompt, complete so far."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and all its outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0


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
