"""Readers for the parts of a config.json that families have in common."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.latent.attention import LatentAttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.rotary import NO_ROTARY, RotarySpec, YarnScaling
from moeserve.models.config_values import ConfigValues
from moeserve.models.model_config import DraftSpec, Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec

MAX_CONTEXT = 2**24  # tokens; tables of requests have a column for each block of a context
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_model(
    config: ConfigValues,
    layers: list[Layer],
    *,
    epsilon_key: str = "rms_norm_eps",
    context_key: str = "max_position_embeddings",
    is_tied: bool = False,
    hidden_act: str = "silu",
) -> ModelSpec:
    """Return the spec of a model with the given layers. Settings of the whole model are read from the config.

    Args:
        is_tied: default of `tie_word_embeddings`.
        hidden_act: the only supported value of the key `hidden_act`.
    """
    config.require("hidden_act", hidden_act)
    return ModelSpec(
        vocab_size=config.integer("vocab_size", high=2**24),
        hidden_size=read_hidden_size(config),
        layers=tuple(layers),
        norm_epsilon=config.number(epsilon_key),
        max_position_embeddings=_read_context(config, layers, context_key),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=is_tied),
        num_skipped_layers=config.optional_integer("num_nextn_predict_layers", low=0, high=2**6) or 0,
    )


def with_draft_layer_like_the_last(model: ModelSpec) -> ModelSpec:
    """Return the model with MTP modules whose layers have the shape of its last decoder layer.

    In these models (DeepSeek-V3, GLM-4.5), only the first decoder layers differ in shape from the others.
    """
    return with_draft_layer(model, model.layers[-1])


def with_draft_layer(model: ModelSpec, layer: Layer, count: int | None = None, **others: Any) -> ModelSpec:
    """Return the model with MTP modules whose layers have the shape `layer`; unchanged if the config counts no modules.

    Args:
        count: number of modules; None: as many as the config counts.
        others: other fields of `DraftSpec`.
    """
    draft = DraftSpec(layers=(layer,) * (model.num_skipped_layers if count is None else count), **others)
    return dataclasses.replace(model, draft=draft) if model.num_skipped_layers else model


def _read_context(config: ConfigValues, layers: list[Layer], key: str) -> int:
    """Return the maximum context in tokens: the value under `key`, or the length that YaRN extends it to if larger."""
    rotaries = {rotary for layer in layers for rotary in layer.rotaries}
    scalings = {rotary.scaling for rotary in rotaries if isinstance(rotary, RotarySpec)}
    extended = (
        int(scaling.original_max_position_embeddings * scaling.factor)
        for scaling in scalings
        if isinstance(scaling, YarnScaling)
    )
    return min(max(config.integer(key), *extended, 0), MAX_CONTEXT)


def read_hidden_size(config: ConfigValues) -> int:
    return config.integer("hidden_size", high=2**18)


def read_num_layers(config: ConfigValues) -> int:
    return config.integer("num_hidden_layers", high=2**12)


def read_width(config: ConfigValues, key: str) -> int:
    """Read the width of a feed-forward network."""
    return config.integer(key, high=2**20)


def read_attention(
    config: ConfigValues,
    *,
    default_fraction: float | None = None,
    is_interleaved: bool = False,
    default_theta: float | None = None,
    **settings: Any,
) -> AttentionSpec:
    """Read the shape of grouped-query attention.

    Args:
        default_fraction, is_interleaved, default_theta: as in `ConfigValues.rotary`; unused if `settings` has a rotary.
        settings: fields of AttentionSpec that the family sets itself.
    """
    num_heads = config.integer("num_attention_heads", high=2**14)
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"must divide num_attention_heads={num_heads}")
    head_dim = config.optional_integer("head_dim", high=2**14)
    if head_dim is None:
        hidden_size = read_hidden_size(config)
        if hidden_size % num_heads:
            raise config.wrong("hidden_size", f"must be a multiple of num_attention_heads={num_heads}")
        head_dim = hidden_size // num_heads
    if "rotary" not in settings:
        settings["rotary"] = config.rotary(
            head_dim,
            default_fraction=default_fraction,
            is_interleaved=is_interleaved,
            default_theta=default_theta,
        )
    return AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **settings)


def read_latent_attention(config: ConfigValues, *, is_interleaved: bool) -> LatentAttentionSpec:
    """Read the shape of latent attention (DeepSeek)."""
    rotary = config.rotary(
        config.integer("qk_rope_head_dim", high=2**14),
        head_dim_key="qk_rope_head_dim",
        is_interleaved=is_interleaved,
    )
    return LatentAttentionSpec(
        num_heads=config.integer("num_attention_heads", high=2**14),
        query_rank=config.optional_integer("q_lora_rank", high=2**18),
        latent_size=config.integer("kv_lora_rank", high=2**18),
        key_dim=config.integer("qk_nope_head_dim", high=2**14),
        rotary=rotary,
        value_dim=config.integer("v_head_dim", high=2**14),
        score_factor=rotary.score_factor,
        has_bias=config.flag("attention_bias", False),
    )


def read_windows(config: ConfigValues, default: Sequence[bool] | None = None) -> list[int | None]:
    """Return the window of each layer in tokens; None for full attention.

    Args:
        default: True for layers with a window, used if the config has no `layer_types`; None: a missing `layer_types`
            is an error.
    """
    num_layers = read_num_layers(config)
    has_window = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    if has_window is None:
        if default is None:
            raise config.missing("layer_types")
        has_window = list(default)
    if not any(has_window):
        return [None] * num_layers
    window = config.integer("sliding_window")
    return [window if has else None for has in has_window]


def read_module_window(config: ConfigValues, *, default: bool) -> int | None:
    """Return the window of an MTP module in tokens; None for full attention.

    Args:
        default: True if the module has a window, used if the config has no `mtp_layer_types`.
    """
    listed = config.values.get("mtp_layer_types")
    has_window = listed[0] == LAYER_TYPES[1] if isinstance(listed, list) and listed else default
    return config.integer("sliding_window") if has_window else None


def rotated_in_windows(attention: AttentionSpec, windows: Sequence[int | None]) -> list[AttentionSpec]:
    """Return the attention of each layer. Layers with full attention have no rotary embedding."""
    full = dataclasses.replace(attention, rotary=NO_ROTARY)
    return [full if window is None else dataclasses.replace(attention, window=window) for window in windows]


def read_num_experts(config: ConfigValues, *keys: str, top_k_key: str = "num_experts_per_tok") -> tuple[int, int]:
    """Read the numbers of experts in a layer (under one of `keys`, the usual key first) and of experts per token."""
    key = config.key_of(*keys)
    num_experts = config.integer(key, high=2**14)
    top_k = config.integer(top_k_key)
    if top_k > num_experts:
        raise config.wrong(top_k_key, f"is more than {key}={num_experts}")
    return num_experts, top_k


def read_router_without_groups(config: ConfigValues, *keys: str, scale: float = 1.0) -> RouterSpec:
    """Read a sigmoid router with a learned correction and normalised weights. `keys`: see `read_num_experts`."""
    num_experts, top_k = read_num_experts(config, *keys)
    return RouterSpec(
        num_experts=num_experts, top_k=top_k, scoring="sigmoid", is_normalized=True, has_correction=True, scale=scale
    )


def read_groups(config: ConfigValues, num_experts: int, top_k: int, *, key: str = "n_group") -> tuple[int, int]:
    """Read the number of groups of experts, and how many groups are chosen for a token."""
    num_groups, num_chosen = config.integer(key), config.integer("topk_group")
    if num_experts % num_groups:
        raise config.wrong(key, f"must divide the number of experts, {num_experts}")
    if num_chosen > num_groups:
        raise config.wrong("topk_group", f"is more than {key}={num_groups}")
    num_eligible = num_chosen * (num_experts // num_groups)
    if top_k > num_eligible:
        raise config.wrong("num_experts_per_tok", f"is more than the {num_eligible} experts of topk_group={num_chosen}")
    return num_groups, num_chosen


def read_step_limit(config: ConfigValues) -> None:
    """Refuse limits on Mamba-2's step sizes, unless they have no effect."""
    unlimited = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # transformers writes the last form
    if config.values.get("time_step_limit") not in unlimited:
        raise config.wrong("time_step_limit", "is not supported; supported: [0.0, Infinity]")


