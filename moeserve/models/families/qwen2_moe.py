"""Qwen2-MoE (arXiv 2407.10671): a gated shared expert, and biases in the attention."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    LAYER_TYPES,
    read_attention,
    read_model,
    read_num_experts,
    read_num_layers,
    read_sparse_layers,
    read_width,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    config.refuse("dual_chunk_attention_config")
    num_experts, top_k = read_num_experts(config, "num_experts", "num_local_experts")
    is_normalized = config.flag("norm_topk_prob", default=False)
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=is_normalized),
        expert_width=read_width(config, "moe_intermediate_size"),
        shared=SharedExpertsSpec(width=read_width(config, "shared_expert_intermediate_size"), is_gated=True),
    )
    attention = read_attention(config, has_bias=config.flag("qkv_bias", default=True))
    layers = [
        Layer.of(dataclasses.replace(attention, window=window), feed_forward)
        for window, feed_forward in zip(_read_windows(config), read_sparse_layers(config, moe), strict=True)
    ]
    return read_model(config, layers)


def _read_windows(config: ConfigValues) -> list[int | None]:
    """Return the window of each layer, None for full attention."""
    num_layers = read_num_layers(config)
    if not config.flag("use_sliding_window", default=False):
        return [None] * num_layers
    has_window = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    if has_window is None:
        num_first = config.integer("max_window_layers", low=0)
        has_window = [index < num_first and index % 2 == 0 for index in range(num_layers)]
    window = config.integer("sliding_window")
    return [window if has else None for has in has_window]


QWEN2_MOE = Family(
    name="Qwen2-MoE",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    read=read,
    names=((r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),),
)
