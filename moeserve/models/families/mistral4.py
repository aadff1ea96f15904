"""Mistral-4: latent attention with a query temperature that grows with position; softmax routing with groups."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.rotary import TemperatureSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import WRAPPED, Family
from moeserve.models.fields import (
    read_grouped_router,
    read_latent_attention,
    read_leading_dense,
    read_model,
    read_shared_experts,
    read_width,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("model_type", "mistral4")
    attention = read_latent_attention(config, is_interleaved=config.flag("rope_interleave", True))
    settings = config.rotary_settings()
    if (weight := settings.optional_number("llama_4_scaling_beta")) is not None:
        if attention.query_dim % 2:
            raise config.wrong("qk_nope_head_dim", "must be even for llama_4_scaling_beta")
        length = settings.integer("original_max_position_embeddings")
        temperature = TemperatureSpec(dim=attention.query_dim, weight=weight, length=length)
        attention = dataclasses.replace(attention, temperature=temperature)
    expert_width = read_width(config, "moe_intermediate_size")
    router = read_normalized_router(config)
    moe = MoESpec(router=router, expert_width=expert_width, shared=read_shared_experts(config, expert_width))
    layers = [Layer.of(attention, feed_forward) for feed_forward in read_leading_dense(config, moe)]
    return read_model(config, layers)


def read_normalized_router(config: ConfigValues) -> RouterSpec:
    """Read a softmax router with groups of experts. The two best experts of a group give its rating."""
    router = read_grouped_router(config)
    if router.num_groups > 1 and router.num_experts == router.num_groups:
        raise config.wrong("n_group", "gives groups of one expert, but groups are rated by their best two")
    is_normalized = config.flag("norm_topk_prob", default=True)
    return dataclasses.replace(router, experts_rating_group=2, is_normalized=is_normalized)


MISTRAL4 = Family(
    name="Mistral-4",
    models="Mistral Small 4",
    architecture="Mistral4ForCausalLM",
    model_type="mistral4",
    other_architectures=("Mistral3ForConditionalGeneration",),  # name of checkpoints with a model for images
    read=read,
    wrapped=WRAPPED,
    left_out=("vision_tower.", "multi_modal_projector."),
)
