"""A.X K2: DeepSeek-V3.2 with gated norms and gated attention outputs. Routing may be without groups of experts."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.streams.gated_norm import GatedNormSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.families.deepseek_v32 import read_sparse_attention
from moeserve.models.family import Family
from moeserve.models.fields import (
    read_corrected_router,
    read_listed_dense,
    read_model,
    read_num_layers,
    read_shared_experts,
    read_width,
)
from moeserve.models.model_config import Block, Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("scoring_func", "sigmoid")
    config.require("rope_interleave", True)
    config.require("layer_types", ["indexed_attention"] * read_num_layers(config))
    grouped = config
    if config.get("n_group") is None:
        if config.get("topk_group") is not None:
            raise config.wrong("n_group", "must be set if topk_group is")
        grouped = config.replaced(config.values | {"n_group": 1, "topk_group": 1})
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_corrected_router(grouped),
        expert_width=expert_width,
        shared=read_shared_experts(config, expert_width),
    )
    attention = read_sparse_attention(config, indexer_is_interleaved=False)[True]
    mixer = dataclasses.replace(attention, has_query_gate=True)
    norm = GatedNormSpec(config.integer("gated_norm_rank", high=2**14))
    layers = [
        Layer((Block(mixer, norm), Block(each, None if each.moe is None else norm)))
        for each in read_listed_dense(config, moe)
    ]
    return read_model(config, layers)


AXK2 = Family(
    name="A.X K2",
    architecture="AXK2ForCausalLM",
    model_type="axk2",
    read=read,
    names=(
        (r"_layernorm\.norm\.", "_layernorm."),
        (r"_layernorm\.(?:mlp\.fc1|W_down)\.", "_layernorm.gate_down."),
        (r"_layernorm\.(?:mlp\.fc2|W_up)\.", "_layernorm.gate_up."),
        (r"\.self_attn\.q_gate_proj\.", ".self_attn.q_b_proj."),
    ),
)
