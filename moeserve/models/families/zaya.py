"""Zaya: compressed convolutional attention, routers with states, and learned functions of the residual stream."""

from __future__ import annotations

import dataclasses

from moeserve.layers.convolutional.attention import ConvolutionalAttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.stateful import StatefulMoESpec
from moeserve.layers.streams.affine import AffineStream, FirstNorm
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import read_attention, read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Block, Layer, ModelSpec
from moeserve.ops.convolution.interface import MAX_TAPS
from moeserve.ops.routing.interface import RouterSpec

LAYER_TYPES = ("hybrid", "hybrid_sliding")
THETAS = (5e6, 1e4)
MAX_HEAD = 512


def read(config: ConfigValues) -> ModelSpec:
    config.require("attention_bias", False)
    config.require("num_experts_per_tok", 1)
    num_experts, top_k = read_num_experts(config, "num_experts", "num_local_experts")
    width = config.integer("router_hidden_size", high=2**16)
    # A router may choose no expert. This choice counts as an additional expert that returns nothing.
    router = RouterSpec(num_experts=num_experts, top_k=top_k, num_zero_experts=1, has_correction=True)
    moe = MoESpec(
        router=router,
        expert_width=read_width(config, "moe_intermediate_size"),
        router_size=width,
        zero_experts_return_nothing=True,
    )
    num_layers = read_num_layers(config)
    has_window = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers) or [False] * num_layers
    layers = []
    for index, has in enumerate(has_window):
        experts = StatefulMoESpec(experts=moe, router_width=width, reads_state=index > 0)
        attention = Block(_read_attention(config, has), FirstNorm() if index == 0 else None)
        layers.append(Layer((attention, Block(experts))))
    model = read_model(config, layers, is_tied=True)
    has_head_bias = config.flag("lm_head_bias", default=False)
    return dataclasses.replace(model, stream=AffineStream(), has_head_bias=has_head_bias)


def _read_attention(config: ConfigValues, has_window: bool) -> ConvolutionalAttentionSpec:
    own = config.of_layer_type(LAYER_TYPES[has_window])
    config.integer("head_dim", high=MAX_HEAD)
    heads = read_attention(
        own,
        default_fraction=0.5,
        default_theta=THETAS[has_window],
        window=config.integer("sliding_window") if has_window else None,
    )
    taps = [config.integer(key, high=MAX_TAPS // 2) for key in ("cca_time0", "cca_time1")]
    return ConvolutionalAttentionSpec(heads=heads, num_channel_taps=taps[0], num_head_taps=taps[1])


ZAYA = Family(
    name="Zaya",
    models="ZAYA1-8B",
    architecture="ZayaForCausalLM",
    model_type="zaya",
    read=read,
    names=(
        (r"^model\.input_hidden_states_", "model.layers.0.input_layernorm.input_"),
        (r"\.self_attn\.qkv_proj\.", ".self_attn."),
        (r"\.post_attention_residual_scale\.", ".self_attn_output_norm."),
        (r"\.post_mlp_residual_scale\.", ".mlp_output_norm."),
        (r"\.mlp\.gate\.router_mlp\.out_proj\.", ".mlp.gate."),
        (r"\.mlp\.gate\.balancing_biases$", ".mlp.gate.e_score_correction_bias"),
        (r"\.mlp\.gate\.(?:router_mlp\.|router_)?(?=down_proj|states_scale|norm|fc)", ".mlp.router."),
    ),
)
