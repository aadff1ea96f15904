"""Laguna: heads and windows differ by layer, softplus gates multiply attention outputs, the router is corrected."""

from __future__ import annotations

from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    LAYER_TYPES,
    read_attention,
    read_listed_dense,
    read_model,
    read_num_layers,
    read_router_without_groups,
    read_width,
    read_windows,
)
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("gating", True, "per-head", "per-element")
    config.require("moe_apply_router_weight_on_input", False)
    config.require("moe_router_logit_softcapping", 0.0)
    moe = MoESpec(
        router=read_router_without_groups(
            config, "num_experts", "num_local_experts", scale=config.number("moe_routed_scaling_factor", 1.0)
        ),
        expert_width=read_width(config, "moe_intermediate_size"),
        shared=SharedExpertsSpec(width=read_width(config, "shared_expert_intermediate_size")),
    )
    windows = read_windows(config, [False] * read_num_layers(config))
    attentions = [
        _read_attention(config, num_heads, window)
        for num_heads, window in zip(_read_num_heads(config), windows, strict=True)
    ]
    feed_forwards = read_listed_dense(config, moe)
    return read_model(config, [Layer.of(*networks) for networks in zip(attentions, feed_forwards, strict=True)])


def _read_num_heads(config: ConfigValues) -> list[int]:
    key, num_layers = "num_attention_heads_per_layer", read_num_layers(config)
    numbers = config.get(key)
    if numbers is None:
        return [config.integer("num_attention_heads", high=2**14)] * num_layers
    is_list = isinstance(numbers, list) and all(type(number) is int and 0 < number <= 2**14 for number in numbers)
    if not is_list or len(numbers) != num_layers:
        raise config.wrong(key, f"must list the heads of each of the {num_layers} layers")
    return list(numbers)


def _read_attention(config: ConfigValues, num_heads: int, window: int | None) -> AttentionSpec:
    num_kv_heads = config.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"must divide the {num_heads} heads of each layer")
    own = config.of_layer_type(LAYER_TYPES[window is not None])
    has_bias = config.flag("attention_bias", default=False)
    gates_values = config.get("gating") == "per-element"
    if gates_values and has_bias:
        raise config.wrong("attention_bias", "is not supported with gating='per-element'")
    return read_attention(
        own.replaced(own.values | {"num_attention_heads": num_heads}),
        default_fraction=1.0,
        normalized="head",
        window=window,
        has_bias=has_bias,
        has_output_bias=has_bias,
        has_gate=gates_values,
        has_head_gates=not gates_values,
        gate_name="g_proj",
        has_softplus_gates=True,
    )


LAGUNA = Family(
    name="Laguna",
    models="Laguna XS.2",
    architecture="LagunaForCausalLM",
    model_type="laguna",
    read=read,
    names=(
        (r"\.mlp\.experts\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
    ),
)
