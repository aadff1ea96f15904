"""Checked access to the values of a checkpoint's config. Errors name the file, the key and the value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from moeserve.config.settings import DtypeName
from moeserve.errors import CheckpointError, shown
from moeserve.layers.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PairScaling,
    ProportionalScaling,
    RotarySpec,
    Scaling,
    YarnScaling,
)
from moeserve.models.checkpoint.config_overrides import with_overrides

LARGEST_NUMBER = 1e30
# Keys that may hold the config of the language model. The config of a thinker also describes other models.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_BESIDE_TEXT_PART = ("dtype", "torch_dtype", "quantization_config", "eos_token_id")
TIED = "tie_word_embeddings"
MAX_INTEGER = 2**31 - 1
ORIGINAL_CONTEXT = "original_max_position_embeddings"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, or does not hold an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


class ConfigValues:
    """The values of a config.json, of an object in it, or of the metadata of a GGUF file.

    Each getter checks type and range, and raises CheckpointError with file, key and value. A missing key has the value
    in `defaults`. A getter's own default is used for a null, and for a missing key that is not in `defaults`.
    """

    def __init__(
        self,
        path: Path,
        values: dict[str, Any],
        prefix: str = "",
        *,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.path = path
        self.values = values  # values in the file, without defaults
        self.defaults = defaults
        self._prefix = prefix  # prefix of keys in error messages

    @classmethod
    def of_folder(cls, folder: Path, hf_overrides: Mapping[str, Any] | None = None) -> ConfigValues:
        """Read the config.json of a checkpoint folder, and apply a user's overrides."""
        path = folder / "config.json"
        return cls(path, with_overrides(read_json(path), hf_overrides or {}))

    def replaced(self, values: dict[str, Any]) -> ConfigValues:
        """Return a config with other values, but the same path and defaults."""
        return ConfigValues(self.path, values, self._prefix, defaults=self.defaults)

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigValues:
        """Return this config with other defaults for missing keys."""
        return ConfigValues(self.path, self.values, self._prefix, defaults=defaults)

    def get(self, key: str) -> Any:
        """Return an unchecked value; None if the key is null, or missing and without a default."""
        return self.values[key] if key in self.values else self.defaults.get(key)

    def wrong(self, key: str, why: str) -> CheckpointError:
        """Return an error that names file, key and value, followed by `why`."""
        origin = " (the default, because the key is missing)" if key in self.defaults and key not in self.values else ""
        return CheckpointError(f"{self.path}: {self._prefix}{key}={shown(self.get(key))}{origin} {why}")

    def missing(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._prefix}{key} is missing")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"must be an integer from {low} to {high}")
        return value

    def optional_integer(self, key: str, *, low: int = 1, high: int = MAX_INTEGER) -> int | None:
        return None if self.get(key) is None else self.integer(key, low=low, high=high)

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self._get(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not above < value < LARGEST_NUMBER:
            raise self.wrong(key, f"must be a number above {above:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Return a flag. Null means false, as in transformers."""
        value = False if key in self.values and self.values[key] is None else self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def refuse(self, key: str) -> None:
        """Raise an error if the key is set."""
        if self.get(key) is not None:
            raise self.wrong(key, "is not supported")

    def require(self, key: str, *supported: object) -> None:
        """Raise an error unless the value is supported. A missing value counts as the first supported one."""
        if self._get(key, supported[0]) not in supported:
            raise self.wrong(key, f"is not supported; supported: {', '.join(map(repr, supported))}")

    def architectures(self) -> list[str]:
        """Return the names of the model's classes, usually one. The list is empty for null or if the key is missing."""
        names = self.values.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.wrong("architectures", "must be a list of the names of model classes")
        return names

    def architecture(self) -> str:
        """Return the name of the model's class; the first name if there are several."""
        names = self.architectures()
        if not names:
            raise self.wrong("architectures", "must name a model class")
        return names[0]

    def dtype(self, default: DtypeName) -> DtypeName:
        """Return the dtype of the weights, written as in JSON or as torch prints it."""
        key = "dtype" if "dtype" in self.values else "torch_dtype"
        value = self.values.get(key)
        if value is None or value == "auto":
            return default
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if name not in ("float32", "bfloat16", "float16"):
            raise self.wrong(key, "must be float32, bfloat16 or float16")
        return cast(DtypeName, name)

    def token_ids(self, key: str, *, high: int = MAX_INTEGER) -> list[int]:
        """Return the token ids under a key, which holds one id or a list. Null and -1 (old checkpoints) give no ids."""
        value = self.values.get(key)
        if value is None or value == -1:
            return []
        token_ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and 0 <= token_id <= high for token_id in token_ids):
            raise self.wrong(key, f"must be a token id from 0 to {high}, a list of them, or null")
        return list(token_ids)

    def token_id(self, key: str, *, high: int = MAX_INTEGER) -> int | None:
        token_ids = self.token_ids(key, high=high)
        if len(token_ids) > 1:
            raise self.wrong(key, "must be one token id or null")
        return token_ids[0] if token_ids else None

    def key_of(self, *names: str) -> str:
        """Return the name among `names` under which this config stores a value.

        If the config uses none of the names, return the name that has a default, else the first name.
        """
        used = [name for name in names if self.values.get(name) is not None]
        for name in used[1:]:
            if self.values[name] != self.values[used[0]]:
                raise self.wrong(name, f"contradicts {used[0]}={shown(self.values[used[0]])}; remove one of them")
        return (used or [name for name in names if name in self.defaults] or names)[0]

    def flags_of_layers(self, key: str, names: tuple[Any, Any], num_layers: int) -> list[bool] | None:
        """Return a flag for each layer: True where the list under `key` has the second of two names or numbers.

        Return None if there is no list.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers or not all(name in names for name in value):
            raise self.wrong(key, f"must list {names[0]!r} or {names[1]!r} for each of the {num_layers} layers")
        return [name == names[1] for name in value]

    def object(self, key: str) -> ConfigValues | None:
        """Return the values of a nested object in the config; None if the key is missing."""
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, dict):
            raise self.wrong(key, "must be an object")
        return ConfigValues(self.path, values, f"{self._prefix}{key}.")

    def layer_numbers(self, key: str, num_layers: int, *, first: int = 0) -> frozenset[int]:
        """Return the layer numbers listed under `key`, empty without a list. The lowest valid number is `first`."""
        value = self.get(key) or []
        is_list = isinstance(value, list) and all(
            type(layer) is int and first <= layer < first + num_layers for layer in value
        )
        if not is_list:
            raise self.wrong(key, f"must list layers from {first} to {first + num_layers - 1}")
        return frozenset(value)

    def text_part(self) -> ConfigValues:
        """Return the values of the language model if the config also describes other models, else the config itself.

        Some values are taken from the outer object: dtype, quantisation, token ids, and `tie_word_embeddings` if the
        language model's config does not set this key.
        """
        key = next((key for key in _TEXT_PARTS if self.values.get(key) is not None), None)
        if key is None:
            return self
        own = self.values[key]
        if not isinstance(own, dict):
            raise self.wrong(key, "must be an object")
        beside = {key: self.values[key] for key in _BESIDE_TEXT_PART if self.values.get(key) is not None}
        if own.get(TIED) is None and TIED in self.values:
            beside[TIED] = self.values[TIED]
        return ConfigValues(self.path, own | beside).text_part()

    def of_layer_type(self, layer_type: str) -> ConfigValues:
        """Return this config with one layer type's rotary settings; unchanged if all types share their settings."""
        settings = self.rotary_settings().values
        if not isinstance(settings.get(layer_type), dict):
            return self
        return self.replaced(self.values | {"rope_parameters": settings[layer_type]})

    def rotary_settings(self) -> ConfigValues:
        """Return the object under `rope_parameters` (transformers 5) or `rope_scaling` (earlier versions)."""
        used = [key for key in ("rope_parameters", "rope_scaling") if self.values.get(key) is not None]
        key = used[0] if used else "rope_parameters"
        settings = self.values[key] if used else self.defaults.get(key, {})
        if not isinstance(settings, dict):
            raise self.wrong(key, "must be an object or null")
        if "rope_type" not in settings:
            settings = {**settings, "rope_type": settings.get("type", "default")}
        return ConfigValues(self.path, settings, f"{key}.")

    def rotary(
        self,
        head_dim: int,
        *,
        head_dim_key: str = "head_dim",
        is_interleaved: bool = False,
        default_fraction: float | None = None,
        default_theta: float | None = None,
    ) -> RotarySpec:
        """Return the rotary settings.

        Args:
            head_dim: number of values of a head, or of the part of a head that has a rotary embedding.
            head_dim_key: the config's key of `head_dim`, for error messages.
            default_fraction: fraction of a head that is rotated if `partial_rotary_factor` is not set; None: the whole
                head, ignoring `partial_rotary_factor`.
            default_theta: base of the frequencies if neither config nor defaults have one; None: a missing base is an
                error.
        """
        settings = self.rotary_settings()
        # Older configs have theta and fraction outside the object.
        both = self.replaced(self.values | {k: v for k, v in settings.values.items() if v is not None})
        dim, source = head_dim, f"{head_dim_key}={head_dim}"
        if default_fraction is not None:
            fraction = both.number("partial_rotary_factor", default_fraction)
            if fraction > 1:
                raise both.wrong("partial_rotary_factor", "must be at most 1")
            dim, source = int(head_dim * fraction), f"{source} and partial_rotary_factor={fraction:g}"
        if dim % 2 or dim == 0:
            raise CheckpointError(
                f"{self.path}: {source} gives a rotary embedding of {dim} values; it needs an even number"
            )
        theta = both.number("rope_theta", default_theta, above=1.0)
        context = self.optional_integer("max_position_embeddings")
        if (original := self.values.get(ORIGINAL_CONTEXT)) is not None:  # Phi's configs: outside the object
            settings = settings.replaced(settings.values | {ORIGINAL_CONTEXT: original})
        scaling = _read_scaling(settings, dim, context)
        return RotarySpec(dim=dim, theta=theta, scaling=scaling, is_interleaved=is_interleaved)

    def _get(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        return value


def _read_scaling(settings: ConfigValues, dim: int, context: int | None) -> Scaling | LongRopeScaling | None:
    """Return the scaling of the rotary frequencies of `dim` values; None if they are not scaled.

    Args:
        context: `max_position_embeddings`; None if the config lacks this key.
    """
    match settings.values["rope_type"]:
        case "default" | "mrope":  # text has the same position along all axes of a multimodal embedding
            return None
        case "dynamic":  # scales only contexts beyond max_position_embeddings, which are not served
            return None
        case "linear":
            return LinearScaling(settings.number("factor"))
        case "llama3":
            low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
            if high < low:
                raise settings.wrong("high_freq_factor", f"must be at least low_freq_factor={low:g}")
            return Llama3Scaling(
                factor=settings.number("factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=settings.integer(ORIGINAL_CONTEXT, context),
            )
        case "yarn":
            return _read_yarn(settings, context)
        case "proportional":
            fraction = settings.number("partial_rotary_factor", 1.0)
            if fraction > 1:
                raise settings.wrong("partial_rotary_factor", "must be at most 1")
            return ProportionalScaling(fraction, settings.number("factor", 1.0))
        case "longrope":
            return _read_longrope(settings, dim, context)
    supported = "default, linear, dynamic, llama3, yarn, proportional, longrope"
    raise settings.wrong("rope_type", f"is not supported; supported: {supported}")


def _read_longrope(settings: ConfigValues, dim: int, context: int | None) -> LongRopeScaling:
    def read(length: str) -> PairScaling:
        key = f"{length}_factor"
        factors = settings.values.get(key)
        if not isinstance(factors, list) or len(factors) != dim // 2:
            raise settings.wrong(key, f"must list a number for each of {dim // 2} pairs")
        if not all(type(factor) in (int, float) and 0 < factor < LARGEST_NUMBER for factor in factors):
            raise settings.wrong(key, "must list numbers above 0")
        return PairScaling(tuple(map(float, factors)), settings.number(f"{length}_mscale"))

    original = settings.integer(ORIGINAL_CONTEXT, context)
    return LongRopeScaling(short=read("short"), long=read("long"), original_max_position_embeddings=original)


def _read_yarn(settings: ConfigValues, context: int | None) -> YarnScaling:
    factor = settings.number("factor")
    if factor < 1:
        raise settings.wrong("factor", "must be at least 1 for yarn")
    beta_fast, beta_slow = settings.number("beta_fast", 32.0), settings.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise settings.wrong("beta_fast", f"must be at least beta_slow={beta_slow:g}")

    # DeepSeek's configs split the attention temperature between the rotary values and the scores, by a weight for
    # each. A weight of zero counts as missing.
    of_values, of_scores = (
        settings.optional_number(key) if settings.values.get(key) != 0 else None for key in ("mscale", "mscale_all_dim")
    )
    if of_values and of_scores:
        attention_factor = _temperature(factor, of_values) / _temperature(factor, of_scores)
    else:
        attention_factor = _temperature(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=settings.integer(ORIGINAL_CONTEXT, context),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=settings.flag("truncate", True),
        attention_factor=settings.number("attention_factor", attention_factor),
        score_factor=_temperature(factor, of_scores) ** 2 if of_scores else 1.0,
    )


def _temperature(factor: float, weight: float) -> float:
    """Return 0.1 * weight * ln(factor) + 1 (YaRN, arXiv 2309.00071, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0
