"""Qwen3-Next and Qwen3.5: three of four layers are gated delta networks, the fourth is attention with gated outputs.

Text has the same position along all axes of Qwen3.5's multimodal rotary embedding, so an ordinary one suffices.
"""

from __future__ import annotations

import dataclasses

from moeserve.layers.linear_attention.attention import LinearAttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import ONE_MODULE, Family
from moeserve.models.fields import (
    read_attention,
    read_model,
    read_num_experts,
    read_num_layers,
    read_sparse_layers,
    read_width,
)
from moeserve.models.model_config import DraftSpec, Layer, ModelSpec
from moeserve.ops.convolution.interface import MAX_TAPS
from moeserve.ops.linear_attention.interface import MAX_HEAD
from moeserve.ops.routing.interface import RouterSpec

LAYER_TYPES = ("linear_attention", "full_attention")


def read(config: ConfigValues) -> ModelSpec:
    config.refuse("dual_chunk_attention_config")
    num_experts, top_k = read_num_experts(config, "num_experts", "num_local_experts")
    moe = MoESpec(
        router=RouterSpec(
            num_experts=num_experts, top_k=top_k, is_normalized=config.flag("norm_topk_prob", default=True)
        ),
        expert_width=read_width(config, "moe_intermediate_size"),
        shared=SharedExpertsSpec(width=read_width(config, "shared_expert_intermediate_size"), is_gated=True),
    )
    has_bias = config.flag("attention_bias", default=False)
    attention = read_attention(
        config,
        normalized="head",
        has_gate=True,
        has_bias=has_bias,
        has_output_bias=has_bias,
        default_fraction=0.25,
    )
    delta = _read_gated_delta(config)
    layers = [
        Layer.of(attention if is_full else delta, feed_forward)
        for is_full, feed_forward in zip(_read_is_full(config), read_sparse_layers(config, moe), strict=True)
    ]
    draft = DraftSpec(layers=(Layer.of(attention, moe),))
    return dataclasses.replace(read_model(config, layers), draft=draft)


def _read_gated_delta(config: ConfigValues) -> LinearAttentionSpec:
    num_heads = config.integer("linear_num_value_heads", high=2**14)
    num_key_heads = config.integer("linear_num_key_heads", high=2**14)
    if num_heads % num_key_heads:
        raise config.wrong("linear_num_key_heads", f"must divide linear_num_value_heads={num_heads}")
    return LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=config.integer("linear_key_head_dim", high=MAX_HEAD),
        value_dim=config.integer("linear_value_head_dim", high=MAX_HEAD),
        num_taps=config.integer("linear_conv_kernel_dim", low=2, high=MAX_TAPS),
        norm_epsilon=config.number("rms_norm_eps"),
    )


def _read_is_full(config: ConfigValues) -> list[bool]:
    """Return a flag for each layer: True if it has full attention."""
    num_layers = read_num_layers(config)
    is_full = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    if is_full is not None:
        return is_full
    interval = config.integer("full_attention_interval", 4)
    return [(number + 1) % interval == 0 for number in range(num_layers)]


NAMES = (
    (r"\.linear_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.linear_attn\.", ".self_attn."),
    (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
    *ONE_MODULE,
)

QWEN3_NEXT = Family(
    name="Qwen3-Next",
    models="Qwen3-Next-80B-A3B",
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    read=read,
    names=NAMES,
    norm_offset=1.0,
)
QWEN3_5_MOE = Family(
    name="Qwen3.5-MoE",
    models="Qwen3.5-35B-A3B and larger",
    architecture="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe_text",
    other_architectures=("Qwen3_5MoeForCausalLM",),  # the text model alone
    read=read,
    wrapped=((r"^model\.language_model\.", "model."),),
    left_out=("visual.",),
    names=NAMES,
    norm_offset=1.0,
)
