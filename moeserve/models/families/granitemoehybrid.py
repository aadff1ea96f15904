"""Granite 4: Granite MoE with Mamba-2 instead of attention in most layers; position embeddings are optional."""

from __future__ import annotations

import dataclasses

from moeserve.layers.linear_attention.attention import LinearAttentionSpec
from moeserve.layers.rotary import NO_ROTARY
from moeserve.models.config_values import ConfigValues
from moeserve.models.families.granitemoe import NAMES, read_with_shared
from moeserve.models.family import Family
from moeserve.models.fields import read_hidden_size, read_step_limit
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.convolution.interface import MAX_TAPS
from moeserve.ops.linear_attention.interface import MAX_HEAD

LAYER_TYPES = ("mamba", "attention")
OTHER_LAYER_TYPES = ("linear_attention", "full_attention")  # transformers' names of the layer types


def read(config: ConfigValues) -> ModelSpec:
    config.require("position_embedding_type", "nope", "rope")
    is_rotated = config.values.get("position_embedding_type") == "rope"
    model = read_with_shared(config, **({} if is_rotated else dict(rotary=NO_ROTARY)))
    listed = config.values.get("layer_types")
    has_other_names = isinstance(listed, list) and any(name in listed for name in OTHER_LAYER_TYPES)
    types = OTHER_LAYER_TYPES if has_other_names else LAYER_TYPES
    has_attention = config.flags_of_layers("layer_types", types, len(model.layers))
    if has_attention is None:
        raise config.missing("layer_types")
    mamba = _read_mamba(config)
    layers = [
        layer if has else Layer.of(mamba, *layer.networks[1:])
        for has, layer in zip(has_attention, model.layers, strict=True)
    ]
    return dataclasses.replace(model, layers=tuple(layers))


def _read_mamba(config: ConfigValues) -> LinearAttentionSpec:
    config.require("mamba_proj_bias", False)
    read_step_limit(config)
    num_heads = config.integer("mamba_n_heads", high=2**14)
    num_groups = config.integer("mamba_n_groups", high=2**14)
    if num_heads % num_groups:
        raise config.wrong("mamba_n_groups", f"must divide mamba_n_heads={num_heads}")
    width = config.integer("mamba_expand", 2) * read_hidden_size(config)
    is_given = config.get("mamba_d_head") not in (None, "auto")
    value_dim = config.integer("mamba_d_head", high=MAX_HEAD) if is_given else width // num_heads
    if num_heads * value_dim != width:
        raise config.wrong("mamba_d_head", f"times mamba_n_heads={num_heads} must be mamba_expand times hidden_size")
    return LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=num_groups,
        key_dim=config.integer("mamba_d_state", high=MAX_HEAD),
        value_dim=value_dim,
        num_taps=config.integer("mamba_d_conv", low=2, high=MAX_TAPS),
        norm_epsilon=config.number("rms_norm_eps"),
        is_delta=False,
        has_convolution_bias=config.flag("mamba_conv_bias", default=True),
    )


GRANITE_MOE_HYBRID = Family(
    name="Granite 4",
    models="Granite 4.0 H Small and H Tiny",
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    read=read,
    names=(*NAMES, (r"\.mamba\.out_proj\.", ".self_attn.o_proj."), (r"\.mamba\.", ".self_attn.")),
)
