"""The values that transformers' config classes give to keys that a config.json does not have."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.models.config_values import read_json

PATH = Path(__file__).with_suffix(".json")


def defaults_of(model_type: str) -> Mapping[str, Any]:
    """Return the default of each config key for a `model_type` of transformers; empty if the type is unknown or ""."""
    return _read().get(model_type, {})


@functools.cache
def _read() -> dict[str, dict[str, Any]]:
    return read_json(PATH)
