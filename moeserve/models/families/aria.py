"""Aria's text part: Llama's attention, experts stored with inputs first, and a softmax over the chosen experts."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family, inside_other_model
from moeserve.models.fields import read_attention, read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("mlp_bias", False)
    num_experts, top_k = read_num_experts(config, "moe_num_experts", top_k_key="moe_topk")
    width = read_width(config, "intermediate_size")
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, scoring="softmax_of_chosen"),
        expert_width=width,
        shared=SharedExpertsSpec(width=config.integer("moe_num_shared_experts", high=2**10) * width),
    )
    has_bias = config.flag("attention_bias", default=False)
    attention = read_attention(config, has_bias=has_bias, has_output_bias=has_bias)
    layer = Layer.of(attention, moe)
    return read_model(config, [layer] * read_num_layers(config))


ARIA = inside_other_model(
    Family(
        name="Aria",
        architecture="AriaForConditionalGeneration",
        model_type="aria_text",
        other_architectures=("AriaTextForCausalLM",),
        read=read,
        names=(
            (r"\.mlp\.router\.", ".mlp.gate."),
            (r"\.mlp\.experts\.(?:fc1\.weight|gate_up_proj)$", ".mlp.experts.transposed.gate_up_proj"),
            (r"\.mlp\.experts\.(?:fc2\.weight|down_proj)$", ".mlp.experts.transposed.down_proj"),
        ),
    )
)
