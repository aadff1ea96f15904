"""Cohere2 MoE: attention and feed-forward network read the same normalised rows; only windows have positions."""

from __future__ import annotations

import dataclasses
from typing import Any

from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.rotary import NO_ROTARY
from moeserve.layers.streams.parallel import ParallelStream
from moeserve.layers.streams.residual import PlainStream
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    feed_forwards_of,
    read_attention,
    read_model,
    read_num_experts,
    read_num_layers,
    read_width,
    read_windows,
)
from moeserve.models.model_config import Block, Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    num_layers = read_num_layers(config)
    num_leading = config.integer("first_k_dense_replace", 0, low=0)
    is_sparse = config.flags_of_layers("mlp_layer_types", ("dense", "sparse"), num_layers)
    if is_sparse is None:
        is_sparse = [index >= num_leading for index in range(num_layers)]
    is_dense = [not each for each in is_sparse]
    feed_forwards = feed_forwards_of(
        config, _read_experts(config), is_dense, width_key="prefix_dense_intermediate_size"
    )
    windows = read_windows(config, _has_window(config, num_leading, num_layers))
    dense_rotates = config.integer("prefix_dense_sliding_window_pattern", 1) == 1
    has_bias = config.flag("attention_bias", default=False)
    layers = []
    for window, is_layer_dense, feed_forward in zip(windows, is_dense, feed_forwards, strict=True):
        rotates = window is not None or (is_layer_dense and dense_rotates)
        settings: dict[str, Any] = {} if rotates else {"rotary": NO_ROTARY}
        attention = read_attention(
            config, is_interleaved=True, window=window, has_bias=has_bias, has_output_bias=has_bias, **settings
        )
        layers.append(Layer((Block(attention), Block(feed_forward, has_norm=False))))
    has_layer_norms = config.get("rms_norm_eps") is None
    epsilon_key = "layer_norm_eps" if has_layer_norms else "rms_norm_eps"
    return dataclasses.replace(
        read_model(config, layers, epsilon_key=epsilon_key, is_tied=True),
        stream=ParallelStream(PlainStream(has_layer_norms=has_layer_norms, has_norm_biases=False)),
        logits_divisor=1 / config.number("logit_scale"),
    )


def _has_window(config: ConfigValues, num_leading: int, num_layers: int) -> list[bool]:
    """Return a flag for each layer: True if it has a window. Leading dense layers have a period of their own."""
    leading = config.integer("prefix_dense_sliding_window_pattern", 1)
    period = config.integer("sliding_window_pattern", 4)
    return [
        (index + 1) % leading != 0 if index < num_leading else (index - num_leading + 1) % period != 0
        for index in range(num_layers)
    ]


def _read_experts(config: ConfigValues) -> MoESpec:
    config.require("expert_selection_fn", "softmax", "sigmoid")
    config.require("shared_expert_combination_strategy", "average", "sum")
    num_experts, top_k = read_num_experts(config, "num_experts", "num_local_experts")
    width = read_width(config, "intermediate_size")
    num_shared = config.integer("num_shared_experts", 0, low=0, high=2**10)
    is_sigmoid = config.get("expert_selection_fn") == "sigmoid"
    return MoESpec(
        router=RouterSpec(
            num_experts=num_experts,
            top_k=top_k,
            scoring="sigmoid_of_chosen" if is_sigmoid else "softmax_of_chosen",
            is_normalized=is_sigmoid and config.flag("norm_topk_prob", default=True),
        ),
        expert_width=width,
        shared=SharedExpertsSpec(width=num_shared * width) if num_shared else None,
        averages_shared=config.get("shared_expert_combination_strategy") != "sum",
    )


COHERE2_MOE = Family(name="Cohere2 MoE", architecture="Cohere2MoeForCausalLM", model_type="cohere2_moe", read=read)
