"""LFM2-MoE: most layers have a gated short convolution instead of attention; sigmoid routing with a correction bias."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.short_convolution.convolution import ShortConvolutionSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import W123, Family
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

LAYER_TYPES = ("conv", "full_attention")


def read(config: ConfigValues) -> ModelSpec:
    num_layers = read_num_layers(config)
    num_experts, top_k = read_num_experts(config, "num_experts")
    moe = MoESpec(
        router=RouterSpec(
            num_experts=num_experts,
            top_k=top_k,
            scoring="sigmoid",
            is_normalized=config.flag("norm_topk_prob", default=True),
            has_correction=config.flag("use_expert_bias", default=True),
            scale=config.number("routed_scaling_factor", 1.0),
        ),
        expert_width=read_width(config, "moe_intermediate_size"),
    )
    attention = read_attention(config, normalized="head", default_theta=1e6)
    convolution = ShortConvolutionSpec(
        num_channels=read_hidden_size(config),
        num_taps=config.integer("conv_L_cache", low=2, high=MAX_TAPS),
        has_bias=config.flag("conv_bias", default=False),
    )
    is_full = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    if is_full is None:
        raise config.missing("layer_types")
    num_dense = config.integer("num_dense_layers", low=0)
    feed_forwards = feed_forwards_of(config, moe, [number < num_dense for number in range(num_layers)])
    layers = [
        Layer.of(attention if has_attention else convolution, feed_forward)
        for has_attention, feed_forward in zip(is_full, feed_forwards, strict=True)
    ]
    return read_model(config, layers, epsilon_key="norm_eps", is_tied=config.flag("tie_embedding", default=True))


LFM2_MOE = Family(
    name="LFM2-MoE",
    models="LFM2-8B-A1B",
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    read=read,
    names=(
        (r"^model\.embedding_norm\.", "model.norm."),
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
        (r"(\blayers\.[^.]+)\.conv\.", r"\1.self_attn."),
        (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.feed_forward\.", ".mlp."),
        *W123,
    ),
)
