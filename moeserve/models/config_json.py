"""Reads a checkpoint's config.json value by value, and names the key when one is wrong. Knows no family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from moeserve.config import DtypeName
from moeserve.errors import CheckpointError, shown
from moeserve.layers.rotary import RotaryConfig

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

    def optional_integer(self, key: str, *, low: int = 1) -> int | None:
        return None if self.values.get(key) is None else self.integer(key, low=low)

    def require(self, key: str, *supported: object) -> None:
        """Refuses a value that this family cannot honour. A missing one is taken to be the first of the supported."""
        if self._get(key, supported[0]) not in supported:
            raise self.wrong(key, f"is not supported; supported: {', '.join(map(repr, supported))}")

    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.wrong("architectures", "must name exactly one architecture")
        return names[0]

    def dtype(self) -> DtypeName:
        key = "dtype" if "dtype" in self.values else "torch_dtype"
        value = self.values.get(key)
        if value is None:
            return "float32"
        if value not in ("float32", "bfloat16", "float16"):
            raise self.wrong(key, "must be float32, bfloat16 or float16")
        return cast(DtypeName, value)

    def rotary(self, head_dim: int) -> RotaryConfig:
        """Rotary settings, from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`."""
        if head_dim % 2:
            raise self.wrong("head_dim", f"gives heads of {head_dim} values; rotary embedding needs an even number")
        key = "rope_parameters" if self.values.get("rope_parameters") is not None else "rope_scaling"
        scaling = self.values.get(key) or {}
        if not isinstance(scaling, dict):
            raise self.wrong(key, "must be an object or null")
        theta = scaling.get("rope_theta", self.values.get("rope_theta"))
        if theta is None:
            raise CheckpointError(f"{self.path}: rope_theta is missing")
        theta = self._number("rope_theta", theta, 0.0)

        def value_of(name: str, above: float = 0.0) -> float:
            if name not in scaling:
                raise self.wrong(key, f"lacks {name!r}")
            return self._number(f"{key}.{name}", scaling[name], above)

        match scaling.get("rope_type", scaling.get("type", "default")):
            case "default":
                return RotaryConfig(head_dim=head_dim, theta=theta)
            case "linear":
                return RotaryConfig(head_dim=head_dim, theta=theta, scaling="linear", factor=value_of("factor"))
            case "llama3":
                low, high = value_of("low_freq_factor"), value_of("high_freq_factor")
                if high <= low:
                    raise self.wrong(key, "needs high_freq_factor above low_freq_factor")
                return RotaryConfig(
                    head_dim=head_dim,
                    theta=theta,
                    scaling="llama3",
                    factor=value_of("factor"),
                    low_freq_factor=low,
                    high_freq_factor=high,
                    original_max_position_embeddings=int(value_of("original_max_position_embeddings")),
                )
            case other:
                raise self.wrong(key, f"has type {other!r}, which is not supported; supported: default, linear, llama3")

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
