"""dots.llm1 (arXiv 2506.05767): normalises queries and keys head by head, and routes like DeepSeek-V3."""

from __future__ import annotations

import dataclasses

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    read_attention,
    read_corrected_router,
    read_leading_dense,
    read_model,
    read_num_layers,
    read_shared_experts,
    read_width,
    read_windows,
)
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("scoring_func", "sigmoid", "noaux_tc")
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_corrected_router(config, is_normalized=False),
        expert_width=expert_width,
        shared=read_shared_experts(config, expert_width),
    )
    has_bias = config.flag("attention_bias", default=False)
    attention = read_attention(config, normalized="head", has_bias=has_bias, has_output_bias=has_bias)
    layers = [
        Layer.of(dataclasses.replace(attention, window=window), feed_forward)
        for window, feed_forward in zip(_read_windows(config), read_leading_dense(config, moe), strict=True)
    ]
    return read_model(config, layers)


def _read_windows(config: ConfigValues) -> list[int | None]:
    """Return the window of each layer in tokens. If no list exists, layers from `max_window_layers` on have windows."""
    num_layers = read_num_layers(config)
    if config.optional_integer("sliding_window") is None:
        return [None] * num_layers
    num_full = config.integer("max_window_layers", 62, low=0)
    return read_windows(config, default=[index >= num_full for index in range(num_layers)])


DOTS1 = Family(name="dots.llm1", architecture="Dots1ForCausalLM", model_type="dots1", read=read)
