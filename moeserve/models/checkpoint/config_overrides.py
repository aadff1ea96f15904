"""Changes that a user makes to a config.json: `hf_overrides`, with vLLM's name and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Written outside the object of rotary settings in older configs, and inside since transformers 5
_ROTARY_VALUES = ("rope_theta", "partial_rotary_factor")


def with_overrides(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config with others added or in their place. Objects are merged, also inside of each other.

    Rotary settings are changed where the config has them, by their old names (`rope_scaling`, `rope_theta`) and new
    ones (`rope_parameters`).
    """
    merged = dict(values)
    for key, value in _with_used_names(values, overrides).items():
        old = values.get(key)
        merged[key] = with_overrides(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def _with_used_names(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides whose rotary settings have the names that the config uses."""
    renamed = dict(overrides)
    if "type" in renamed and "rope_type" in values:
        renamed.setdefault("rope_type", renamed.pop("type"))
    settings = values.get("rope_parameters")
    if not isinstance(settings, dict) or "rope_parameters" in renamed:
        return renamed
    changes: dict[str, Any] = {key: renamed.pop(key) for key in _ROTARY_VALUES if key in renamed and key in settings}
    if "rope_scaling" in renamed:
        scaling = renamed.pop("rope_scaling")
        changes |= {"rope_type": "default"} if scaling is None else scaling
    return renamed | ({"rope_parameters": changes} if changes else {})
