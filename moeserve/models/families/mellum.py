"""Mellum 2: Qwen3-MoE with sliding windows. Layers with and without windows have different rotary frequencies."""

from __future__ import annotations

from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import ONE_MODULE, Family
from moeserve.models.fields import (
    LAYER_TYPES,
    feed_forwards_of,
    read_attention,
    read_model,
    read_module_window,
    read_num_experts,
    read_num_layers,
    read_width,
    read_windows,
    with_draft_layer,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec

THETAS = (5e5, 1e4)  # bases for layers without and with windows, unless the config has others


def read(config: ConfigValues) -> ModelSpec:
    num_layers = read_num_layers(config)
    num_experts, top_k = read_num_experts(config, "num_experts", "num_local_experts")
    is_normalized = config.flag("norm_topk_prob", default=True)
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=is_normalized),
        expert_width=read_width(config, "moe_intermediate_size"),
    )
    is_dense = config.flags_of_layers("mlp_layer_types", ("sparse", "dense"), num_layers) or [False] * num_layers
    has_bias = config.flag("attention_bias", default=False)
    windows = read_windows(config, default=[False] * num_layers)

    def attention_of(window: int | None) -> AttentionSpec:
        return read_attention(
            config.of_layer_type(LAYER_TYPES[window is not None]),
            normalized="head",
            has_bias=has_bias,
            has_output_bias=has_bias,
            window=window,
            default_fraction=1.0,
            default_theta=THETAS[window is not None],
        )

    attentions = {window: attention_of(window) for window in set(windows)}
    feed_forwards = feed_forwards_of(config, moe, is_dense)
    layers = [Layer.of(attentions[window], feed) for window, feed in zip(windows, feed_forwards, strict=True)]
    model = read_model(config, layers)
    if not model.num_skipped_layers:
        return model
    of_module = attention_of(read_module_window(config, default=True))
    return with_draft_layer(model, Layer.of(of_module, moe), count=1)


MELLUM = Family(name="Mellum 2", architecture="MellumForCausalLM", model_type="mellum", read=read, names=ONE_MODULE)
