"""GLM-5.3-Flash: Kimi delta attention, latent attention to windows that an indexer selects, and hyper-connections."""

from __future__ import annotations

import dataclasses

from moeserve.layers.latent.attention import LatentAttentionSpec
from moeserve.layers.latent.indexer import IndexerSpec
from moeserve.layers.linear_attention.attention import LinearAttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.rotary import NO_ROTATED_PART
from moeserve.layers.streams.hyper_connections import HyperStreams
from moeserve.models.config_values import ConfigValues
from moeserve.models.families.deepseek_v4 import MAX_STREAMS
from moeserve.models.families.deepseek_v32 import layers_with_indexer
from moeserve.models.family import Family, inside_other_model
from moeserve.models.fields import (
    feed_forwards_of,
    read_corrected_router,
    read_model,
    read_num_layers,
    read_width,
    with_draft_layer,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.convolution.interface import MAX_TAPS
from moeserve.ops.linear_attention.interface import MAX_HEAD
from moeserve.ops.rows.activations import CutSwiGLU

LINEAR, INDEXED = "linear_attention", "indexed_attention"
LINEAR_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}


def read(config: ConfigValues) -> ModelSpec:
    num_layers = read_num_layers(config)
    config.require("attention_bias", False)
    width = read_width(config, "moe_intermediate_size")
    activation = CutSwiGLU(config.number("swiglu_limit"))
    shared_width = config.integer("n_shared_experts", high=2**10) * width
    moe = MoESpec(
        router=read_corrected_router(config),
        expert_width=width,
        activation=activation,
        shared=SharedExpertsSpec(width=shared_width, activation=activation),
    )
    is_dense = config.flags_of_layers("mlp_layer_types", ("sparse", "dense"), num_layers)
    is_dense = [index < 3 for index in range(num_layers)] if is_dense is None else is_dense
    feed_forwards = [
        dataclasses.replace(network, activation=activation) for network in feed_forwards_of(config, moe, is_dense)
    ]
    mixers = _read_mixers(config, num_layers)
    layers = [Layer.of(mixer, network) for mixer, network in zip(mixers, feed_forwards, strict=True)]
    stream = HyperStreams(
        num_streams=config.integer("hc_mult", high=MAX_STREAMS),
        num_iterations=config.integer("hc_sinkhorn_iters", high=1000),
        epsilon=config.number("hc_eps"),
        ends_in_mean=True,
    )
    model = dataclasses.replace(read_model(config, layers), stream=stream)
    return with_draft_layer(model, Layer.of(_read_latent_attention(config), moe))  # modules have one residual stream


def _read_mixers(config: ConfigValues, num_layers: int) -> list[LinearAttentionSpec | LatentAttentionSpec]:
    delta, latent = _read_delta_attention(config), _read_latent_attention(config)
    types = config.values.get("layer_types")
    if isinstance(types, list):  # published configs use an older name of the second type
        types = [INDEXED if name == "full_attention" else name for name in types]
    is_indexed = config.replaced(config.values | {"layer_types": types}).flags_of_layers(
        "layer_types", (LINEAR, INDEXED), num_layers
    )
    if is_indexed is None:
        is_indexed = [index % 4 == 3 for index in range(num_layers)]
    has_indexer = layers_with_indexer(config)
    for layer in range(num_layers):
        if is_indexed[layer] and not has_indexer[layer] and not is_indexed[layer - 1]:
            raise config.wrong("indexer_types", f"lets layer {layer} share a selection that the layer before has not")
    shared = dataclasses.replace(latent, indexer=None)
    return [
        delta if not indexed else latent if has else shared
        for indexed, has in zip(is_indexed, has_indexer, strict=True)
    ]


def _read_delta_attention(config: ConfigValues) -> LinearAttentionSpec:
    nested = config.object("linear_attn_config")  # transformers writes the same values at the top level
    if nested is not None:
        found = {LINEAR_KEYS[key]: value for key, value in nested.values.items() if key in LINEAR_KEYS}
        config = config.replaced(config.values | found)
    is_bounded = config.get("linear_lower_bound") is not None or (
        nested is not None and nested.flag("safe_gate", default=True)
    )
    floor = config.number("linear_lower_bound", -5.0, above=-1e3) if is_bounded else None
    if floor is not None and floor >= 0:
        raise config.wrong("linear_lower_bound", "must be negative")
    num_heads = config.integer("linear_num_heads", high=2**14)
    head_dim = config.integer("linear_head_dim", high=MAX_HEAD)
    return LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        num_taps=config.integer("linear_conv_kernel_dim", low=2, high=MAX_TAPS),
        norm_epsilon=config.number("rms_norm_eps"),
        has_channel_decays=True,
        decay_floor=floor,
        gate="sigmoid",
        low_rank=head_dim,
    )


def _read_latent_attention(config: ConfigValues) -> LatentAttentionSpec:
    num_heads = config.integer("num_attention_heads", high=2**14)
    config.require("num_key_value_heads", num_heads)
    config.require("qk_rope_head_dim", 0)
    config.require("index_kpool_always_select_tail", True)
    tokens_per_key = config.integer("index_kpool", high=2**10)
    top_k = config.integer("index_topk", high=2**20)
    if top_k % tokens_per_key:
        raise config.wrong("index_topk", f"must be a multiple of index_kpool={tokens_per_key}")
    epsilon = config.number("rms_norm_eps")
    return LatentAttentionSpec(
        num_heads=num_heads,
        query_rank=config.integer("q_lora_rank", high=2**18),
        latent_size=config.integer("kv_lora_rank", high=2**18),
        key_dim=config.integer("qk_nope_head_dim", high=2**14),
        rotary=NO_ROTATED_PART,
        value_dim=config.integer("v_head_dim", high=2**14),
        query_norm_epsilon=epsilon,
        latent_norm_epsilon=epsilon,
        top_k=top_k,
        indexer=IndexerSpec(
            num_heads=config.integer("index_n_heads", high=2**14),
            key_dim=config.integer("index_head_dim", high=2**14),
            rotary=None,
            tokens_per_key=tokens_per_key,
        ),
    )


GLM5_NEXT = inside_other_model(
    Family(
        name="GLM-5.3",
        models="GLM-5.3-Flash",
        architecture="Glm5NextForConditionalGeneration",
        model_type="glm5_next_text",
        read=read,
        names=(
            (r"\.(?:hc_attn_|attn_hc\.)", ".input_layernorm.hc_"),
            (r"\.(?:hc_ffn_|ffn_hc\.)", ".post_attention_layernorm.hc_"),
            (r"\.self_attn\.forget_gate\.", ".self_attn."),
            (r"\.self_attn\.([fg])_b_proj\.", r".self_attn.\1_proj."),
            (r"\.self_attn\.o_norm\.", ".self_attn.norm."),
        ),
    )
)
