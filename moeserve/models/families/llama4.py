"""Llama 4: chunked attention, or full attention without rotary embedding; one routed expert for each token."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.rotary import NO_ROTARY, TemperatureSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    feed_forwards_of,
    read_attention,
    read_model,
    read_num_experts,
    read_num_layers,
    read_width,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec

LAYER_TYPES = ("full_attention", "chunked_attention")


def read(config: ConfigValues) -> ModelSpec:
    num_experts, top_k = read_num_experts(config, "num_local_experts", "num_experts")
    config.require("num_experts_per_tok", 1)
    width = read_width(config, "intermediate_size")
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, scoring="sigmoid"),
        expert_width=width,
        shared=SharedExpertsSpec(width=width),
        weighs_inputs=True,
    )
    num_layers = read_num_layers(config)
    step = config.integer("interleave_moe_layer_step", 1)
    sparse = config.layer_numbers("moe_layers", num_layers) or frozenset(range(step - 1, num_layers, step))
    is_dense = [index not in sparse for index in range(num_layers)]
    feed_forwards = feed_forwards_of(config, moe, is_dense, width_key="intermediate_size_mlp")

    has_bias = config.flag("attention_bias", default=False)
    rotated = read_attention(
        config,
        is_interleaved=True,
        has_norm_weights=False,
        normalized="head" if config.flag("use_qk_norm", default=True) else "no",
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    plain = dataclasses.replace(
        rotated, rotary=NO_ROTARY, normalized="no", temperature=_read_temperature(config, rotated.head_dim)
    )
    chunk = config.optional_integer("attention_chunk_size")
    rotates = _read_rotated_layers(config, num_layers)
    is_chunked = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers) or rotates
    attentions = [
        dataclasses.replace(
            rotated if is_rotated else plain, window=-chunk if has_chunks and chunk is not None else None
        )
        for is_rotated, has_chunks in zip(rotates, is_chunked, strict=True)
    ]
    layers = [
        Layer.of(attention, feed_forward) for attention, feed_forward in zip(attentions, feed_forwards, strict=True)
    ]
    return read_model(config, layers)


def _read_temperature(config: ConfigValues, head_dim: int) -> TemperatureSpec | None:
    """Return the temperature of queries in layers without a rotary embedding; None if there is none."""
    config.require("attn_temperature_tuning", True, False, 4, 0)  # early configs use the numbers
    if not config.values.get("attn_temperature_tuning", True):
        return None
    return TemperatureSpec(
        dim=head_dim,
        weight=config.number("attn_scale", 0.1),
        length=config.integer("floor_scale", 8192),
        offset=1,
    )


def _read_rotated_layers(config: ConfigValues, num_layers: int) -> list[bool]:
    """Return a flag for each layer: True if it has a rotary embedding."""
    listed = config.values.get("no_rope_layers")
    if not listed:
        interval = config.integer("no_rope_layer_interval", 4)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or not all(number in (0, 1) for number in listed):
        raise config.wrong("no_rope_layers", f"must list 1 or 0 for each of the {num_layers} layers")
    return [bool(number) for number in listed[:num_layers]]


LLAMA4 = Family(
    name="Llama 4",
    models="Llama 4 Scout and Maverick",
    architecture="Llama4ForConditionalGeneration",
    model_type="llama4_text",
    other_architectures=("Llama4ForCausalLM",),
    read=read,
    wrapped=((r"^language_model\.", ""),),
    left_out=("vision_model.", "multi_modal_projector."),
    names=(
        (r"\.feed_forward\.router\.", ".mlp.gate."),
        (r"\.feed_forward\.shared_expert\.", ".mlp.shared_experts."),
        (r"\.feed_forward\.experts\.(?=(?:gate_up|down)_proj)", ".mlp.experts.transposed."),
        (r"\.feed_forward\.", ".mlp."),
    ),
)
