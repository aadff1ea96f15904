"""Parts that all request bodies share: rules for fields, strict types, and sampling parameters as in vLLM.

A field is *used*, *ignored* or *refused*. Used fields are declared with their type, other fields with `Ignored` or
`Refused`. Null counts as a missing field. Fields that a class does not declare are ignored. Undeclared fields at the
top level of a request are also logged, or refused if the server is strict (`Service.begin`).
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from moeserve.config.limits import LIMITS
from moeserve.errors import RequestError
from moeserve.outputs import CompletionOutput, Logprob
from moeserve.sampling_params import SamplingParams
from moeserve.server.errors import api_error

LEAST_TOP_P = 1e-6
GUIDED_KINDS = ("json", "regex", "choice", "grammar")
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
CacheSalt = Annotated[str, Field(max_length=1024)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
# Amount of reasoning, which is passed to the chat template; "default" leaves it to the template.
Effort = Literal["default", "none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True)
class Bounded:
    """A bound on the length of a list or an object in a request.

    A list is validated only up to its first invalid element. The length of an object is checked before its elements.
    Otherwise pydantic would create an error for each element, and a request of a few megabytes would take gigabytes.
    """

    max_length: int
    min_length: int = 0

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = {**handler(source), "max_length": self.max_length, "min_length": self.min_length}
        if schema["type"] == "list":
            return schema | {"fail_fast": True}
        return core_schema.no_info_before_validator_function(self.require_length, schema)

    def require_length(self, value: Any) -> Any:
        """Return a value. Raise an error if the value is an object with too many entries."""
        if isinstance(value, dict) and len(value) > self.max_length:
            raise PydanticCustomError("too_long", f"has {len(value)} entries; at most {self.max_length} are allowed")
        return value


@dataclass(frozen=True)
class Ignored:
    """Marks a field that has no effect on the answer. Any value is accepted, and not read."""

    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.any_schema()


@dataclass(frozen=True)
class Refused:
    """Marks a field that would change the answer in a way that is not supported.

    Values without an effect are valid: null, false, 0, and empty texts, lists and objects.
    """

    why: str
    harmless: tuple[Any, ...] = ()  # further accepted values, because they request the usual behaviour
    error_code: str | None = None  # code in the error's details that Anthropic's clients evaluate

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._require_harmless, core_schema.any_schema())

    def _require_harmless(self, value: Any) -> Any:
        if value and value not in self.harmless:
            raise PydanticCustomError(
                UNSUPPORTED, "is not supported here: {why}", {"why": self.why, "code": self.error_code}
            )
        return value


def _without_empty(value: Any) -> Any:
    """Return a field's value. An empty text or object becomes None. Empty texts in a list are left out."""
    if isinstance(value, list) and len(value) <= LIMITS.max_stop_strings:
        return [each for each in value if each != ""]
    return None if value in ("", {}) else value


def _limit(value: Any) -> Any:
    """Return a maximum number of tokens. -1 becomes None, as in the APIs of llama.cpp and LM Studio."""
    return None if value == -1 else value


EMPTY_IS_NULL = BeforeValidator(_without_empty)
MINUS_ONE_IS_NULL = BeforeValidator(_limit)
# 0 is replaced by a tiny value, which has the same effect: only the most likely token remains.
TopP: TypeAlias = Annotated[float, AfterValidator(lambda value: LEAST_TOP_P if value == 0 else value)]
MaxTokens: TypeAlias = Annotated[Annotated[int, Field(ge=1)] | None, MINUS_ONE_IS_NULL]
Stops: TypeAlias = Annotated[list[str], Bounded(LIMITS.max_stop_strings)]
UNSUPPORTED = "extra_forbidden"  # type of the error for a refused field


class Body(BaseModel):
    """A part of a request. Null counts as a missing field. Unknown fields are ignored.

    Integers may be written as floats such as 100.0, because the languages of some clients know no other numbers in
    maps.
    """

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _plain_fields(cls, fields: Any) -> Any:
        fields = Bounded(LIMITS.max_fields).require_length(fields)
        if not isinstance(fields, dict):
            return fields
        integral = {name: int(fields[name]) for name in _integers(cls) if _is_integral_float(fields.get(name))}
        fields = fields | integral if integral else fields
        if None not in fields.values():
            return fields
        kept = _fields_with_null(cls)
        return {name: value for name, value in fields.items() if value is not None or name in kept}


@functools.cache
def _fields_with_null(body: type[Body]) -> frozenset[str]:
    """Return the names of fields for which null is different from the default."""
    return frozenset(
        field.alias or name
        for name, field in body.model_fields.items()
        if field.default is not None and not field.is_required() and types.NoneType in get_args(field.annotation)
    )


@functools.cache
def _integers(body: type[Body]) -> frozenset[str]:
    """Return the names of fields that may be integers."""
    return frozenset(
        field.alias or name for name, field in body.model_fields.items() if int in _alternatives(field.annotation)
    )


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, without metadata."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [found for each in get_args(annotation) for found in _alternatives(each)]
    return [annotation]


