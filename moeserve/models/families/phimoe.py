"""Phi-3.5-MoE (arXiv 2404.14219): two experts chosen by a sparse mixer, LayerNorm, biases, and LongRoPE."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.streams.residual import PlainStream
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import BLOCK_SPARSE, Family
from moeserve.models.fields import read_attention, read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("num_experts_per_tok", 2)
    num_experts, top_k = read_num_experts(config, "num_local_experts")
    # In training, the router's logits are multiplied by random numbers from 1 - noise to 1 + noise.
    tolerance = 2 * config.number("router_jitter_noise")
    router = RouterSpec(num_experts=num_experts, top_k=top_k, scoring="sparse_mixer", tolerance=tolerance)
    has_bias = config.flag("attention_bias", default=False)
    window = config.optional_integer("sliding_window")
    layer = Layer.of(
        read_attention(config, has_bias=has_bias, has_output_bias=has_bias, window=window),
        MoESpec(router=router, expert_width=read_width(config, "intermediate_size")),
    )
    model = read_model(config, [layer] * read_num_layers(config))
    has_head_bias = config.flag("lm_head_bias", default=False)
    return dataclasses.replace(model, stream=PlainStream(has_layer_norms=True), has_head_bias=has_head_bias)


PHIMOE = Family(
    name="Phi-3.5-MoE",
    architecture="PhiMoEForCausalLM",
    model_type="phimoe",
    other_architectures=("PhimoeForCausalLM",),  # name under which transformers 5 saves models
    read=read,
    names=(*BLOCK_SPARSE, (r"\.mlp\.router\.", ".mlp.gate.")),
)
