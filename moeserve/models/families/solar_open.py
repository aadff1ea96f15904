"""Solar Open: Llama's attention, and GLM-4.5's experts in every layer."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    read_attention,
    read_corrected_router,
    read_model,
    read_num_layers,
    read_shared_experts,
    read_width,
)
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("use_qk_norm", False)
    config.require("first_k_dense_replace", 0)
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_corrected_router(config),
        expert_width=expert_width,
        shared=read_shared_experts(config, expert_width),
    )
    has_bias = config.flag("attention_bias", default=False)
    attention = read_attention(config, has_bias=has_bias, default_fraction=1.0, default_theta=1e6)
    return read_model(config, [Layer.of(attention, moe)] * read_num_layers(config))


SOLAR_OPEN = Family(name="Solar Open", architecture="SolarOpenForCausalLM", model_type="solar_open", read=read)
