"""Hunyuan-A13B: query and key norms after the rotary embedding, whose base has NTK scaling."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.rotary import NtkScaling, RotarySpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import read_attention, read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec

PER_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")  # one number, or a list by layer


def read(config: ConfigValues) -> ModelSpec:
    config = _with_one_number_for_all_layers(config)
    config.require("use_qk_norm", True)
    config.require("use_cla", False)  # sharing of keys and values between layers
    config.require("num_shared_expert", 1)
    num_experts, top_k = read_num_experts(config, "num_experts", top_k_key="moe_topk")
    width = read_width(config, "intermediate_size")
    config.require("moe_intermediate_size", width)
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=True),
        expert_width=width,
        shared=SharedExpertsSpec(width=width),
    )
    has_bias = config.flag("attention_bias", default=False)
    attention = read_attention(
        config,
        normalized="head",
        rotates_first=True,
        has_bias=has_bias,
        has_output_bias=has_bias,
        rotary=_read_rotary(config),
    )
    layer = Layer.of(attention, moe)
    return read_model(config, [layer] * read_num_layers(config))


def _with_one_number_for_all_layers(config: ConfigValues) -> ConfigValues:
    values = dict(config.values)
    for key in PER_LAYER:
        listed = values.get(key)
        if isinstance(listed, list) and listed:
            if any(number != listed[0] for number in listed):
                raise config.wrong(key, "differs between layers, which is not supported")
            values[key] = listed[0]
    return config.replaced(values)


def _read_rotary(config: ConfigValues) -> RotarySpec:
    """Return the rotary settings. Published configs with `alpha` have rope_type "dynamic"."""
    settings, head_dim = config.rotary_settings(), config.integer("head_dim", high=2**14)
    if settings.values["rope_type"] != "dynamic":
        return config.rotary(head_dim)
    plain = config.replaced(config.values | {"rope_parameters": settings.values | {"rope_type": "default"}})
    rotary = plain.rotary(head_dim)
    return dataclasses.replace(rotary, scaling=NtkScaling(settings.number("alpha")))


HUNYUAN_V1_MOE = Family(
    name="Hunyuan-A13B",
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    read=read,
    names=(
        (r"\.mlp\.gate\.wg\.", ".mlp.gate."),
        (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
        (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
        (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
    ),
)
