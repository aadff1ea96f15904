"""Beam: attention with gated outputs and query temperatures, and a residual stream divided by a root."""

from __future__ import annotations

import dataclasses

from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.rotary import NO_ROTARY, TemperatureSpec
from moeserve.layers.streams.residual import NormOfSum, PlainStream
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    LAYER_TYPES,
    feed_forwards_of,
    read_attention,
    read_corrected_router,
    read_model,
    read_num_layers,
    read_width,
    read_windows,
)
from moeserve.models.model_config import Block, Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    num_layers = read_num_layers(config)
    moe = MoESpec(
        router=read_corrected_router(config, "num_experts"), expert_width=read_width(config, "moe_intermediate_size")
    )
    windows = read_windows(config, [number % 6 != 0 and number != num_layers for number in range(1, num_layers + 1)])
    is_dense = config.flags_of_layers("mlp_layer_types", ("sparse", "dense"), num_layers)
    attentions = [_read_attention(config, window) for window in windows]
    feed_forwards = feed_forwards_of(config, moe, is_dense or [number < 3 for number in range(num_layers)])
    pairs = zip(attentions, feed_forwards, strict=True)
    # The stream begins with the embedded token, and each network adds a term.
    layers = [
        Layer(tuple(Block(each, NormOfSum(number), is_normed=True) for number, each in enumerate(pair, 2 * index + 1)))
        for index, pair in enumerate(pairs)
    ]
    return dataclasses.replace(
        read_model(config, layers),
        stream=PlainStream(last_norm=NormOfSum(2 * num_layers + 1)),
        logits_cap=config.optional_number("final_logit_softcapping"),
    )


def _read_attention(config: ConfigValues, window: int | None) -> AttentionSpec:
    layer_type, settings = LAYER_TYPES[window is not None], config.rotary_settings().values
    if layer_type not in settings:
        raise config.wrong("rope_parameters", f"must have the settings of {layer_type!r}, or null for it")
    attention = read_attention(
        config.of_layer_type(layer_type),
        normalized="head",
        window=window,
        has_bias=config.flag("attention_bias", default=False),
        has_output_bias=config.flag("attention_bias", default=False),
        has_biased_gate=True,
        gate_name="gate_proj",
    )
    if settings[layer_type] is not None:
        return attention
    temperature = TemperatureSpec(dim=attention.head_dim, weight=0.1, length=2048, offset=1, is_power=True)
    return dataclasses.replace(attention, rotary=NO_ROTARY, temperature=temperature)


BEAM = Family(
    name="Beam",
    models="Beam 1.0",
    architecture="BeamForCausalLM",
    model_type="beam",
    read=read,
    names=(
        (r"\.post_attention_layernorm\.", ".self_attn_output_norm."),
        (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
        (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
    ),
)
