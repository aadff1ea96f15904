"""Mistral Large 4: sparse latent attention without compressed queries, with learned frequencies and temperatures.

Some layers have no position embeddings, and logits are soft-capped.
"""

from __future__ import annotations

import dataclasses

from moeserve.layers.latent.attention import LatentAttentionSpec
from moeserve.layers.latent.indexer import IndexerSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.rotary import NO_ROTARY, NO_ROTATED_PART
from moeserve.models.config_values import ConfigValues
from moeserve.models.families.deepseek_v32 import layers_with_indexer
from moeserve.models.families.mistral4 import read_normalized_router
from moeserve.models.family import W123, Family
from moeserve.models.fields import (
    read_latent_attention,
    read_listed_dense,
    read_model,
    read_num_layers,
    read_shared_experts,
    read_width,
)
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    num_layers = read_num_layers(config)
    if config.values.get("kv_source_layers") not in (None, list(range(num_layers))):
        raise config.wrong("kv_source_layers", "is not supported: each layer must keep latent vectors of its own")
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_normalized_router(config),
        expert_width=expert_width,
        shared=read_shared_experts(config, expert_width),
    )
    rotated = _read_attention(config)
    kinds = {True: rotated, False: _without_positions(rotated)}
    layers = [
        Layer.of(
            kinds[is_rotated] if has_indexer else dataclasses.replace(kinds[is_rotated], indexer=None),
            feed_forward,
        )
        for is_rotated, has_indexer, feed_forward in zip(
            _read_rotated_layers(config, num_layers),
            layers_with_indexer(config),
            read_listed_dense(config, moe),
            strict=True,
        )
    ]
    model = read_model(config, layers)
    return dataclasses.replace(model, logits_cap=config.number("final_logit_softcapping", 30.0))


def _read_rotated_layers(config: ConfigValues, num_layers: int) -> list[bool]:
    """Return a flag for each layer: True if it has a rotary embedding. The config's list may have further entries."""
    listed = config.values.get("no_rope_layers")
    if listed is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return [number % interval != 0 for number in range(1, num_layers + 1)]
    if not isinstance(listed, list) or len(listed) < num_layers or any(each not in (0, 1) for each in listed):
        raise config.wrong("no_rope_layers", f"must list 0 or 1 for each of the {num_layers} layers")
    return [each == 1 for each in listed[:num_layers]]


def _read_attention(config: ConfigValues) -> LatentAttentionSpec:
    config.refuse("q_lora_rank")
    with_key = config.replaced(config.values | {"q_lora_rank": None})
    attention = read_latent_attention(with_key, is_interleaved=True)
    rotary = dataclasses.replace(attention.rotary, has_learned_factors=True)
    key_dim = config.integer("index_head_dim", high=2**14)
    if key_dim < rotary.dim:
        raise config.wrong("index_head_dim", f"is less than qk_rope_head_dim={rotary.dim}")
    indexer = IndexerSpec(
        num_heads=config.integer("index_n_heads", high=2**14),
        key_dim=key_dim,
        rotary=rotary,
        reads_hidden=True,
        has_learned_temperature=True,
    )
    return dataclasses.replace(
        attention,
        query_rank=None,
        rotary=rotary,
        has_learned_temperature=True,
        latent_norm_epsilon=config.number("rms_norm_eps"),
        top_k=config.integer("index_topk", high=2**20),
        indexer=indexer,
    )


def _without_positions(attention: LatentAttentionSpec) -> LatentAttentionSpec:
    """Return the attention without the rotated part of keys. The size of heads does not change."""
    assert attention.indexer is not None
    return dataclasses.replace(
        attention,
        key_dim=attention.query_dim,
        rotary=NO_ROTATED_PART,
        indexer=dataclasses.replace(attention.indexer, rotary=NO_ROTARY),
    )


MISTRAL_LARGE4 = Family(
    name="Mistral Large 4",
    architecture="MistralLarge4ForConditionalGeneration",
    model_type="mistral_large4_text",
    read=read,
    wrapped=((r"^model\.language_model\.", "model."),),
    left_out=(
        *("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.", "mtp_dspark."),
        *("vision_tower.", "multi_modal_projector."),
    ),
    names=(
        (r"^tok_embeddings\.", "model.embed_tokens."),
        (r"^layers\.", "model.layers."),
        (r"^norm\.", "model.norm."),
        (r"^lerope\.", "model.rotary_emb."),
        (r"^output\.", "lm_head."),
        (r"\.attention_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attention\.wq\.", ".self_attn.q_proj."),
        (r"\.attention\.wkv_a_with_mqa\.", ".self_attn.kv_a_proj_with_mqa."),
        (r"\.attention\.kv_a_norm\.", ".self_attn.kv_a_layernorm."),
        (r"\.attention\.wkv_b\.", ".self_attn.kv_b_proj."),
        (r"\.attention\.wo\.", ".self_attn.o_proj."),
        (r"\.attention\.", ".self_attn."),
        (r"\.softmax_scaling\.scale$", ".ssmax_scaling.s"),
        (r"\.softmax_scaling\.bias$", ".ssmax_scaling.b"),
        (r"(\blayers\.[^.]+)\.(experts|gate|shared_experts)\.", r"\1.mlp.\2."),
        (r"\.feed_forward\.", ".mlp."),
        *W123,
    ),
)
