"""Sampling parameters: `SamplingParams` for users, and `RequestParams` for the engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from types import NoneType
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from moeserve.config.descriptions import argument_section, bound, extended
from moeserve.config.limits import LIMITS
from moeserve.config.vllm_options import SAMPLING_PARAMETERS, require_harmless
from moeserve.errors import RequestError, nearest, shown
from moeserve.structured_outputs import OutputGrammar, StructuredOutputsParams, checked

T = TypeVar("T")
Check = Callable[[str, Any], Any]  # takes a parameter's name and value; returns the normalised value
MAX_INTEGER = 2**63 - 1
ALL_TOKENS = -1  # as a number of log-probabilities: the size of the vocabulary
RANDOM_SEED = -1  # as a request's seed: a new seed for each output
LONGEST_PROMPT = -1  # as a number of tokens: as many as the context holds
GuidedDecodingParams = StructuredOutputsParams  # former name of StructuredOutputsParams in vLLM
# "host:port" of a rank; the port is below 2**16.
PORT = r"(?:[0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
KvAddress = Annotated[str, msgspec.Meta(pattern=rf"^[A-Za-z0-9_.:%\[\]-]+:{PORT}\Z", max_length=255)]


class RequestOutputKind(Enum):
    """The outputs that a stream yields."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # the part that is new since the last output
    FINAL_ONLY = 2  # only the complete output


class RequestParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters of one request that the engine needs: an immutable, validated copy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: OutputGrammar | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # the last token of a tuple may not follow its other tokens
    allowed_bits: bytes = b""  # bit i % 8 of byte i // 8 is set if token i is allowed; empty: all are
    forced_token_ids: tuple[int, ...] = ()  # if not empty: the tokens of the output
    routed_experts_prompt_start: int = 0

    @property
    def needs_output(self) -> bool:
        """True if the choice of a token depends on the values of previous tokens."""
        return self.has_penalties or self.grammar is not None or any(len(tokens) > 1 for tokens in self.bad_token_ids)

    @property
    def changes_scores(self) -> bool:
        """True if tokens are chosen from other scores than the logits divided by the temperature."""
        has_bias = self.has_penalties or self.logit_bias
        has_bars = self.grammar is not None or self.bad_token_ids or self.allowed_bits or self.forced_token_ids
        return bool(has_bias or has_bars)

    @property
    def has_penalties(self) -> bool:
        """True if the scores of tokens depend on how often the tokens occurred before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The transfer of a prompt's KV cache between engines, in vLLM's terms.

    Exactly one of the first two fields is true.
    """

    do_remote_decode: bool = False  # compute the prompt, and keep its blocks for another engine
    do_remote_prefill: bool = False  # load the blocks from another engine, which keeps them
    remote_handle: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{0,128}\Z")] = ""
    remote_addresses: Annotated[list[KvAddress], msgspec.Meta(max_length=LIMITS.max_kv_addresses)] = []
    remote_num_blocks: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0


@dataclass(frozen=True)
class _Numbers:
    """A check for numbers in a range."""

    allowed: str  # the range in words, as messages and `help` show it
    accepts: Callable[[Any], bool]

    def __call__(self, name: str, value: Any) -> Any:
        value = _plain(value)
        if not self.accepts(value):
            raise RequestError(f"{name}={shown(value)} must be {self.allowed}")
        return value


def _number(low: float, high: float, *, above: bool = False) -> Check:
    def accepts(value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # NaN fails every comparison, so it is refused too.
        return is_number and low <= value <= high and not (above and value == low)

    return _Numbers(f"a number {'above' if above else 'from'} {bound(low)} to {bound(high)}", accepts)


def _integer(low: int, high: int = MAX_INTEGER, *, optional: bool = False) -> Check:
    def accepts(value: Any) -> bool:
        return (value is None and optional) or (type(value) is int and low <= value <= high)

    return _Numbers(f"an integer from {bound(low)} to {bound(high)}{' or None' if optional else ''}", accepts)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name}={shown(value)} must be True or False")
    return value


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        raise RequestError(f"{name}={shown(value)} must be a RequestOutputKind")
    return value


def _prompt_length(name: str, value: Any) -> int | None:
    if value == 0:
        raise RequestError(f"{name}=0 would leave no prompt; give -1, a positive integer or None")
    number: int | None = _integer(-1, optional=True)(name, value)
    return number


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else _as_list(name, value, "texts", LIMITS.max_stop_strings)
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= LIMITS.max_stop_string_length:
            raise RequestError(
                f"{name}={shown(text)}: each must be a text of 1 to {LIMITS.max_stop_string_length} characters"
            )
    return texts


