"""AFMoE (Trinity): gated outputs, norms after networks, and no rotary embedding in layers without a window."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    feed_forwards_of,
    read_attention,
    read_hidden_size,
    read_model,
    read_num_layers,
    read_router_without_groups,
    read_width,
    read_windows,
    rotated_in_windows,
)
from moeserve.models.model_config import Block, Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("attention_bias", False)
    for key, only in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1)):
        config.require(key, only)
    num_layers = read_num_layers(config)
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_router_without_groups(
            config, "num_experts", "num_local_experts", scale=config.number("route_scale", 1.0)
        ),
        expert_width=expert_width,
        shared=SharedExpertsSpec(width=config.integer("num_shared_experts", 1, high=2**10) * expert_width),
    )
    rotated = read_attention(config, normalized="head", has_gate=True, gate_name="gate_proj")
    period = config.integer("global_attn_every_n_layers", 4)
    windows = read_windows(config, default=[(index + 1) % period != 0 for index in range(num_layers)])
    num_dense = config.integer("num_dense_layers", 1, low=0)
    feed_forwards = feed_forwards_of(config, moe, [index < num_dense for index in range(num_layers)])
    layers = [
        Layer((Block(attention, is_normed=True), Block(feed_forward, is_normed=True)))
        for attention, feed_forward in zip(rotated_in_windows(rotated, windows), feed_forwards, strict=True)
    ]
    factor = read_hidden_size(config) ** 0.5 if config.flag("mup_enabled", default=False) else 1.0
    return dataclasses.replace(read_model(config, layers), embedding_factor=factor)


AFMOE = Family(
    name="AFMoE",
    models="Trinity (AFMoE)",
    architecture="AfmoeForCausalLM",
    model_type="afmoe",
    read=read,
    names=(
        (r"\.post_attention_layernorm\.", ".self_attn_output_norm."),
        (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
        (r"\.post_mlp_layernorm\.", ".mlp_output_norm."),
        (r"\.mlp\.router\.gate\.", ".mlp.gate."),
        (r"\.mlp\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    ),
)
