"""Changes that a user makes to a config.json: `hf_overrides`, with vLLM's name and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Rotary settings that older configs have beside the object of rotary settings, and transformers 5 inside of it
_ROTARY_VALUES = ("rope_theta", "partial_rotary_factor")


def with_overrides(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config values with overrides added or in place of old values. Nested objects are merged.

    Rotary settings may be given by their old keys (`rope_scaling`, `rope_theta`) or new key (`rope_parameters`). They
    replace the settings under the key that the config uses.
    """
    merged = dict(values)
    for key, value in _with_used_names(values, overrides).items():
        old = values.get(key)
        merged[key] = with_overrides(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def _with_used_names(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides, with rotary settings under the keys that the config uses."""
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
