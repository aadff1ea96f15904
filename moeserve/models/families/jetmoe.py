"""JetMoE: experts in attention and in feed-forward networks, with a separate router for each."""

from __future__ import annotations

import dataclasses

from moeserve.layers.expert_attention.attention import ExpertAttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.streams.residual import NormWithEpsilon, PlainStream
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec

EPSILON = 1e-6  # epsilon of all norms except the last


def read(config: ConfigValues) -> ModelSpec:
    config.require("activation_function", "silu")
    num_experts, top_k = read_num_experts(config, "num_local_experts", "num_experts")
    router = RouterSpec(num_experts=num_experts, top_k=top_k, scoring="softmax_of_chosen")
    head_dim = config.integer("kv_channels", high=2**14)
    attention = ExpertAttentionSpec(
        router=router,
        num_kv_heads=config.integer("num_key_value_heads", high=2**14),
        head_dim=head_dim,
        rotary=config.rotary(head_dim, head_dim_key="kv_channels"),
    )
    moe = MoESpec(router=router, expert_width=read_width(config, "intermediate_size"), has_output_bias=True)
    model = read_model(config, [Layer.of(attention, moe)] * read_num_layers(config), is_tied=True)
    last_norm = NormWithEpsilon(model.norm_epsilon)
    return dataclasses.replace(model, stream=PlainStream(last_norm=last_norm), norm_epsilon=EPSILON)


JETMOE = Family(
    name="JetMoE",
    models="JetMoE-8B",
    architecture="JetMoeForCausalLM",
    model_type="jetmoe",
    read=read,
    names=(
        (r"\.self_attention\.experts\.router\.layer\.", ".self_attn.gate."),
        (r"\.self_attention\.experts\.input_linear\.weight$", ".self_attn.experts.q_proj"),
        (r"\.self_attention\.experts\.output_linear\.weight$", ".self_attn.experts.o_proj"),
        (r"\.self_attention\.", ".self_attn."),
        (r"\.mlp\.router\.layer\.", ".mlp.gate."),
        (r"\.mlp\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.mlp\.output_linear\.weight$", ".mlp.experts.down_proj"),
    ),
)
