"""Jamba: Mamba-1 instead of attention in most layers, attention without positions, and experts in some layers."""

from __future__ import annotations

from moeserve.layers.mamba1.mixer import MambaSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.rotary import NO_ROTARY
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    feed_forwards_of,
    read_attention,
    read_hidden_size,
    read_model,
    read_num_experts,
    read_num_layers,
    read_width,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.convolution.interface import MAX_TAPS
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.selective_scan.reference import MAX_STATE


def read(config: ConfigValues) -> ModelSpec:
    config.require("mamba_inner_layernorms", True)
    config.require("mamba_proj_bias", False)
    config.refuse("sliding_window")
    num_experts, top_k = read_num_experts(config, "num_experts", "num_local_experts")
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=False),
        expert_width=read_width(config, "intermediate_size"),
    )
    has_experts, has_attention = _read_pattern(config, "expert"), _read_pattern(config, "attn")
    attention, mamba = read_attention(config, rotary=NO_ROTARY), _read_mamba(config)
    feed_forwards = feed_forwards_of(config, moe, [num_experts == 1 or not has for has in has_experts])
    layers = [
        Layer.of(attention if has else mamba, feed_forward)
        for has, feed_forward in zip(has_attention, feed_forwards, strict=True)
    ]
    return read_model(config, layers)


def _read_pattern(config: ConfigValues, part: str) -> list[bool]:
    """Return a flag for each layer: True for the one layer of each period that has `part`."""
    period = config.integer(f"{part}_layer_period")
    offset = config.integer(f"{part}_layer_offset", low=0)
    if offset >= period:
        raise config.wrong(f"{part}_layer_offset", f"must be less than {part}_layer_period={period}")
    return [index % period == offset for index in range(read_num_layers(config))]


def _read_mamba(config: ConfigValues) -> MambaSpec:
    hidden_size = read_hidden_size(config)
    has_own_rank = config.get("mamba_dt_rank") != "auto"
    return MambaSpec(
        num_channels=config.integer("mamba_expand", high=2**6) * hidden_size,
        state_size=config.integer("mamba_d_state", high=MAX_STATE),
        rank=config.integer("mamba_dt_rank", high=2**18) if has_own_rank else -(-hidden_size // 16),
        num_taps=config.integer("mamba_d_conv", low=2, high=MAX_TAPS),
        norm_epsilon=config.number("rms_norm_eps"),
        has_convolution_bias=config.flag("mamba_conv_bias", default=True),
    )


JAMBA = Family(
    name="Jamba",
    models="Jamba, Jamba 1.5, 1.6 and 1.7",
    architecture="JambaForCausalLM",
    model_type="jamba",
    read=read,
    names=(
        (r"^model\.final_layernorm\.", "model.norm."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"\.mamba\.", ".self_attn."),
        (r"\.feed_forward\.router\.", ".mlp.gate."),
        (r"\.feed_forward\.", ".mlp."),
    ),
)
