"""GLM-4.5 and relatives (arXiv 2508.06471): rotate half of each attention head, and route like DeepSeek-V3."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family, inside_other_model
from moeserve.models.fields import (
    read_attention,
    read_corrected_router,
    read_leading_dense,
    read_model,
    read_shared_experts,
    read_width,
    with_draft_layer_like_the_last,
)
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_corrected_router(config),
        expert_width=expert_width,
        shared=read_shared_experts(config, expert_width),
    )
    attention = read_attention(
        config,
        normalized="head" if config.flag("use_qk_norm", default=False) else "no",
        has_bias=config.flag("attention_bias", default=False),
        default_fraction=0.5,
    )
    feed_forwards = read_leading_dense(config, moe)
    layers = [Layer.of(attention, feed_forward) for feed_forward in feed_forwards]
    return with_draft_layer_like_the_last(read_model(config, layers))


GLM4_MOE = Family(
    name="GLM-4 MoE", models="GLM-4.5, GLM-4.5-Air", architecture="Glm4MoeForCausalLM", model_type="glm4_moe", read=read
)
GLM4V_MOE = inside_other_model(
    Family(name="GLM-4.5V", architecture="Glm4vMoeForConditionalGeneration", model_type="glm4v_moe_text", read=read)
)
