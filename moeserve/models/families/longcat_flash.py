"""LongCat-Flash: two attentions, two dense networks and parallel experts per layer. Zero experts return their input."""

from __future__ import annotations

import dataclasses

from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shortcut import ShortcutEndSpec, ShortcutStartSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    read_hidden_size,
    read_latent_attention,
    read_model,
    read_num_experts,
    read_width,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("attention_bias", False)
    config.require("router_bias", False)
    config.require("zero_expert_type", "identity")
    num_experts, top_k = read_num_experts(config, "n_routed_experts", top_k_key="moe_topk")
    attention = read_latent_attention(config, is_interleaved=True)
    if attention.query_rank is None:
        raise config.wrong("q_lora_rank", "must be set")
    hidden_size = read_hidden_size(config)
    attention = dataclasses.replace(
        attention,
        score_factor=attention.score_factor * (hidden_size / attention.query_rank) ** 0.5,
        latent_factor=(hidden_size / attention.latent_size) ** 0.5,
    )
    moe = MoESpec(
        router=RouterSpec(
            num_experts=num_experts,
            num_zero_experts=config.integer("zero_expert_num", 0, low=0, high=2**14),
            top_k=top_k,
            scale=config.number("routed_scaling_factor"),
            has_correction=True,
        ),
        expert_width=read_width(config, "expert_ffn_hidden_size"),
    )
    dense = DenseSpec(width=read_width(config, "ffn_hidden_size"))
    start, end = ShortcutStartSpec(dense=dense, experts=moe), ShortcutEndSpec(dense=dense)
    layer = Layer.of(attention, start, attention, end)
    return read_model(config, [layer] * config.integer("num_layers", high=2**12))


LONGCAT_FLASH = Family(
    name="LongCat-Flash",
    architecture="LongcatFlashForCausalLM",
    model_type="longcat_flash",
    read=read,
    left_out=("mtp.",),
    names=(
        (r"\.mlp\.router\.classifier\.", ".mlp.0.moe.gate."),
        (r"\.mlp\.router\.", ".mlp.0.moe.gate."),
        (r"\.mlp\.experts\.", ".mlp.0.moe.experts."),
        (r"\.mlps\.", ".mlp."),
    ),
)
