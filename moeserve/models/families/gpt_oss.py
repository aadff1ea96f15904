"""gpt-oss (arXiv 2508.10925): windows in every other layer, attention sinks, biases, and a clamped activation."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    LAYER_TYPES,
    read_attention,
    read_model,
    read_num_experts,
    read_num_layers,
    read_width,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.rows.activations import ClampedSwiGLU


def read(config: ConfigValues) -> ModelSpec:
    num_layers = read_num_layers(config)
    num_experts, top_k = read_num_experts(config, "num_local_experts", "num_experts")
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, scoring="softmax_of_chosen", has_bias=True),
        expert_width=read_width(config, "intermediate_size"),
        activation=ClampedSwiGLU(alpha=config.number("swiglu_alpha", 1.702), limit=config.number("swiglu_limit", 7.0)),
        has_expert_bias=True,
    )
    has_bias = config.flag("attention_bias", default=True)
    full = read_attention(config, has_bias=has_bias, has_output_bias=has_bias, has_sinks=True)
    windowed = dataclasses.replace(full, window=config.integer("sliding_window"))
    has_window = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    if has_window is None:
        has_window = [index % 2 == 0 for index in range(num_layers)]
    layers = [Layer.of(windowed if window else full, moe) for window in has_window]
    return read_model(config, layers)


GPT_OSS = Family(
    name="gpt-oss",
    models="gpt-oss-20b, gpt-oss-120b",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    read=read,
    names=(
        (r"\.mlp\.router\.", ".mlp.gate."),
        (r"\.mlp\.experts\.(?=(?:gate_up|down)_proj)", ".mlp.experts.interleaved."),
    ),
)
