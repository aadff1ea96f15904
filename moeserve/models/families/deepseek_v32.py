"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention to positions that a lightning indexer selects.

In GLM-5, layers may reuse the positions that an earlier layer selected (arXiv 2603.12201).
"""

from __future__ import annotations

import dataclasses

from moeserve.layers.latent.attention import LatentAttentionSpec
from moeserve.layers.latent.indexer import IndexerSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    read_corrected_router,
    read_latent_attention,
    read_listed_dense,
    read_model,
    read_num_layers,
    read_shared_experts,
    read_width,
    with_draft_layer,
)
from moeserve.models.model_config import Layer, ModelSpec

INDEXER_TYPES = ("shared", "full")


def read_v32(config: ConfigValues) -> ModelSpec:
    config.require("indexer_rope_interleave", False)
    return _read(config, [True] * read_num_layers(config), is_interleaved=False)


def read_glm5(config: ConfigValues) -> ModelSpec:
    config.require("indexer_rope_interleave", True)
    return _read(config, layers_with_indexer(config), is_interleaved=True)


def layers_with_indexer(config: ConfigValues) -> list[bool]:
    """Return a flag for each layer: True if it has an indexer, False if it reuses the previous layer's selection."""
    num_layers = read_num_layers(config)
    has_indexer = config.flags_of_layers("indexer_types", INDEXER_TYPES, num_layers)
    key = "indexer_types"
    if has_indexer is None and config.values.get("index_topk_pattern") is not None:
        key = "index_topk_pattern"
        pattern = config.values[key]
        letters = {"F": "full", "S": "shared"}
        names = [letters.get(name, name) for name in pattern] if isinstance(pattern, (str, list)) else pattern
        expanded = ConfigValues(config.path, {key: names})
        has_indexer = expanded.flags_of_layers(key, INDEXER_TYPES, num_layers)
    if has_indexer is None:
        key = "index_topk_freq"
        frequency, offset = config.integer(key, 1), config.integer("index_skip_topk_offset", 2, low=0)
        has_indexer = [max(layer - offset + 1, 0) % frequency == 0 for layer in range(num_layers)]
    if not has_indexer[0]:
        raise config.wrong(key, "must give the first layer an indexer, because no earlier layer has one to share")
    return has_indexer


def _read(config: ConfigValues, has_indexer: list[bool], *, is_interleaved: bool) -> ModelSpec:
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    config.require("rope_interleave", True)
    of_layer = read_sparse_attention(config, indexer_is_interleaved=is_interleaved)
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_corrected_router(config),
        expert_width=expert_width,
        shared=read_shared_experts(config, expert_width),
    )
    layers = [
        Layer.of(of_layer[has], feed_forward)
        for has, feed_forward in zip(has_indexer, read_listed_dense(config, moe), strict=True)
    ]
    # The MTP modules have an indexer, even if the last decoder layer has none.
    draft_layer = Layer.of(of_layer[True], layers[-1].networks[-1])
    return with_draft_layer(read_model(config, layers), draft_layer)


def read_sparse_attention(
    config: ConfigValues, *, is_interleaved: bool = True, indexer_is_interleaved: bool
) -> dict[bool, LatentAttentionSpec]:
    """Return the attention of layers with an indexer (True), and of layers that reuse a selection (False)."""
    attention = read_latent_attention(config, is_interleaved=is_interleaved)
    if attention.query_rank is None:
        raise config.wrong("q_lora_rank", "must be set: the indexer reads compressed queries")
    key_dim = config.integer("index_head_dim", high=2**14)
    if key_dim < attention.rotary_dim:
        raise config.wrong("index_head_dim", f"is less than qk_rope_head_dim={attention.rotary_dim}")
    indexer = IndexerSpec(
        num_heads=config.integer("index_n_heads", high=2**14),
        key_dim=key_dim,
        rotary=dataclasses.replace(attention.rotary, is_interleaved=indexer_is_interleaved),
    )
    attention = dataclasses.replace(attention, top_k=config.integer("index_topk", high=2**20))
    return {True: dataclasses.replace(attention, indexer=indexer), False: attention}


DEEPSEEK_V32 = Family(
    name="DeepSeek-V3.2", architecture="DeepseekV32ForCausalLM", model_type="deepseek_v32", read=read_v32
)
GLM5 = Family(
    name="GLM-5", models="GLM-5, GLM-5.1", architecture="GlmMoeDsaForCausalLM", model_type="glm_moe_dsa", read=read_glm5
)
