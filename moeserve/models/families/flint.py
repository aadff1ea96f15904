"""Flint: attention sinks, rotary embedding in layers with windows only, and a shared expert without a gate."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    feed_forwards_of,
    read_attention,
    read_model,
    read_num_experts,
    read_num_layers,
    read_width,
    read_windows,
    rotated_in_windows,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    num_layers = read_num_layers(config)
    config.require("decoder_sparse_step", 1)
    num_experts, top_k = read_num_experts(config, "num_experts", "num_local_experts")
    is_normalized = config.flag("norm_topk_prob", default=True)
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, scoring="sigmoid", is_normalized=is_normalized),
        expert_width=read_width(config, "moe_intermediate_size"),
        shared=SharedExpertsSpec(width=read_width(config, "shared_expert_intermediate_size")),
    )
    has_bias = config.flag("attention_bias", default=False)
    rotated = read_attention(config, normalized="head", has_sinks=True, has_bias=has_bias, has_output_bias=has_bias)
    is_full = [index < 2 or index % 4 == 1 or index == num_layers - 1 for index in range(num_layers)]
    windows = read_windows(config, default=[not full for full in is_full])
    dense = frozenset(range(2))
    if config.get("mlp_only_layers") is not None:
        dense = config.layer_numbers("mlp_only_layers", num_layers)
    feed_forwards = feed_forwards_of(config, moe, [index in dense for index in range(num_layers)])
    attentions = rotated_in_windows(rotated, windows)
    return read_model(config, [Layer.of(*networks) for networks in zip(attentions, feed_forwards, strict=True)])


FLINT = Family(
    name="Flint",
    architecture="FlintForCausalLM",
    model_type="flint",
    read=read,
    names=(
        (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        (r"\.self_attn\.softmax_offset$", ".self_attn.sinks"),
    ),
)
