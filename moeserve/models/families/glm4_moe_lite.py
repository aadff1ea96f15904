"""GLM-4.7-Flash: the latent attention of DeepSeek-V3 with the routing of GLM-4.5."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    read_corrected_router,
    read_latent_attention,
    read_listed_dense,
    read_model,
    read_shared_experts,
    read_width,
    with_draft_layer_like_the_last,
)
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("topk_method", "noaux_tc")
    config.require("partial_rotary_factor", 1.0)
    attention = read_latent_attention(config, is_interleaved=config.flag("rope_interleave", True))
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_corrected_router(config),
        expert_width=expert_width,
        shared=read_shared_experts(config, expert_width),
    )
    feed_forwards = read_listed_dense(config, moe)
    layers = [Layer.of(attention, feed_forward) for feed_forward in feed_forwards]
    return with_draft_layer_like_the_last(read_model(config, layers))


GLM4_MOE_LITE = Family(
    name="GLM-4.7-Flash", architecture="Glm4MoeLiteForCausalLM", model_type="glm4_moe_lite", read=read
)