def _token_ids(most: int, *, optional: bool = False) -> Check:
    def check(name: str, value: Any) -> list[int] | None:
        if value is None and optional:
            return None
        token_ids = [_integer(0)(name, each) for each in _as_list(name, value, "token ids", most)]
        if optional and not token_ids:
            raise RequestError(f"{name}=[] would leave no token to generate; give one or more, or None")
        return token_ids

    return check


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name}={shown(value)} must be a dict of token id to bias")
    if len(value) > LIMITS.max_logit_bias:
        raise RequestError(f"{name} has {len(value)} entries; at most {LIMITS.max_logit_bias} are allowed")
    checked = {}
    for key, bias in value.items():
        # JSON has only texts as keys.
        key = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        token_id = _integer(0)(f"{name} key", key)
        checked[token_id] = _number(-100.0, 100.0)(f"{name}[{token_id}]", bias)
    return checked


def _kv_transfer_params(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        transfer = msgspec.convert(value, KvTransferParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"{name}={shown(value)}: {error}") from None
    if transfer.do_remote_decode == transfer.do_remote_prefill:
        raise RequestError(f"{name}={shown(value)} must have either do_remote_decode or do_remote_prefill as true")
    blocks = (transfer.remote_handle, transfer.remote_addresses, transfer.remote_num_blocks)
    if transfer.do_remote_decode and any(blocks):
        raise RequestError(f"{name}={shown(value)}: do_remote_decode takes no blocks; leave the keys remote_* out")
    if transfer.do_remote_prefill and not all(blocks):
        raise RequestError(
            f"{name}={shown(value)}: do_remote_prefill needs remote_handle, remote_addresses and remote_num_blocks"
        )
    return {key: each for key, each in msgspec.to_builtins(transfer).items() if each}


def _as_list(name: str, values: Any, of_what: str, most: int) -> list[Any]:
    if values is None:
        return []
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RequestError(f"{name}={shown(values)} must be a list of {of_what}")
    found = list(values)
    if len(found) > most:
        raise RequestError(f"{name} has {len(found)} entries; at most {most} are allowed")
    return found


def _plain(value: Any) -> Any:
    """Return a number of another library, such as numpy, as a Python number."""
    # The usual types come first: checks against the abstract `Real` would take half the time of copying parameters.
    if type(value) in (int, float, bool, NoneType) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _parameter(default: Any, check: Check, help: str) -> Any:
    metadata = {"help": help, "check": check}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=type(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


_OTHER_NAMES = {"guided_decoding": "structured_outputs"}  # former names of vLLM


def _unknown(name: str, known: Iterable[str]) -> str:
    hint = nearest(name, known, otherwise="help(moeserve.SamplingParams) describes all")
    return f"unknown sampling parameter {name!r}: {hint}"


def _require_harmless(name: str, value: Any, num_outputs: int) -> None:
    """Raise RequestError for a value of a parameter of SAMPLING_PARAMETERS that would change the output."""
    if name != "best_of" or value != num_outputs:
        require_harmless(SAMPLING_PARAMETERS, **{name: value})


def _refusing_unknown_names(cls: type[T]) -> type[T]:
    """Make a dataclass suggest the nearest known keyword for an unknown one, and accept vLLM's harmless parameters."""
    generated_init = cls.__init__
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    accepted = {*known, *_OTHER_NAMES}

    @functools.wraps(generated_init)
    def init(self: Any, /, **parameters: Any) -> None:
        own = {}
        for name, value in parameters.items():
            if name in SAMPLING_PARAMETERS:
                _require_harmless(name, value, parameters.get("n", 1))
                continue
            if name not in accepted:
                raise RequestError(_unknown(name, known))
            own_name = _OTHER_NAMES.get(name, name)
            if value is not None or own_name == name:
                if own_name in own:
                    raise RequestError(f"{own_name} is given twice, also as {name}", parameter=name)
                own[own_name] = value
        generated_init(self, **own)

    cls.__init__ = init  # type: ignore[assignment, method-assign]
    return cls


@_refusing_unknown_names
@dataclass(kw_only=True)
class SamplingParams:
    """The parameters that determine the tokens of a request and its end. Names and meaning follow vLLM.

    Attributes may be assigned: a new value is validated at once, and all values together when a request is submitted.
    A request keeps the values that it was submitted with.

    The order of operations on a row of logits: `logit_bias`; repetition, frequency and presence penalties; exclusion of
    tokens by `bad_words`, `allowed_token_ids`, `structured_outputs` and, for stop tokens, `min_tokens`; temperature;
    `min_p`; `top_k`; `top_p`. Log-probabilities are those of the model, before all these operations.

    Other parameters of vLLM are accepted with values that change nothing, such as `best_of=1`, and refused otherwise.

    One engine may compute a prompt and another engine its output. With `kv_transfer_params={"do_remote_decode": True}`,
    the first engine computes the prompt and one token, and keeps the prompt's KV cache blocks for a while. Pass the
    `kv_transfer_params` of its `RequestOutput`, with the same prompt, to the second engine, which then loads them.

    Raises:
        RequestError: an unknown parameter, or a value out of its range.
    """

    n: int = _parameter(1, _integer(1, LIMITS.max_n), "outputs per prompt")
    temperature: float = _parameter(1.0, _number(0.0, 100.0), "0: always the most likely token; higher: more random")
    top_p: float = _parameter(
        1.0, _number(0.0, 1.0, above=True), "sample from the most likely tokens that together have this probability"
    )
    top_k: int = _parameter(0, _integer(-1), "sample from this many most likely tokens; 0 or -1: all")
    min_p: float = _parameter(
        0.0, _number(0.0, 1.0), "exclude tokens less likely than this share of the most likely one's probability"
    )
    seed: int | None = _parameter(
        None,
        _integer(-(2**63), 2**64 - 1, optional=True),
        "equal seeds give equal tokens; none: from the engine's seed; -1: random",
    )
    max_tokens: int | None = _parameter(
        16, _integer(1, optional=True), "most tokens to generate; none: as many as the context holds"
    )
    min_tokens: int = _parameter(0, _integer(0), "tokens to generate before an end-of-sequence or stop token may come")
    stop: str | list[str] | None = _parameter([], _texts, "text that ends the output; not part of it")
    stop_token_ids: list[int] = _parameter([], _token_ids(LIMITS.max_stop_token_ids), "token id that ends the output")
    include_stop_str_in_output: bool = _parameter(False, _boolean, "keep the stop text in the output")
    ignore_eos: bool = _parameter(False, _boolean, "continue after the end-of-sequence token")
    output_kind: RequestOutputKind = _parameter(
        RequestOutputKind.CUMULATIVE, _output_kind, "what a stream yields: CUMULATIVE, DELTA or FINAL_ONLY"
    )
    skip_special_tokens: bool = _parameter(True, _boolean, "leave special tokens out of the text")
    detokenize: bool = _parameter(True, _boolean, "return text; otherwise only token ids")
    truncate_prompt_tokens: int | None = _parameter(
        None, _prompt_length, "use only this many tokens at the end of the prompt; -1: as many as the context holds"
    )
    logprobs: int | None = _parameter(
        None,
        _integer(ALL_TOKENS, LIMITS.max_logprobs, optional=True),
        "return log-probabilities of this many most likely tokens per output token; -1: of all",
    )
    prompt_logprobs: int | None = _parameter(
        None, _integer(ALL_TOKENS, LIMITS.max_logprobs, optional=True), "the same, per prompt token"
    )
    logit_bias: dict[int, float] = _parameter(
        {}, _logit_bias, 'added to the logits of these token ids, as a dict such as {"5": -1.5}'
    )
    bad_words: list[str] = _parameter(
        [],
        _texts,
        "text that is not generated: the last token of its tokens, with or without a space before them, may not follow "
        "the others",
    )
    allowed_token_ids: list[int] | None = _parameter(
        None, _token_ids(LIMITS.max_allowed_token_ids, optional=True), "the only token ids that may be generated"
    )
    trace_decode_token_ids: list[int] | None = _parameter(
        None,
        _token_ids(LIMITS.max_token_ids, optional=True),
        "the token ids to generate, for example to read their logprobs; they determine max_tokens, and no token ends "
        "the output before",
    )
    routed_experts_prompt_start: int = _parameter(
        0, _integer(0), "with enable_return_routed_experts: leave out the experts of this many tokens of the prompt"
    )
    presence_penalty: float = _parameter(
        0.0, _number(-2.0, 2.0), "subtracted from the logits of tokens already generated"
    )
    frequency_penalty: float = _parameter(0.0, _number(-2.0, 2.0), "the same, once per occurrence")
    repetition_penalty: float = _parameter(
        1.0, _number(0.0, 100.0, above=True), "divides the logits of tokens in prompt or output; 1: off"
    )
    structured_outputs: StructuredOutputsParams | None = _parameter(
        None, checked, 'the texts that an output may be, as a dict such as {"choice": ["yes", "no"]}'
    )
    kv_transfer_params: dict[str, Any] | None = _parameter(
        None,
        _kv_transfer_params,
        'keep the keys and values of the prompt for another engine ({"do_remote_decode": true}), or load those that '
        "another one keeps (the kv_transfer_params of its output)",
    )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SAMPLING_PARAMETERS:
            _require_harmless(name, value, self.n)
            return
        name = _OTHER_NAMES.get(name, name)
        if name not in _CHECKS:
            raise RequestError(_unknown(name, _CHECKS))
        try:
            object.__setattr__(self, name, _CHECKS[name](name, value))
        except RequestError as error:
            error.parameter = name
            raise

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; raise max_tokens",
                parameter="min_tokens",
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={shown(self.stop)} needs the text that detokenize=False leaves out; use stop_token_ids",
                parameter="stop",
            )
        if self.trace_decode_token_ids is not None and self.structured_outputs is not None:
            raise RequestError(
                "trace_decode_token_ids determine every token, so structured_outputs cannot; leave one of them out",
                parameter="trace_decode_token_ids",
            )

    @classmethod
    def from_optional(cls, /, **parameters: Any) -> SamplingParams:
        """Return parameters from values. None stands for the default, except that `max_tokens=None` means no limit.

        Raises:
            RequestError: as for the class.
        """
        return cls(**{name: value for name, value in parameters.items() if value is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """Do the same as `copy`, under vLLM's name."""
        return self.copy()

    def copy(self) -> SamplingParams:
        """Return a copy that shares nothing with this object, after checking all values again.

        Raises:
            RequestError: values do not fit each other, or a list was changed in place to a wrong value.
        """
        return dataclasses.replace(self)

    @property
    def kv_transfer(self) -> KvTransferParams | None:
        """The value of `kv_transfer_params` as an object; None if it is not set."""
        if self.kv_transfer_params is None:
            return None
        return msgspec.convert(self.kv_transfer_params, KvTransferParams)

    def for_prompt(self) -> SamplingParams:
        """Return parameters for computing only the prompt, and one token that is not used."""
        return SamplingParams(
            max_tokens=1, seed=self.seed, output_kind=self.output_kind, kv_transfer_params=self.kv_transfer_params
        )

    def for_engine(self, *, vocab_size: int = 0, bad_token_ids: Iterable[Sequence[int]] = ()) -> RequestParams:
        """Return the parameters that the engine needs.

        Args:
            vocab_size: number of tokens in the vocabulary, for parameters that concern all tokens.
            bad_token_ids: the tokens of `bad_words`.
        """
        own: dict[str, Any] = {
            "stop_token_ids": tuple(self.stop_token_ids),
            "logit_bias": {**self.logit_bias},
            "grammar": None if self.structured_outputs is None else self.structured_outputs.for_engine(),
            "logprobs": vocab_size if self.logprobs == ALL_TOKENS else self.logprobs,
            "prompt_logprobs": vocab_size if self.prompt_logprobs == ALL_TOKENS else self.prompt_logprobs,
            "bad_token_ids": tuple(map(tuple, bad_token_ids)),
            "allowed_bits": b"" if self.allowed_token_ids is None else _bits(self.allowed_token_ids, vocab_size),
            "forced_token_ids": (),
        }
        if self.trace_decode_token_ids is not None:
            forced = tuple(self.trace_decode_token_ids)
            own |= {"forced_token_ids": forced, "max_tokens": len(forced), "min_tokens": 0, "stop_token_ids": ()}
        names = RequestParams.__struct_fields__
        return RequestParams(**own, **{name: getattr(self, name) for name in names if name not in own})


def _bits(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """Return token ids in the form of `RequestParams.allowed_bits`."""
    is_allowed = np.zeros(vocab_size, np.bool_)
    is_allowed[token_ids] = True
    return np.packbits(is_allowed, bitorder="little").tobytes()


_CHECKS: dict[str, Check] = {field.name: field.metadata["check"] for field in dataclasses.fields(SamplingParams)}


def _allowed_values(field: dataclasses.Field[Any]) -> str:
    check = field.metadata["check"]
    return check.allowed if isinstance(check, _Numbers) else str(field.type)


SamplingParams.__doc__ = extended(SamplingParams.__doc__, [argument_section("Args", SamplingParams, _allowed_values)])


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`, with vLLM's names.

    Raises:
        RequestError: a value is out of range.
    """

    beam_width: int  # candidates of each prompt, and maximum number of outputs
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # no effect: candidates are compared by the model's own log-probabilities
    length_penalty: float = 1.0  # the log-probability of a sequence is divided by its length to this power
    include_stop_str_in_output: bool = False  # keep the end-of-sequence token in the text

    def __post_init__(self) -> None:
        for name, most in (("beam_width", LIMITS.max_logprobs // 2), ("max_tokens", 2**31 - 1)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise RequestError(f"{name}={shown(value)} must be an integer from 1 to {most}", parameter=name)
