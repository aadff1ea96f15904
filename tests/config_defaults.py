"""The defaults of transformers' config classes, from which `moeserve/models/config_defaults.json` is made.

`python tests/config_defaults.py` writes the file.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moeserve.models import config_defaults
from moeserve.models.registry import FAMILIES

# Fields that change no token. MTP layers are an addition to a checkpoint, which a config must announce.
LEFT_OUT = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)} | {
    *("bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id", "sep_token_id"),
    *("use_cache", "pretraining_tp", "initializer_range", "num_logits_to_keep", "rescale_prenorm_residual"),
    *("attention_dropout", "hidden_dropout", "output_router_logits", "router_aux_loss_coef", "mtp_loss_scaling_factor"),
    *("num_mtp_layers", "num_nextn_predict_layers", "mamba_ssm_cache_dtype", "use_mamba_kernels"),
}


# Configs that make the rotary settings of each layer type from other keys
WITHOUT_ROTARY_SETTINGS = ("deepseek_v4", "dots3_note_text", "step3p5")


def defaults_of(model_type: str) -> dict[str, Any]:
    """Return the defaults of a config class that are numbers, flags and texts, and those of its rotary embedding."""
    config_class = CONFIG_MAPPING[model_type]
    renamed = config_class.attribute_map
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    defaults = {
        name: value
        for name, value in fields.items()
        if name not in LEFT_OUT and type(value) in (int, float, bool, str) and renamed.get(name) not in fields
    }
    if not hasattr(config_class(), "rope_parameters"):
        return defaults
    # A theta beside the object is used unless the object has its own one.
    theta = 12345.0
    settings = {
        key: {name: number for name, number in value.items() if number != theta} if isinstance(value, dict) else value
        for key, value in config_class(rope_theta=theta).rope_parameters.items()
        if value != theta
    }
    of_config = config_class().rope_parameters
    beside = {key: of_config[key] for key in ("rope_theta", "partial_rotary_factor") if key in of_config}
    if settings.items() <= {"rope_type": "default", **beside}.items():
        return defaults | beside
    if model_type in WITHOUT_ROTARY_SETTINGS:
        return defaults | {"rope_theta": config_class.default_theta}
    return defaults | {"rope_theta": config_class.default_theta} | {"rope_parameters": settings}


def table() -> dict[str, dict[str, Any]]:
    """Return the defaults of every family, by the type of its config."""
    types = {family.model_type for family in FAMILIES.values()}
    return {model_type: dict(sorted(defaults_of(model_type).items())) for model_type in sorted(types)}


if __name__ == "__main__":
    Path(config_defaults.PATH).write_text(json.dumps(table(), indent=1) + "\n")
