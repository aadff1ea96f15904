"""Parts that all requests share: strict types, no unknown fields, and sampling parameters with vLLM's extensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from moeserve.config.settings import LIMITS
from moeserve.errors import RequestError
from moeserve.sampling_params import SamplingParams
from moeserve.server.errors import api_error

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


@dataclass(frozen=True)
class Bounded:
    """A bound on the length of a list or an object in a request.

    A list is validated only up to its first invalid element, and the length of an object is checked before its
    elements. Otherwise pydantic would create an error for each element, and a request of a few megabytes would take
    gigabytes.
    """

    max_length: int
    min_length: int = 0

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = {**handler(source), "max_length": self.max_length, "min_length": self.min_length}
        if schema["type"] == "list":
            return schema | {"fail_fast": True}
        return core_schema.no_info_before_validator_function(self.require_length, schema)

    def require_length(self, value: Any) -> Any:
        """Return a value. Raise an error if it is an object with too many entries."""
        if isinstance(value, dict) and len(value) > self.max_length:
            raise PydanticCustomError("too_long", f"has {len(value)} entries; at most {self.max_length} are allowed")
        return value


class Body(BaseModel):
    """A part of a request. Unknown fields are refused, and named in the error."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _require_few_fields(cls, fields: Any) -> Any:
        return Bounded(LIMITS.max_fields).require_length(fields)


Metadata = Annotated[dict[str, str], Bounded(LIMITS.max_fields)]  # the client's own data


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


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
    """As in vLLM: exactly one of the first five fields is set."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Bounded(LIMITS.max_choices)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # send the usage so far with every event, as in vLLM


class TransferFields(Body):
    """Parameters of KV cache transfers between engines, as in vLLM. `SamplingParams` validates them."""

    kv_transfer_params: dict[str, Any] | None = None


class SamplingFields(TransferFields):
    """Sampling parameters, as in `SamplingParams`. For null, the checkpoint's default is used."""

    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1, le=LIMITS.max_n)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], Bounded(LIMITS.max_stop_strings)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Bounded(LIMITS.max_logit_bias)] | None = None
    response_format: ResponseFormat | None = None
    # As in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[TokenId], Bounded(LIMITS.max_stop_token_ids)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    # Accepted without effect: names of the end user and of caches, and the client's own data.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Metadata | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    def sampling_params(self, defaults: SamplingParams, **others: Any) -> SamplingParams:
        """Return the request's sampling parameters. Parameters that it omits have their defaults.

        Args:
            others: parameters that have a different form in the request.

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
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


def usage(num_prompt: int, num_cached: int, num_output: int) -> dict[str, Any]:
    """Return token counts in OpenAI's format."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
