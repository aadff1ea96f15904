"""DBRX: fused and clipped queries, keys and values, LayerNorms without biases, experts stacked in one matrix."""

from __future__ import annotations

import dataclasses
from typing import Any

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.streams.residual import PlainStream
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import read_attention, read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec

USUAL_NAMES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
NORM_EPSILON = 1e-5  # torch's default
EXPERTS = {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1}  # transformers' defaults


def read(config: ConfigValues) -> ModelSpec:
    empty = config.replaced({})
    attention = config.object("attn_config") or empty
    experts = (config.object("ffn_config") or empty).with_defaults(EXPERTS)
    values: dict[str, Any] = {usual: config.integer(name) for name, usual in USUAL_NAMES.items()}
    values["num_key_value_heads"] = attention.integer("kv_n_heads", 1)
    values["norm_epsilon"] = NORM_EPSILON
    # Published configs have theta only in attn_config.
    beside = config.rotary_settings().get("rope_theta") or config.values.get("rope_theta")
    values["rope_theta"] = attention.number("rope_theta", beside or 10000.0, above=1.0)
    if beside not in (None, values["rope_theta"]):
        raise attention.wrong("rope_theta", f"contradicts the rope_theta={beside} outside of it")
    usual = config.replaced(config.values | values)
    attention_config = read_attention(usual, clip=attention.optional_number("clip_qkv"))
    layer = Layer.of(attention_config, _read_experts(experts))
    model = read_model(usual, [layer] * read_num_layers(usual), epsilon_key="norm_epsilon")
    return dataclasses.replace(model, stream=PlainStream(has_layer_norms=True, has_norm_biases=False))


def _read_experts(config: ConfigValues) -> MoESpec:
    activation = config.object("ffn_act_fn")
    if activation is not None:
        activation.require("name", "silu")
    order = config.values.get("moe_normalize_expert_weights", 1)  # the router's weights are divided by this norm
    if order not in (None, 1):
        raise config.wrong("moe_normalize_expert_weights", "is not supported; supported: 1, null")
    num_experts, top_k = read_num_experts(config, "moe_num_experts", top_k_key="moe_top_k")
    return MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=order is not None),
        expert_width=read_width(config, "ffn_hidden_size"),
    )


DBRX = Family(
    name="DBRX",
    architecture="DbrxForCausalLM",
    model_type="dbrx",
    read=read,
    names=(
        (r"^(?:transformer|model)\.wte\.", "model.embed_tokens."),
        (r"^(?:transformer|model)\.norm_f\.", "model.norm."),
        (r"^(?:transformer|model)\.blocks\.", "model.layers."),
        (r"\.norm_attn_norm\.norm_1\.", ".input_layernorm."),
        (r"\.norm_attn_norm\.norm_2\.", ".post_attention_layernorm."),
        (r"\.norm_attn_norm\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.norm_attn_norm\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.ffn\.router\.layer\.", ".mlp.gate."),
        (r"\.ffn\.experts\.mlp\.w1$", ".mlp.experts.below.gate_proj"),
        (r"\.ffn\.experts\.mlp\.v1$", ".mlp.experts.below.up_proj"),
        (r"\.ffn\.experts\.mlp\.w2$", ".mlp.experts.below.down_proj"),
    ),
)
