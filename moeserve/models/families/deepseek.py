"""DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437; R1, V3.1 and Kimi-K2 share its architecture).

Both have multi-head latent attention, leading dense layers, shared experts, and many small routed experts in groups. V2
routes by softmax, V3 by sigmoid with a learned correction that balances the experts' load.
"""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import WRAPPED, Family
from moeserve.models.fields import (
    read_corrected_router,
    read_grouped_router,
    read_latent_attention,
    read_leading_dense,
    read_model,
    read_num_experts,
    read_shared_experts,
    read_width,
    with_draft_layer_like_the_last,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read_v2(config: ConfigValues) -> ModelSpec:
    return _read(config, read_v2_router(config), is_interleaved=True)


def read_v2_router(config: ConfigValues) -> RouterSpec:
    """Read a softmax router, which may have groups of experts."""
    config.require("scoring_func", "softmax")
    config.require("topk_method", "greedy", "group_limited_greedy")
    config.require("norm_topk_prob", False)
    if config.get("topk_method") != "greedy":
        return read_grouped_router(config)
    num_experts, top_k = read_num_experts(config, "n_routed_experts")  # greedy routing ignores the groups
    return RouterSpec(num_experts=num_experts, top_k=top_k, scale=config.number("routed_scaling_factor"))


def read_v3(config: ConfigValues) -> ModelSpec:
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    model = _read(config, read_corrected_router(config), is_interleaved=config.flag("rope_interleave", True))
    return with_draft_layer_like_the_last(model)


def _read(config: ConfigValues, router: RouterSpec, *, is_interleaved: bool) -> ModelSpec:
    config.refuse("index_topk")  # the key of DeepSeek-V3.2's sparse attention
    attention = read_latent_attention(config, is_interleaved=is_interleaved)
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(router=router, expert_width=expert_width, shared=read_shared_experts(config, expert_width))
    feed_forwards = read_leading_dense(config, moe)
    layers = [Layer.of(attention, feed_forward) for feed_forward in feed_forwards]
    return read_model(config, layers)


DEEPSEEK_V2 = Family(
    name="DeepSeek-V2",
    models="DeepSeek-V2, V2-Lite",
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    read=read_v2,
)
DEEPSEEK_V3 = Family(
    name="DeepSeek-V3",
    models="DeepSeek-V3, R1, V3.1, Kimi-K2",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    read=read_v3,
)
# Kimi-K2.5 is Kimi-K2 (of DeepSeek-V3's architecture) with a model for images.
KIMI_K25 = Family(
    name="Kimi-K2.5",
    architecture="KimiK25ForConditionalGeneration",
    model_type="deepseek_v3",
    other_architectures=("Kimi_K25ForConditionalGeneration",),
    read=read_v3,
    wrapped=((r"^language_model\.model\.blocks\.", "model.layers."), *WRAPPED),
    left_out=("vision_tower.", "mm_projector."),
)
