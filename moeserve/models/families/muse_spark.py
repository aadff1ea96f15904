"""The text part of Muse Spark: gated residual stream, experts in a latent space, norms of heads and expert outputs."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.rotary import NO_ROTARY
from moeserve.layers.streams.residual_gates import EmbeddingNorm, ResidualGates
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family, inside_other_model
from moeserve.models.fields import (
    read_attention,
    read_listed_dense,
    read_model,
    read_num_layers,
    read_router_without_groups,
    read_width,
    read_windows,
)
from moeserve.models.model_config import Block, Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    num_layers = read_num_layers(config)
    config.require("attention_bias", False)
    # Counted back from the last layer, every fourth layer attends to all positions, and has no rotary embedding.
    is_local = [(num_layers - 1 - index) % 4 != 0 for index in range(num_layers)]
    has_rotary = _read_has_rotary(config, is_local)
    attention = read_attention(
        config,
        default_theta=5e5,
        normalized="head",
        has_norm_weights=False,
        normalizes_outputs=True,
        has_gate=True,
        gate_name="gate_proj",
    )
    attention = dataclasses.replace(attention, scale=config.number("qk_scale_factor") * attention.head_dim**-0.5)
    factor, output_epsilon = config.number("output_multiplier"), config.number("post_norm_eps")
    moe = MoESpec(
        router=read_router_without_groups(config, "num_local_experts", scale=config.number("routed_scaling_factor")),
        expert_width=read_width(config, "moe_intermediate_size"),
        latent_size=config.integer("moe_hidden_size", high=2**18),
        latent_norm_epsilon=config.number("rms_norm_eps"),
        output_norm_epsilon=output_epsilon,
        router_factor=factor,
    )
    listed = read_listed_dense(config.replaced({"first_k_dense_replace": 0} | config.values), moe)
    layers: list[Layer] = []
    for window, rotates, network in zip(read_windows(config, is_local), has_rotary, listed, strict=True):
        own = attention if rotates else dataclasses.replace(attention, rotary=NO_ROTARY)
        norm = None if layers else EmbeddingNorm()
        mixer = Block(dataclasses.replace(own, window=window), norm)
        layers.append(Layer((mixer, Block(network, is_normed=True))))
    return dataclasses.replace(
        read_model(config, layers),
        stream=ResidualGates(temperature=config.number("residual_gate_temperature"), output_epsilon=output_epsilon),
        logits_divisor=1 / factor,
        logits_cap=config.number("final_logit_softcapping"),
    )


def _read_has_rotary(config: ConfigValues, default: list[bool]) -> list[bool]:
    """Return a flag for each layer: True if it has a rotary embedding. All rotary embeddings have equal frequencies."""
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return default
    if not isinstance(thetas, list) or len(thetas) != len(default):
        raise config.wrong("layer_rope_theta", f"must list a number for each of the {len(default)} layers")
    theta = config.rotary(2, default_theta=5e5).theta
    if not all(type(each) in (int, float) and each in (0, theta) for each in thetas):
        raise config.wrong("layer_rope_theta", f"must list 0 or rope_theta={theta:g}")
    return [each != 0 for each in thetas]


MUSE_SPARK = inside_other_model(
    Family(
        name="Muse Spark",
        models="Muse-Spark-Open-816B-A42B",
        architecture="MuseSparkForConditionalGeneration",
        model_type="muse_spark_text",
        read=read,
        left_out=("vision_adapter.", "vision_projection."),
        names=(
            (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
            (r"\.post_feedforward_(?:layernorm|residual_gate)\.", ".mlp_output_norm."),
            (r"\.post_attention_residual_gate\.", ".self_attn_output_norm."),
            (r"\.mlp\.pre_expert_proj\.", ".mlp.to_latent."),
            (r"\.mlp\.pre_expert_norm\.", ".mlp.latent_norm."),
            (r"\.mlp\.post_expert_proj\.", ".mlp.from_latent."),
            (r"\.mlp\.experts\.post_expert_norm\.", ".mlp.output_norm."),
        ),
        norm_offset=1.0,
    )
)
