"""Qwen3-MoE (arXiv 2505.09388): normalises queries and keys head by head; has no shared experts."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family, inside_other_model
from moeserve.models.fields import read_attention, read_model, read_num_experts, read_sparse_layers, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    return _read(config, is_normalized=config.flag("norm_topk_prob", default=False))


def read_vl(config: ConfigValues) -> ModelSpec:
    return _read(config, is_normalized=True)  # as in transformers, whatever the config says


def _read(config: ConfigValues, *, is_normalized: bool) -> ModelSpec:
    config.refuse("dual_chunk_attention_config")
    num_experts, top_k = read_num_experts(config, "num_experts", "num_local_experts")
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=is_normalized),
        expert_width=read_width(config, "moe_intermediate_size"),
    )
    has_bias = config.flag("attention_bias", default=False)
    has_window = config.flag("use_sliding_window", default=False)
    attention = read_attention(
        config,
        normalized="head",
        has_bias=has_bias,
        has_output_bias=has_bias,
        window=config.integer("sliding_window") if has_window else None,
    )
    feed_forwards = read_sparse_layers(config, moe)
    layers = [Layer.of(attention, feed_forward) for feed_forward in feed_forwards]
    return read_model(config, layers)


QWEN3_MOE = Family(
    name="Qwen3-MoE",
    models="Qwen3-30B-A3B, 235B-A22B",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    read=read,
)
# Variants with models for images, sound and video. Text has the same position along all axes of the rotary embedding.
QWEN3_VL_MOE = inside_other_model(
    Family(
        name="Qwen3-VL-MoE",
        models="Qwen3-VL-30B-A3B, 235B-A22B",
        architecture="Qwen3VLMoeForConditionalGeneration",
        model_type="qwen3_vl_moe_text",
        read=read_vl,
    )
)
QWEN3_OMNI_MOE = inside_other_model(
    Family(
        name="Qwen3-Omni-MoE",
        models="Qwen3-Omni-30B-A3B",
        architecture="Qwen3OmniMoeForConditionalGeneration",
        other_architectures=("Qwen3OmniMoeThinkerForConditionalGeneration",),
        model_type="qwen3_omni_moe_text",
        read=read,
        wrapped=((r"^thinker\.", ""),),
    )
)
