"""MiniMax-M2 (M2.1 and M2.5 too): query and key norms over all heads of a token; partial rotary embedding."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import BLOCK_SPARSE, Family
from moeserve.models.fields import read_attention, read_model, read_num_layers, read_router_without_groups, read_width
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("scoring_func", "sigmoid")
    config.require("use_qk_norm", True)
    config.require("qk_norm_type", "per_layer")
    config.require("shared_intermediate_size", 0)
    moe = MoESpec(
        router=read_router_without_groups(config, "num_local_experts", "num_experts"),
        expert_width=read_width(config, "intermediate_size"),
    )
    head_dim = config.integer("head_dim", high=2**14)
    rotary_dim = config.optional_integer("rotary_dim", high=head_dim)  # published configs have this key
    fraction = 1.0 if rotary_dim is None else rotary_dim / head_dim
    attention = read_attention(config, normalized="token", default_fraction=fraction)
    layer = Layer.of(attention, moe)
    return read_model(config, [layer] * read_num_layers(config))


MINIMAX_M2 = Family(
    name="MiniMax-M2",
    models="MiniMax-M2, M2.1, M2.5",
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    read=read,
    names=(*BLOCK_SPARSE, (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias")),
)
