"""Kolibri 1: norms before and after networks, positions only in windows, sigmoids of the chosen experts' logits."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    read_attention,
    read_model,
    read_num_experts,
    read_num_layers,
    read_width,
    read_windows,
    rotated_in_windows,
)
from moeserve.models.model_config import Block, Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    num_experts, top_k = read_num_experts(config, "num_experts", "num_local_experts")
    moe = MoESpec(
        router=RouterSpec(
            num_experts=num_experts,
            top_k=top_k,
            scoring="sigmoid_of_chosen",
            is_normalized=config.flag("norm_topk_prob", default=False),
            has_correction=True,
        ),
        expert_width=read_width(config, "moe_intermediate_size"),
        shared=SharedExpertsSpec(width=read_width(config, "shared_expert_intermediate_size")),
    )
    has_window = [(index + 1) % 5 != 0 for index in range(read_num_layers(config))]
    config.integer("sliding_window")  # required, because transformers would rotate all layers without a window
    attentions = rotated_in_windows(read_attention(config, normalized="head"), read_windows(config, has_window))
    layers = [Layer((Block(attention, is_normed=True), Block(moe, is_normed=True))) for attention in attentions]
    return read_model(config, layers)


KOLIBRI1 = Family(
    name="Kolibri 1",
    models="Kolibri-1",
    architecture="Kolibri1ForCausalLM",
    model_type="kolibri1",
    read=read,
    names=(
        (r"\.moe\.router\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.post_(?:attn_norm|self_attn_layernorm)\.", ".self_attn_output_norm."),
        (r"\.post_(?:ffn_norm|mlp_layernorm)\.", ".mlp_output_norm."),
    ),
)
