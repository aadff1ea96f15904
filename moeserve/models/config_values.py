"""Read a checkpoint's config value by value, naming file, key and value when one is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

from moeserve.config.settings import DtypeName
from moeserve.errors import CheckpointError, shown
from moeserve.layers.rotary import LinearScaling, Llama3Scaling, RotaryConfig, YarnScaling

LARGEST_NUMBER = 1e30
MAX_INTEGER = 2**31 - 1
MAX_CONFIG_BYTES = 16 * 1024 * 1024


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: the file is too large, is not JSON, or holds no object.
    """
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES * (8 if path.name.endswith(".index.json") else 1):
        raise CheckpointError(f"{path} is {size} bytes, too large for a file of settings; fetch it again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


class ConfigValues:
    """The values of a config.json, or of the metadata of a GGUF file.

    Each getter checks type and range, and raises CheckpointError with file, key and value. A default is used where the
    key is missing or null.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def of_folder(cls, folder: Path) -> ConfigValues:
        """Read the config.json of a checkpoint folder."""
        path = folder / "config.json"
        return cls(path, read_json(path))

    def wrong(self, key: str, why: str) -> CheckpointError:
        """Return an error that names file, key and value."""
        return CheckpointError(f"{self.path}: {key}={shown(self.values.get(key))} {why}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"must be an integer from {low} to {high}")
        return value

    def optional_integer(self, key: str, *, low: int = 1, high: int = MAX_INTEGER) -> int | None:
        return None if self.values.get(key) is None else self.integer(key, low=low, high=high)

    def nullable_integer(self, key: str, *, low: int = 1, high: int = MAX_INTEGER) -> int | None:
        """Return an integer or None. The key must be present: a missing one is an error."""
        if key not in self.values:
            raise CheckpointError(f"{self.path}: {key} is missing; it must be an integer or null")
        return self.optional_integer(key, low=low, high=high)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        return self._number(key, self._get(key, default))

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def refuse(self, key: str) -> None:
        """Raise an error if the key is set."""
        if self.values.get(key) is not None:
            raise self.wrong(key, "is not supported")

    def require(self, key: str, *supported: object) -> None:
        """Raise an error for any value but the supported ones. A missing value counts as the first of them."""
        if self._get(key, supported[0]) not in supported:
            raise self.wrong(key, f"is not supported; supported: {', '.join(map(repr, supported))}")

    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.wrong("architectures", "must name exactly one architecture")
        return names[0]

    def dtype(self, default: DtypeName) -> DtypeName:
        """Return the dtype of the weights."""
        key = "dtype" if "dtype" in self.values else "torch_dtype"
        value = self.values.get(key)
        if value is None:
            return default
        if value not in ("float32", "bfloat16", "float16"):
            raise self.wrong(key, "must be float32, bfloat16 or float16")
        return cast(DtypeName, value)

    def token_ids(self, key: str, *, high: int = MAX_INTEGER) -> list[int]:
        """Return one token id or a list of them as a list; empty for null, and for -1 as old checkpoints write it."""
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
        """Return the name that this config uses for a value with several names, or the first if it uses none."""
        used = [name for name in names if self.values.get(name) is not None]
        for name in used[1:]:
            if self.values[name] != self.values[used[0]]:
                raise self.wrong(name, f"contradicts {used[0]}={shown(self.values[used[0]])}; remove one of them")
        return used[0] if used else names[0]

    def flags_of_layers(self, key: str, names: tuple[str, str], num_layers: int) -> list[bool] | None:
        """Return for each layer True if the list under `key` has the second name there; None if there is no list."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers or not all(name in names for name in value):
            raise self.wrong(key, f"must list {names[0]!r} or {names[1]!r} for each of the {num_layers} layers")
        return [name == names[1] for name in value]

    def layer_numbers(self, key: str, num_layers: int) -> frozenset[int]:
        """Return a list of layers, counted from 0; empty if the config has none."""
        value = self.values.get(key) or []
        is_list = isinstance(value, list) and all(type(layer) is int and 0 <= layer < num_layers for layer in value)
        if not is_list:
            raise self.wrong(key, f"must list layers from 0 to {num_layers - 1}")
        return frozenset(value)

    def rotary_settings(self) -> tuple[str, dict[str, Any]]:
        """Return `rope_parameters` (transformers 5) or `rope_scaling` (before), whichever is used, with its key."""
        key = "rope_parameters" if self.values.get("rope_parameters") is not None else "rope_scaling"
        given = self.values.get(key) or {}
        if not isinstance(given, dict):
            raise self.wrong(key, "must be an object or null")
        return key, given

    def rotary_type(self) -> str:
        """Return the kind of scaling of rotary frequencies, such as "default" or "yarn"."""
        _, given = self.rotary_settings()
        return str(given.get("rope_type", given.get("type", "default")))

    def rotary(
        self,
        head_dim: int,
        *,
        head_dim_key: str = "head_dim",
        is_interleaved: bool = False,
        default_fraction: float | None = None,
        default_theta: float | None = None,
    ) -> RotaryConfig:
        """Return the rotary settings.

        Args:
            head_dim: values of a head, or of its part with a rotary embedding.
            head_dim_key: the config's name for that number, for error messages.
            default_fraction: share of a head that is rotated if `partial_rotary_factor` is not set; None: all of it,
                ignoring `partial_rotary_factor`.
            default_theta: base of the frequencies if the config has none; None: it must have one.
        """
        _, given = self.rotary_settings()
        dim, source = head_dim, f"{head_dim_key}={head_dim}"
        if default_fraction is not None:
            fraction = given.get("partial_rotary_factor", self.values.get("partial_rotary_factor", default_fraction))
            fraction = self._number("partial_rotary_factor", fraction)
            if fraction > 1:
                raise self.wrong("partial_rotary_factor", "must be at most 1")
            dim, source = int(head_dim * fraction), f"{source} and partial_rotary_factor={fraction:g}"
        if dim % 2 or dim == 0:
            raise CheckpointError(
                f"{self.path}: {source} gives a rotary embedding of {dim} values; it needs an even number"
            )
        theta = given.get("rope_theta", self.values.get("rope_theta", default_theta))
        if theta is None:
            raise CheckpointError(f"{self.path}: rope_theta is missing")
        return RotaryConfig(
            dim=dim,
            theta=self._number("rope_theta", theta, above=1.0),
            scaling=_read_scaling(_Scaling(self)),
            is_interleaved=is_interleaved,
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.path}: {key} is missing")
        return value

    def _number(self, key: str, value: Any, above: float = 0.0) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not above < value < LARGEST_NUMBER:
            raise CheckpointError(f"{self.path}: {key}={shown(value)} must be a number above {above:g}")
        return float(value)


class _Scaling:
    """The object under `rope_parameters` or `rope_scaling`."""

    def __init__(self, config: ConfigValues) -> None:
        self._config = config
        self._key, self.given = config.rotary_settings()
        self.kind = config.rotary_type()

    def wrong(self, why: str) -> CheckpointError:
        return self._config.wrong(self._key, why)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0, or the default, which may be 0."""
        value = self.given.get(name)
        if value is None or (value == 0 and default == 0):
            if default is None:
                raise self.wrong(f"lacks {name!r}")
            return default
        return self._config._number(f"{self._key}.{name}", value)


def _read_scaling(values: _Scaling) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    """Return how a config scales rotary frequencies."""
    match values.kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(values.number("factor"))
        case "llama3":
            low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
            if high <= low:
                raise values.wrong("needs high_freq_factor above low_freq_factor")
            return Llama3Scaling(
                factor=values.number("factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=int(values.number("original_max_position_embeddings")),
            )
        case "yarn":
            return _read_yarn(values)
        case other:
            raise values.wrong(f"has type {other!r}, which is not supported; supported: default, linear, llama3, yarn")


def _read_yarn(values: _Scaling) -> YarnScaling:
    factor = values.number("factor")
    if factor < 1:
        raise values.wrong(f"has factor={factor:g}; yarn needs a factor of at least 1")
    truncate = values.given.get("truncate", True)
    if not isinstance(truncate, bool):
        raise values.wrong("needs truncate to be true or false")
    beta_fast, beta_slow = values.number("beta_fast", 32.0), values.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise values.wrong("needs beta_fast of at least beta_slow")

    # DeepSeek's configs divide the attention temperature between the rotary values and the scores.
    of_values, of_scores = values.number("mscale", 0.0), values.number("mscale_all_dim", 0.0)
    if of_values and of_scores:
        attention_factor = _temperature(factor, of_values) / _temperature(factor, of_scores)
    else:
        attention_factor = _temperature(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=int(values.number("original_max_position_embeddings")),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
        attention_factor=values.number("attention_factor", attention_factor),
        score_factor=_temperature(factor, of_scores) ** 2 if of_scores else 1.0,
    )


def _temperature(factor: float, weight: float) -> float:
    """Return 0.1 * weight * ln(factor) + 1 (YaRN, arXiv 2309.00071, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0
