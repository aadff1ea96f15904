"""Reads a checkpoint's config.json value by value, and names the key when one is wrong. Knows no family."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

from moeserve.config.settings import DtypeName
from moeserve.errors import CheckpointError, shown
from moeserve.layers.rotary import LinearScaling, Llama3Scaling, RotaryConfig, YarnScaling

LARGEST_NUMBER = 1e30
MAX_CONFIG_BYTES = 16 * 1024 * 1024


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint."""
    if path.stat().st_size > MAX_CONFIG_BYTES * (8 if path.name.endswith(".index.json") else 1):
        raise CheckpointError(f"{path} is {path.stat().st_size} bytes: too large for what it should hold")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


class ConfigJson:
    """One config.json. Each getter checks type and range and raises CheckpointError with file, key and value."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        self.values = read_json(self.path)

    def wrong(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key}={shown(self.values.get(key))} {why}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"must be an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        return self._number(key, self._get(key, default), above)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def optional_integer(self, key: str, *, low: int = 1, high: int = 2**31 - 1) -> int | None:
        return None if self.values.get(key) is None else self.integer(key, low=low, high=high)

    def nullable_integer(self, key: str, *, low: int = 1, high: int = 2**31 - 1) -> int | None:
        """As `optional_integer`, but the config must say null where it means none."""
        if key not in self.values:
            raise CheckpointError(f"{self.path}: {key} is missing; it must be an integer or null")
        return self.optional_integer(key, low=low, high=high)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def refuse(self, key: str) -> None:
        """Refuses a config that sets what no family here has."""
        if self.values.get(key) is not None:
            raise self.wrong(key, "is not supported")

    def require(self, key: str, *supported: object) -> None:
        """Refuses a value that this family cannot honour. A missing one is taken to be the first of the supported."""
        if self._get(key, supported[0]) not in supported:
            raise self.wrong(key, f"is not supported; supported: {', '.join(map(repr, supported))}")

    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.wrong("architectures", "must name exactly one architecture")
        return names[0]

    def dtype(self, default: DtypeName) -> DtypeName:
        """The number format of the weights, `default` where the config has none."""
        key = "dtype" if "dtype" in self.values else "torch_dtype"
        value = self.values.get(key)
        if value is None:
            return default
        if value not in ("float32", "bfloat16", "float16"):
            raise self.wrong(key, "must be float32, bfloat16 or float16")
        return cast(DtypeName, value)

    def key_of(self, *names: str) -> str:
        """The name that this config uses, of several for one thing; the first where it uses none."""
        used = [name for name in names if self.values.get(name) is not None]
        for name in used[1:]:
            if self.values[name] != self.values[used[0]]:
                raise self.wrong(name, f"contradicts {used[0]}={shown(self.values[used[0]])}; remove one of them")
        return used[0] if used else names[0]

    def flags_of_layers(self, key: str, names: tuple[str, str], num_layers: int) -> list[bool] | None:
        """A list of one of two names per layer, as whether it is the second; None where the config has no such list."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers or not all(name in names for name in value):
            raise self.wrong(key, f"must list {names[0]!r} or {names[1]!r} for each of the {num_layers} layers")
        return [name == names[1] for name in value]

    def layer_numbers(self, key: str, num_layers: int) -> frozenset[int]:
        """A list of layers, counted from 0; empty where the config has none."""
        value = self.values.get(key) or []
        is_list = isinstance(value, list) and all(type(layer) is int and 0 <= layer < num_layers for layer in value)
        if not is_list:
            raise self.wrong(key, f"must list layers from 0 to {num_layers - 1}")
        return frozenset(value)

    def rotary(
        self,
        head_dim: int,
        *,
        head_dim_key: str = "head_dim",
        is_interleaved: bool = False,
        default_fraction: float | None = None,
    ) -> RotaryConfig:
        """Rotary settings, from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`.

        Args:
            head_dim: values of a head, or of the part of it that turns.
            head_dim_key: where that number comes from, for the error.
            default_fraction: share of a head that turns where `partial_rotary_factor` does not say; None: all of it
                turns, whatever that says.
        """
        key = "rope_parameters" if self.values.get("rope_parameters") is not None else "rope_scaling"
        given = self.values.get(key) or {}
        if not isinstance(given, dict):
            raise self.wrong(key, "must be an object or null")
        scaling = _Scaling(self, key, given)

        dim, source = head_dim, f"{head_dim_key}={head_dim}"
        if default_fraction is not None:
            fraction = given.get("partial_rotary_factor", self.values.get("partial_rotary_factor", default_fraction))
            fraction = self._number("partial_rotary_factor", fraction, 0.0)
            if fraction > 1:
                raise self.wrong("partial_rotary_factor", "must be at most 1")
            dim, source = int(head_dim * fraction), f"{source} and partial_rotary_factor={fraction:g}"
        if dim % 2 or dim == 0:
            raise CheckpointError(
                f"{self.path}: with {source}, {dim} values of a head turn; rotary embedding needs an even number"
            )
        theta = given.get("rope_theta", self.values.get("rope_theta"))
        if theta is None:
            raise CheckpointError(f"{self.path}: rope_theta is missing")
        return RotaryConfig(
            dim=dim,
            theta=self._number("rope_theta", theta, 1.0),
            scaling=scaling.read(),
            is_interleaved=is_interleaved,
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.path}: {key} is missing")
        return value

    def _number(self, key: str, value: Any, above: float) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not above < value < LARGEST_NUMBER:
            raise CheckpointError(f"{self.path}: {key}={shown(value)} must be a number above {above:g}")
        return float(value)