def _is_integral_float(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


class RequestBody(Body):
    """The top level of a request. Unknown fields are kept, so that they can be logged or refused."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None

    @property
    def unknown_fields(self) -> list[str]:
        """Names of the unknown fields whose values are not null, false, 0 or empty."""
        return [name for name, value in (self.model_extra or {}).items() if value]


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """Structured outputs as in vLLM. Exactly one of the first five fields must be set."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Bounded(LIMITS.max_choices)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: Annotated[Any, Ignored("there is one backend"), Field(exclude=True)] = None
    disable_additional_properties: Annotated[
        Any, Refused("write `additionalProperties` into the schema"), Field(exclude=True)
    ] = None
    whitespace_pattern: Annotated[Any, Refused("use `disable_any_whitespace`"), Field(exclude=True)] = None
    structural_tag: Annotated[Any, Refused("use `grammar`, or tools"), Field(exclude=True)] = None


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, Ignored("nothing is added to events")] = None
    continuous_usage_stats: bool = False  # send the usage so far with every event, as in vLLM


class TransferFields(RequestBody):
    """Parameters of KV cache transfers between engines, as in vLLM. `SamplingParams` validates them."""

    kv_transfer_params: dict[str, Any] | None = None


class ClientFields(RequestBody):
    """Fields that describe the client, and hints to a provider."""

    user: Annotated[Any, Ignored("a name of the end user")] = None
    safety_identifier: Annotated[Any, Ignored("a name of the end user")] = None
    metadata: Annotated[Any, Ignored("the client's own data")] = None
    prompt_cache_key: Annotated[Any, Ignored("prefixes are always cached; `cache_salt` separates them")] = None
    prompt_cache_retention: Annotated[Any, Ignored("prefixes are cached as long as there is room")] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None


class SamplingFields(TransferFields, ClientFields):
    """Sampling parameters, as in `SamplingParams`. A null is replaced by the checkpoint's default."""

    temperature: float | None = None
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1, le=LIMITS.max_n)] | None = None
    seed: Seed | None = None
    stop: Annotated[str | Stops | None, EMPTY_IS_NULL] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Bounded(LIMITS.max_logit_bias)] | None = None
    response_format: Annotated[ResponseFormat | None, EMPTY_IS_NULL] = None
    # vLLM's fields.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[TokenId], Bounded(LIMITS.max_stop_token_ids)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # guided_*: older names of fields of structured_outputs
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Bounded(LIMITS.max_choices)] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: Annotated[Any, Ignored("there is one")] = None
    guided_whitespace_pattern: Annotated[Any, Refused("use `disable_any_whitespace` of `structured_outputs`")] = None
    cache_salt: CacheSalt | None = None
    store: Annotated[Any, Ignored("answers are not stored")] = None
    priority: Annotated[Any, Ignored("requests of all keys take turns")] = None
    request_id: Annotated[Any, Ignored("the header `x-request-id` names a request")] = None
    use_beam_search: Annotated[Any, Refused("outputs are sampled")] = None
    length_penalty: Annotated[Any, Refused("it belongs to beam search", harmless=(1,))] = None
    bad_words: Annotated[list[str], Bounded(LIMITS.max_stop_strings)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Bounded(LIMITS.max_allowed_token_ids)] | None = None
    logits_processors: Annotated[Any, Refused("code of requests is never run")] = None
    truncate_prompt_tokens: int | None = None
    routed_experts_prompt_start: int | None = None
    early_stopping: Annotated[Any, Refused("it belongs to beam search")] = None
    spaces_between_special_tokens: Annotated[Any, Ignored("no spaces are added between tokens")] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def structure(self) -> StructuredOutputs | None:
        """The value of structured_outputs, including fields that are given by their older names."""
        given = {kind: value for kind in GUIDED_KINDS if (value := getattr(self, f"guided_{kind}")) is not None}
        if not given:
            return self.structured_outputs
        fields = {} if self.structured_outputs is None else self.structured_outputs.model_dump(by_alias=True)
        return StructuredOutputs(**fields | given)

    def sampling_params(self, defaults: SamplingParams, **others: Any) -> SamplingParams:
        """Return the request's sampling parameters. Omitted parameters have their value in `defaults`.

        Args:
            others: further parameters, whose form in the request is different.

        Raises:
            ApiError: a value is out of range.
        """
        given = {name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        return given_params(defaults, given | others)


def given_params(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Return the default sampling parameters with some values replaced.

    Raises:
        ApiError: a value is out of range.
    """
    try:
        return dataclasses.replace(defaults, **given)
    except RequestError as error:
        raise api_error(error) from None


_SAMPLING_NAMES = SamplingFields.model_fields.keys() & {field.name for field in dataclasses.fields(SamplingParams)}
_SAMPLING_NAMES -= {"structured_outputs"}  # see output_format.py


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


def finite(logprob: float) -> float:
    """Return a log-probability for JSON. Minus infinity, of an excluded token, becomes -9999, as in vLLM."""
    return max(logprob, -9999.0)


def version_triples(output: CompletionOutput) -> list[tuple[str, int, int]]:
    """Return the weights of an output's tokens for JSON: version, first token and end of each span."""
    return [(span.version, span.start, span.stop) for span in output.weight_versions]


def by_position(prompt_logprobs: Sequence[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's format."""
    return [
        None
        if position is None
        else {str(token_id): {**vars(at), "logprob": finite(at.logprob)} for token_id, at in position.items()}
        for position in prompt_logprobs
    ]


def usage(num_prompt: int, num_cached: int, num_written: int, num_output: int) -> dict[str, Any]:
    """Return token counts in OpenAI's format.

    Args:
        num_prompt: prompt tokens.
        num_cached: prompt tokens found in the prefix cache.
        num_written: prompt tokens written to the prefix cache.
        num_output: generated tokens.
    """
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": num_written},
    }
