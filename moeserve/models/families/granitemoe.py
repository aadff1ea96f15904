"""Granite MoE (Granite 3 and 4 without Mamba layers): multipliers of embeddings, updates, scores and logits."""

from __future__ import annotations

import dataclasses
from typing import Any

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import read_attention, read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    return _read(config, None)


def read_with_shared(config: ConfigValues, **settings: Any) -> ModelSpec:
    """Return the shape of a Granite model, which may have shared experts. `settings` are passed to `read_attention`."""
    width = config.integer("shared_intermediate_size", 0, low=0, high=2**20)
    return _read(config, SharedExpertsSpec(width=width) if width else None, **settings)


def _read(config: ConfigValues, shared: SharedExpertsSpec | None, **settings: Any) -> ModelSpec:
    num_experts, top_k = read_num_experts(config, "num_local_experts", "num_experts")
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, scoring="softmax_of_chosen"),
        expert_width=read_width(config, "intermediate_size"),
        shared=shared,
    )
    has_bias = config.flag("attention_bias", default=False)
    attention = read_attention(
        config,
        scale=config.number("attention_multiplier", 1.0),
        has_bias=has_bias,
        has_output_bias=has_bias,
        **settings,
    )
    layer = Layer.of(attention, moe)
    model = read_model(config, [layer] * read_num_layers(config))
    # Granite multiplies each update before adding it to the residual stream. All layers normalise the stream when they
    # read it. So we keep the stream divided by the multiplier instead, and add updates unchanged.
    multiplier = config.number("residual_multiplier", 1.0)
    return dataclasses.replace(
        model,
        norm_epsilon=model.norm_epsilon / multiplier**2,
        embedding_factor=config.number("embedding_multiplier", 1.0) / multiplier,
        logits_divisor=config.number("logits_scaling", 1.0),
    )


NAMES = (
    (r"\.block_sparse_moe\.router\.(?:layer\.)?", ".mlp.gate."),
    (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.", ".mlp."),  # the form that transformers 5 saves
    (r"\.shared_mlp\.input_linear\.", ".mlp.shared_experts.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_experts.down_proj."),
)
GRANITE_MOE = Family(
    name="Granite MoE",
    models="Granite 3.0 and 3.1 MoE; Granite without Mamba layers",
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    read=read,
    names=NAMES,
)
GRANITE_MOE_SHARED = Family(
    name="Granite MoE",
    models="Granite 3.0 and 3.1 MoE; Granite without Mamba layers",
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    read=read_with_shared,
    names=NAMES,
)
