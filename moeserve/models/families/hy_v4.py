"""HY-V4: sparse latent attention with sinks and gates, and hyper-connections that do not mix the streams."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.streams.hyper_connections import HyperStreams
from moeserve.models.config_values import ConfigValues
from moeserve.models.families.deepseek_v4 import MAX_STREAMS
from moeserve.models.families.deepseek_v32 import INDEXER_TYPES, read_sparse_attention
from moeserve.models.family import Family
from moeserve.models.fields import (
    read_corrected_router,
    read_listed_dense,
    read_model,
    read_num_layers,
    read_shared_experts,
    read_width,
    with_draft_layer,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.rows.activations import CutSwiGLU


def read(config: ConfigValues) -> ModelSpec:
    num_layers = read_num_layers(config)
    config.require("layer_types", ["indexed_attention"] * num_layers)
    has_indexer = config.flags_of_layers("indexer_types", INDEXER_TYPES, num_layers)
    has_indexer = has_indexer or [layer == 0 or layer % 4 == 1 for layer in range(num_layers)]
    if not has_indexer[0]:
        raise config.wrong("indexer_types", "must give the first layer an indexer, because no earlier layer has one")
    of_layer = read_sparse_attention(config, is_interleaved=False, indexer_is_interleaved=False)
    for has, attention in of_layer.items():
        indexer = attention.indexer
        if indexer is not None:
            indexer = dataclasses.replace(indexer, rotates_last=True, norm_epsilon=config.number("rms_norm_eps"))
        of_layer[has] = dataclasses.replace(attention, indexer=indexer, has_sinks=True, gate_name="gate_proj")
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_corrected_router(config),
        expert_width=expert_width,
        activation=CutSwiGLU(config.number("swiglu_limit")),
        shared=read_shared_experts(config, expert_width),
    )
    layers = [
        Layer.of(of_layer[has], each) for has, each in zip(has_indexer, read_listed_dense(config, moe), strict=True)
    ]
    epsilon = config.number("hc_eps")
    streams = HyperStreams(
        num_streams=config.integer("hc_mult", high=MAX_STREAMS),
        num_iterations=0,
        epsilon=epsilon,
        output_factor=config.number("hc_magnitude"),
        output_epsilon=epsilon,
    )
    model = dataclasses.replace(read_model(config, layers), stream=streams)
    return with_draft_layer(model, Layer.of(of_layer[True], moe))  # modules have one residual stream


HY_V4 = Family(
    name="Hy4",
    architecture="HYV4ForCausalLM",
    model_type="hy_v4",
    read=read,
    names=(
        (r"^model\.mtp_layers\.", "draft."),
        (r"\.hc_pre\.", "."),
        (r"\.(?:hc_attn_layer\.hc_|attn_hc\.)", ".input_layernorm.hc_"),
        (r"\.(?:hc_mlp_layer\.hc_|ffn_hc\.)", ".post_attention_layernorm.hc_"),
        (r"\.hc_head\.hc_(?:head_)?", ".norm.hc_"),
        (r"\.learnable_sink_param$", ".sinks"),
        (r"\.linear_gate\.", ".gate_proj."),
    ),
)