def read_grouped_router(config: ConfigValues, key: str = "n_routed_experts") -> RouterSpec:
    """Read a softmax router with groups of experts (DeepSeek-V2). The config's `key` holds the number of experts."""
    num_experts, top_k = read_num_experts(config, key, "num_local_experts")
    num_groups, num_chosen_groups = read_groups(config, num_experts, top_k)
    return RouterSpec(
        num_experts=num_experts,
        top_k=top_k,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        scale=config.number("routed_scaling_factor"),
    )


def read_corrected_router(
    config: ConfigValues, key: str = "n_routed_experts", *, is_normalized: bool = True
) -> RouterSpec:
    """Read a sigmoid router with groups of experts and a learned correction (DeepSeek-V3, GLM-4.5).

    Args:
        key: the config's key for the number of experts.
        is_normalized: default of `norm_topk_prob`.
    """
    router = read_grouped_router(config, key)
    if router.num_groups > 1 and router.num_experts == router.num_groups:
        raise config.wrong("n_group", "gives groups of one expert, but groups are rated by their best two")
    return dataclasses.replace(
        router,
        scoring="sigmoid",
        experts_rating_group=2,
        is_normalized=config.flag("norm_topk_prob", default=is_normalized),
        has_correction=True,
    )


def read_shared_experts(config: ConfigValues, expert_width: int) -> SharedExpertsSpec | None:
    """Read shared experts, each as wide as a routed one. Return None if there are none."""
    num_shared = config.optional_integer("n_shared_experts", low=0, high=2**10) or 0
    return SharedExpertsSpec(width=num_shared * expert_width) if num_shared else None


