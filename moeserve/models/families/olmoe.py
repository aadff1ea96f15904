"""OLMoE (arXiv 2409.02060): queries and keys are normalised over all heads of a token, and may be clipped."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import read_attention, read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    num_experts, top_k = read_num_experts(config, "num_experts", "num_local_experts")
    has_bias = config.flag("attention_bias", default=False)
    attention = read_attention(
        config,
        normalized="token",
        clip=config.optional_number("clip_qkv"),
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    is_normalized = config.flag("norm_topk_prob", default=False)
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=is_normalized),
        expert_width=read_width(config, "intermediate_size"),
    )
    layer = Layer.of(attention, moe)
    return read_model(config, [layer] * read_num_layers(config))


OLMOE = Family(name="OLMoE", architecture="OlmoeForCausalLM", model_type="olmoe", read=read)
