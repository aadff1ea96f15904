"""Gemma 4 with experts (26B-A4B): a dense network beside the experts, output norms, and keys used as values."""

from __future__ import annotations

import dataclasses
from typing import Any

from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.moe.beside import BesideSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    LAYER_TYPES,
    read_attention,
    read_hidden_size,
    read_model,
    read_num_experts,
    read_num_layers,
    read_width,
)
from moeserve.models.model_config import Block, Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.rows.activations import GeGLU


def read(config: ConfigValues) -> ModelSpec:
    config.require("enable_moe_block", True)
    config.require("hidden_activation", "gelu_pytorch_tanh")
    config.require("attention_bias", False)
    config.require("num_kv_shared_layers", 0)
    config.require("hidden_size_per_layer_input", 0)
    # Bidirectional attention is only for images, which are not supported.
    config.require("use_bidirectional_attention", "vision")
    num_experts, top_k = read_num_experts(config, "num_experts", top_k_key="top_k_experts")
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=True, has_factors=True),
        expert_width=read_width(config, "moe_intermediate_size"),
        activation=GeGLU(),
    )
    dense = DenseSpec(width=read_width(config, "intermediate_size"), activation=GeGLU())
    num_layers = read_num_layers(config)
    is_windowed = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    if is_windowed is None:
        is_windowed = [(index + 1) % 6 != 0 for index in range(num_layers)]
    is_windowed[-1] = False  # as in transformers, whatever the config says about the last layer
    beside = Block(BesideSpec(dense=dense, experts=moe), is_normed=True, is_scaled=True)
    layers = [
        Layer((Block(_read_attention(config, index, windowed), is_normed=True), beside))
        for index, windowed in enumerate(is_windowed)
    ]
    model = read_model(config, layers, is_tied=True)
    return dataclasses.replace(
        model,
        embedding_factor=read_hidden_size(config) ** 0.5,
        logits_cap=config.optional_number("final_logit_softcapping"),
    )


def _read_attention(config: ConfigValues, index: int, is_windowed: bool) -> AttentionSpec:
    shares_values = config.flag("attention_k_eq_v", default=False)
    values: dict[str, Any] = config.of_layer_type(LAYER_TYPES[is_windowed]).values
    if not is_windowed:
        values = values | {"head_dim": config.integer("global_head_dim", 512, high=2**14)}
        if shares_values and values.get("num_global_key_value_heads") is not None:
            values["num_key_value_heads"] = config.integer("num_global_key_value_heads")
    own = config.object("per_layer_config")  # the form that transformers 5 writes
    if own is not None and (of_layer := own.object(str(index))) is not None:
        values = values | of_layer.values
    return read_attention(
        config.replaced(values),
        scale=1.0,
        normalized="head",
        normalizes_values=True,
        values_are_keys=shares_values and not is_windowed,
        window=config.integer("sliding_window") if is_windowed else None,
    )


GEMMA4 = Family(
    name="Gemma 4",
    models="Gemma 4 26B-A4B",
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4_text",
    other_architectures=("Gemma4ForCausalLM",),
    read=read,
    wrapped=((r"^model\.language_model\.", "model."),),
    left_out=("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."),
    names=(
        (r"\.post_attention_layernorm\.", ".self_attn_output_norm."),
        (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
        (r"\.router\.scale$", ".post_attention_layernorm.router.weight"),
        (r"\.pre_feedforward_layernorm_2\.", ".post_attention_layernorm.experts."),
        (r"\.post_feedforward_layernorm_1\.", ".mlp.dense_output_norm."),
        (r"\.post_feedforward_layernorm_2\.", ".mlp.experts_output_norm."),
        (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
        (r"\.router\.proj\.", ".mlp.gate."),
        (r"\.router\.per_expert_scale$", ".mlp.gate.per_expert_scale"),
        (r"(\blayers\.[^.]+)\.experts\.", r"\1.mlp.experts."),
    ),
)