def read_leading_dense(config: ConfigValues, moe: MoESpec) -> list[MoESpec | DenseSpec]:
    """Return each layer's network: dense in the first `first_k_dense_replace` layers, then experts (DeepSeek, GLM)."""
    num_layers = read_num_layers(config)
    is_dense = _read_moe_layer_freq(config, num_layers)
    if is_dense is None:
        num_leading = config.integer("first_k_dense_replace", low=0)
        is_dense = [index < num_leading for index in range(num_layers)]
    return feed_forwards_of(config, moe, is_dense)


def _read_moe_layer_freq(config: ConfigValues, num_layers: int) -> list[bool] | None:
    """Return a flag for each layer: True for a dense network. Return None if `moe_layer_freq` is not a list."""
    flags = config.get("moe_layer_freq")
    if not isinstance(flags, list):
        config.require("moe_layer_freq", 1)
        return None
    if len(flags) != num_layers or not all(flag in (0, 1) for flag in flags):
        raise config.wrong("moe_layer_freq", f"must list 0 or 1 for each of the {num_layers} layers")
    return [flag == 0 for flag in flags]


def read_sparse_layers(config: ConfigValues, moe: MoESpec) -> list[MoESpec | DenseSpec]:
    """Return a dense network or experts for each layer (Qwen).

    Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` lists it.
    """
    num_layers = read_num_layers(config)
    step = config.integer("decoder_sparse_step", 1)
    listed = config.layer_numbers("mlp_only_layers", num_layers)
    return feed_forwards_of(config, moe, [(index + 1) % step != 0 or index in listed for index in range(num_layers)])


def read_listed_dense(config: ConfigValues, moe: MoESpec) -> list[MoESpec | DenseSpec]:
    """Return the network of each layer as `mlp_layer_types` lists it. Without a list, the first layers are dense."""
    num_layers = read_num_layers(config)
    is_dense = config.flags_of_layers("mlp_layer_types", ("sparse", "dense"), num_layers)
    if is_dense is None:
        is_dense = _read_moe_layer_freq(config, num_layers)
    if is_dense is None:
        num_leading = config.integer("first_k_dense_replace", 1, low=0)
        is_dense = [index < num_leading for index in range(num_layers)]
    return feed_forwards_of(config, moe, is_dense)


def feed_forwards_of(
    config: ConfigValues, moe: MoESpec, is_dense: Sequence[bool], *, width_key: str = "intermediate_size"
) -> list[MoESpec | DenseSpec]:
    """Return each layer's network: dense, with the width under `width_key`, where `is_dense` is True, else experts."""
    if not any(is_dense):
        return [moe] * len(is_dense)
    dense = DenseSpec(width=read_width(config, width_key))
    return [dense if is_layer_dense else moe for is_layer_dense in is_dense]
