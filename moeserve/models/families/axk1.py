"""A.X K1: DeepSeek-V3 with a norm after the experts of each layer."""

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
)
from moeserve.models.model_config import Block, Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("scoring_func", "sigmoid")
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_corrected_router(config),
        expert_width=expert_width,
        shared=read_shared_experts(config, expert_width),
        may_lack_correction=True,
    )
    attention = read_latent_attention(config, is_interleaved=config.flag("rope_interleave", default=True))
    if attention.query_rank is None:
        raise config.missing("q_lora_rank")
    layers = [
        Layer((Block(attention), Block(each, is_normed=each.moe is not None, ignores_norm=each.moe is None)))
        for each in read_listed_dense(config, moe)
    ]
    return read_model(config, layers)


AXK1 = Family(
    name="A.X K1",
    architecture="AXK1ForCausalLM",
    model_type="axk1",
    read=read,
    names=(
        # Published checkpoints have this norm in dense layers too, and no correction of the router.
        (r"\.(?:mlp\.)?post_mlp_layernorm\.", ".mlp_output_norm."),
    ),
)
