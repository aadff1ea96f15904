"""Hy3: queries and keys normalised head by head, sigmoid routing with a correction, and one shared expert."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    read_attention,
    read_listed_dense,
    read_model,
    read_router_without_groups,
    read_width,
    with_draft_layer,
)
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("mlp_bias", False)
    config.require("qk_norm", True)
    config.require("route_norm", True)
    config.require("moe_router_enable_expert_bias", True)
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_router_without_groups(
            config, "num_experts", "num_local_experts", scale=config.number("router_scaling_factor")
        ),
        expert_width=expert_width,
        shared=SharedExpertsSpec(width=config.integer("num_shared_experts", high=2**10) * expert_width),
    )
    has_bias = config.flag("attention_bias", default=False)
    attention = read_attention(config, normalized="head", has_bias=has_bias, has_output_bias=has_bias)
    layers = [Layer.of(attention, feed_forward) for feed_forward in read_listed_dense(config, moe)]
    return with_draft_layer(read_model(config, layers), Layer.of(attention, moe))


HY_V3 = Family(
    name="Hy3",
    architecture="HYV3ForCausalLM",
    model_type="hy_v3",
    read=read,
    names=(
        (r"\.mlp\.router\.gate\.", ".mlp.gate."),
        (r"\.mlp\.(?:expert_bias|e_score_correction_bias)$", ".mlp.gate.e_score_correction_bias"),
        (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
    ),
)
