"""ERNIE-4.5 (technical report of 2025-06-29): softmax routing with a correction; interleaved rotary embedding."""

from __future__ import annotations

from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    feed_forwards_of,
    read_attention,
    read_model,
    read_num_experts,
    read_num_layers,
    read_width,
    with_draft_layer,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    moe = read_experts(config, read_width(config, "moe_intermediate_size"))
    attention = read_attention(config, is_interleaved=True)
    layers = [Layer.of(attention, feed_forward) for feed_forward in feed_forwards_of(config, moe, _read_dense(config))]
    dense = DenseSpec(width=read_width(config, "intermediate_size"))
    return with_draft_layer(read_model(config, layers), Layer.of(attention, dense), shares_norm=True)


def read_experts(config: ConfigValues, width: int) -> MoESpec:
    config.require("use_bias", False)
    num_experts, top_k = read_num_experts(config, "moe_num_experts", top_k_key="moe_k")
    num_shared = config.integer("moe_num_shared_experts", low=0, high=2**10)
    return MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=True, has_correction=True),
        expert_width=width,
        shared=SharedExpertsSpec(width=num_shared * width) if num_shared else None,
    )


def _read_dense(config: ConfigValues) -> list[bool]:
    """Return a flag for each layer: True if it has no experts."""
    num_layers = read_num_layers(config)
    first = config.integer("moe_layer_start_index", low=0)
    last = config.integer("moe_layer_end_index", -1, low=-1)
    interval = config.integer("moe_layer_interval", 1)
    end = num_layers if last == -1 else last + 1
    return [index not in range(first, end) or (index + 1) % interval != 0 for index in range(num_layers)]


ERNIE4_5_MOE = Family(
    name="ERNIE-4.5",
    models="ERNIE-4.5-21B-A3B",
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    read=read,
    names=(
        (r"\.mlp\.(?:gate\.)?moe_statics\.", ".mlp.gate."),
        (r"^model\.mtp_block\.(\d+)\.", r"draft.\1.layer."),
        (r"^model\.mtp_emb_norm\.(\d+)\.", r"draft.\1.embedding_norm."),
        (r"^model\.mtp_hidden_norm\.(\d+)\.", r"draft.\1.hidden_norm."),
        (r"^model\.mtp_linear_proj\.(\d+)\.", r"draft.\1.projection."),
        (r"^model\.mtp_", "draft.0.copy."),
    ),
)