class _Scaling:
    """How a config changes rotary frequencies."""

    def __init__(self, config: ConfigJson, key: str, given: dict[str, Any]) -> None:
        self._config = config
        self._key = key
        self._given = given

    def read(self) -> LinearScaling | Llama3Scaling | YarnScaling | None:
        match self._given.get("rope_type", self._given.get("type", "default")):
            case "default":
                return None
            case "linear":
                return LinearScaling(self._number("factor"))
            case "llama3":
                low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
                if high <= low:
                    raise self._config.wrong(self._key, "needs high_freq_factor above low_freq_factor")
                return Llama3Scaling(
                    factor=self._number("factor"),
                    low_freq_factor=low,
                    high_freq_factor=high,
                    original_max_position_embeddings=int(self._number("original_max_position_embeddings")),
                )
            case "yarn":
                return self._yarn()
            case other:
                raise self._config.wrong(
                    self._key, f"has type {other!r}, which is not supported; supported: default, linear, llama3, yarn"
                )

    def _yarn(self) -> YarnScaling:
        factor = self._number("factor")
        if factor < 1:
            raise self._config.wrong(self._key, f"has factor={factor:g}; yarn stretches the context by at least 1")
        truncate = self._given.get("truncate", True)
        if not isinstance(truncate, bool):
            raise self._config.wrong(self._key, "needs truncate to be true or false")
        beta_fast, beta_slow = self._number("beta_fast", 32.0), self._number("beta_slow", 1.0)
        if beta_fast < beta_slow:
            raise self._config.wrong(self._key, "needs beta_fast of at least beta_slow")

        # DeepSeek says how much of the sharpening goes to the rotary values and how much to the scores.
        of_values, of_scores = self._number("mscale", 0.0), self._number("mscale_all_dim", 0.0)
        if of_values and of_scores:
            attention_factor = _sharpening(factor, of_values) / _sharpening(factor, of_scores)
        else:
            attention_factor = _sharpening(factor, 1.0)
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=int(self._number("original_max_position_embeddings")),
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            truncate=truncate,
            attention_factor=self._number("attention_factor", attention_factor),
            score_factor=_sharpening(factor, of_scores) ** 2 if of_scores else 1.0,
        )

    def _number(self, name: str, default: float | None = None) -> float:
        """A positive number; a default may be zero."""
        value = self._given.get(name)
        if value is None or (value == 0 and default == 0):
            if default is None:
                raise self._config.wrong(self._key, f"lacks {name!r}")
            return default
        return self._config._number(f"{self._key}.{name}", value, 0.0)


def _sharpening(factor: float, weight: float) -> float:
    """0.1 * weight * ln(factor) + 1 (YaRN, arXiv 2309.00071, equation 22)"""
    return 0.1 * weight * math.log(factor) + 1.0
