"""MiMo-V2-Flash: windows with sinks, values narrower than keys, and MTP modules without experts."""

from __future__ import annotations

import dataclasses

from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    LAYER_TYPES,
    feed_forwards_of,
    read_attention,
    read_corrected_router,
    read_model,
    read_num_layers,
    read_width,
)
from moeserve.models.model_config import DraftSpec, Layer, ModelSpec

NUM_MODULES = 3  # for multi-token prediction (MTP)
DEFAULT_FRACTION = 0.334  # fraction of a head that is rotated
# transformers ignores `rope_theta` in config.json and uses these values of the published checkpoint.
DEFAULT_THETAS = (5e6, 1e4)  # bases for layers without and with a window


def read(config: ConfigValues) -> ModelSpec:
    config = _with_usual_names(config)
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    config.require("n_shared_experts", 0)
    num_layers = read_num_layers(config)
    has_window = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    if has_window is None:
        has_window = [index > 0 and (index + 1) % 6 != 0 for index in range(num_layers)]
    is_dense = config.flags_of_layers("mlp_layer_types", ("sparse", "dense"), num_layers)
    if is_dense is None:
        is_dense = [index == 0 for index in range(num_layers)]
    moe = MoESpec(router=read_corrected_router(config), expert_width=read_width(config, "moe_intermediate_size"))
    full, windowed = _read_attention(config, is_windowed=False), _read_attention(config, is_windowed=True)
    layers = [
        Layer.of(windowed if window else full, feed_forward)
        for window, feed_forward in zip(has_window, feed_forwards_of(config, moe, is_dense), strict=True)
    ]
    # The config may not count the MTP modules. Their layers have no experts.
    dense = DenseSpec(width=read_width(config, "intermediate_size"))
    model = read_model(config, layers, epsilon_key=config.key_of("layernorm_epsilon", "rms_norm_eps"))
    draft = DraftSpec(layers=(Layer.of(windowed, dense),) * (model.num_skipped_layers or NUM_MODULES))
    return dataclasses.replace(model, draft=draft, num_skipped_layers=max(model.num_skipped_layers, NUM_MODULES))


def _with_usual_names(config: ConfigValues) -> ConfigValues:
    """Return the config with published names and values replaced by those of transformers."""
    values = dict(config.values)
    for old, new, names in (
        ("hybrid_layer_pattern", "layer_types", LAYER_TYPES),
        ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
    ):
        flags = values.get(old)
        if flags is None:
            continue
        num_layers = read_num_layers(config)
        if not isinstance(flags, list) or len(flags) != num_layers or not all(flag in (0, 1) for flag in flags):
            raise config.wrong(old, "must list 0 or 1 for each layer")
        values.setdefault(new, [names[flag] for flag in flags])
    if values.get("routed_scaling_factor") is None:
        values["routed_scaling_factor"] = 1.0
    return config.replaced(values)


def _read_attention(config: ConfigValues, *, is_windowed: bool) -> AttentionSpec:
    own = config.of_layer_type(LAYER_TYPES[is_windowed])
    values = dict(own.values)
    if is_windowed:
        values["num_key_value_heads"] = 2 * config.integer("num_key_value_heads")
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"):
            if (size := config.optional_integer(f"swa_{key}", high=2**14)) is not None:
                values[key] = size
        if (theta := config.optional_number("swa_rope_theta")) is not None:
            values["rope_theta"] = theta
    own = own.replaced(values)
    head_dim, value_dim = own.integer("head_dim", high=2**14), own.integer("v_head_dim", high=2**14)
    if value_dim > head_dim:
        raise own.wrong("v_head_dim", f"must be at most head_dim={head_dim}")
    value_factor = own.number("attention_value_scale", 1.0)
    if value_factor != 1.0 and value_dim % 2:
        raise own.wrong("v_head_dim", f"must be even with attention_value_scale={value_factor:g}")
    kind = "swa" if is_windowed else "full"
    return read_attention(
        own,
        default_fraction=DEFAULT_FRACTION,
        default_theta=DEFAULT_THETAS[is_windowed],
        value_dim=value_dim,
        value_factor=value_factor,
        has_bias=own.flag("attention_bias", default=False),
        has_sinks=own.flag(f"add_{kind}_attention_sink_bias", default=is_windowed),
        window=_read_window(config) if is_windowed else None,
    )


def _read_window(config: ConfigValues) -> int:
    """Return the number of positions that a token attends to, including its own. `sliding_window_size` excludes it."""
    others = config.optional_integer("sliding_window_size")
    return config.integer("sliding_window") if others is None else others + 1


MIMO_V2_FLASH = Family(
    name="MiMo-V2-Flash",
    architecture="MiMoV2FlashForCausalLM",
    model_type="mimo_v2_flash",
    read=read,
    names=(
        (r"\.self_attn\.attention_sink_bias$", ".self_attn.sinks"),
        (r"^model\.mtp\.layers\.(\d+)\.pre_mlp_layernorm\.", r"draft.\1.layer.post_attention_layernorm."),
        (r"^model\.mtp\.layers\.", "draft."),
    ),
)
