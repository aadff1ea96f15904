"""DeepSeek-V4 (Flash and Pro): compressed attention, hyper-connections, and experts by token id in the first layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from moeserve.layers.compressed.attention import CompressedAttentionSpec, IndexerShape
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.rotary import RotarySpec
from moeserve.layers.streams.hyper_connections import HyperStreams
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import W123, Family
from moeserve.models.fields import read_model, read_num_experts, read_num_layers, read_width, with_draft_layer
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.rows.activations import CutSwiGLU

WINDOW, SPARSE, DENSE = LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
TYPE_OF_RATIO = {0: WINDOW, 4: SPARSE, 128: DENSE}  # by the number of tokens per entry, which published configs list
MAX_HEAD = 2**14
MAX_STREAMS = 8  # maximum number of streams that the kernels support


def read(config: ConfigValues) -> ModelSpec:
    config.require("num_key_value_heads", 1)
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    num_layers = read_num_layers(config)
    attentions = {name: _read_attention(config, name) for name in LAYER_TYPES}
    moe = _read_experts(config)
    router = dataclasses.replace(moe.router, has_correction=False, table_size=config.integer("vocab_size", high=2**24))
    by_token = dataclasses.replace(moe, router=router)
    layers = [
        Layer.of(attentions[name], by_token if has_table else moe)
        for name, has_table in zip(_read_types(config, num_layers), _read_tables(config, num_layers), strict=True)
    ]
    streams = HyperStreams(
        num_streams=config.integer("hc_mult", 4, high=MAX_STREAMS),
        num_iterations=config.integer("hc_sinkhorn_iters", 20, high=1000),
        epsilon=config.number("hc_eps", 1e-6),
    )
    model = dataclasses.replace(read_model(config, layers), stream=streams)
    if set(_types_of_modules(config, num_layers)) - {WINDOW}:
        return model  # no published model has MTP modules with compressed entries
    return with_draft_layer(model, Layer.of(attentions[WINDOW], moe), stream=streams, reads_normed=False)


def _types_of_modules(config: ConfigValues, num_layers: int) -> list[str]:
    """Return the type of attention of each MTP module. Published lists have these types after those of the layers."""
    ratios = config.values.get("compress_ratios")
    listed = ratios[num_layers:] if isinstance(ratios, list) else []
    return [TYPE_OF_RATIO.get(ratio, SPARSE) for ratio in listed]


def _read_types(config: ConfigValues, num_layers: int) -> list[str]:
    """Return the type of attention of each layer. Published lists also include multi-token prediction layers."""
    ratios = config.values.get("compress_ratios")
    key = "layer_types" if ratios is None else "compress_ratios"
    listed = config.values.get(key)
    if listed is None:
        return [DENSE if index < 2 or index % 2 == 0 else SPARSE for index in range(num_layers)]
    known: dict[Any, str] = {**TYPE_OF_RATIO, **{name: name for name in LAYER_TYPES}}
    is_list = isinstance(listed, list) and all(type(name) in (int, str) and name in known for name in listed)
    if not is_list or len(listed) < num_layers:
        raise config.wrong(key, f"must list one of {', '.join(map(repr, known))} for each of the {num_layers} layers")
    return [known[value] for value in listed[:num_layers]]


def _read_tables(config: ConfigValues, num_layers: int) -> list[bool]:
    """Return a flag for each layer: True if its experts are chosen by token id."""
    has_table = config.flags_of_layers("mlp_layer_types", ("moe", "hash_moe"), num_layers)
    if has_table is not None:
        return has_table
    num_first = config.integer("num_hash_layers", 3, low=0)
    return [number < num_first for number in range(num_layers)]


def _read_attention(config: ConfigValues, layer_type: str) -> CompressedAttentionSpec:
    num_heads = config.integer("num_attention_heads", high=MAX_HEAD)
    num_groups = config.integer("o_groups", high=MAX_HEAD)
    if num_heads % num_groups:
        raise config.wrong("o_groups", f"must divide num_attention_heads={num_heads}")
    head_dim = config.integer("head_dim", high=MAX_HEAD)
    attention = CompressedAttentionSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        query_rank=config.integer("q_lora_rank", high=2**18),
        num_groups=num_groups,
        group_rank=config.integer("o_lora_rank", high=2**18),
        rotary=_read_rotary(config, head_dim, is_scaled=layer_type != WINDOW),
        window=config.integer("sliding_window"),
    )
    if layer_type == WINDOW:
        return attention
    indexer = IndexerShape(
        num_heads=config.integer("index_n_heads", high=MAX_HEAD),
        head_size=config.integer("index_head_dim", high=MAX_HEAD),
        top_k=config.integer("index_topk"),
    )
    if indexer.head_size < attention.rotary.dim:
        raise config.wrong("index_head_dim", f"is less than the {attention.rotary.dim} rotated values of a head")
    ratio = _read_ratio(config, layer_type)
    return dataclasses.replace(attention, ratio=ratio, indexer=indexer if layer_type == SPARSE else None)


def _read_ratio(config: ConfigValues, layer_type: str) -> int:
    default = next(ratio for ratio, name in TYPE_OF_RATIO.items() if name == layer_type)
    rates = config.values.get("compress_rates")
    if rates is None:
        return default
    if not isinstance(rates, dict):
        raise config.wrong("compress_rates", "must be an object")
    return ConfigValues(config.path, rates, "compress_rates.").integer(layer_type, default)


def _read_rotary(config: ConfigValues, head_dim: int, *, is_scaled: bool) -> RotarySpec:
    """Read the rotary embedding of layers with compressed entries, or of other layers, which are never scaled."""
    own = config.of_layer_type("compress" if is_scaled else "main")
    if own is config:  # published configs have one scaling for both, and a base for each
        names = {"rope_theta": config.get("compress_rope_theta" if is_scaled else "rope_theta")}
        scaling = config.values.get("rope_scaling") if is_scaled else None
        own = config.replaced(config.values | names | {"rope_scaling": scaling, "rope_parameters": None})
    settings = own.rotary_settings()
    if settings.values["rope_type"] == "yarn":  # cosines and sines are not scaled
        own = own.replaced(own.values | {"rope_parameters": settings.values | {"attention_factor": 1.0}})
    if config.values.get("qk_rope_head_dim") is None:
        return own.rotary(head_dim, default_fraction=64 / 512, is_interleaved=True)
    dim = config.integer("qk_rope_head_dim", high=head_dim)
    return own.rotary(dim, head_dim_key="qk_rope_head_dim", is_interleaved=True)


def _read_experts(config: ConfigValues) -> MoESpec:
    config.require("scoring_func", "sqrtsoftplus")
    config.require("norm_topk_prob", True)
    num_experts, top_k = read_num_experts(config, "n_routed_experts", "num_local_experts")
    width = read_width(config, "moe_intermediate_size")
    activation = CutSwiGLU(config.number("swiglu_limit", 10.0))
    config.require("n_shared_experts", 1)
    return MoESpec(
        router=RouterSpec(
            num_experts=num_experts,
            top_k=top_k,
            scoring="sqrt_softplus",
            is_normalized=True,
            scale=config.number("routed_scaling_factor", 1.5),
            has_correction=True,
        ),
        expert_width=width,
        activation=activation,
        shared=SharedExpertsSpec(width=width, activation=activation),
    )


COMPRESSOR = ((r"kv_proj\.", "wkv."), (r"gate_proj\.", "wgate."), (r"kv_norm\.", "norm."), (r"position_bias$", "ape"))
DEEPSEEK_V4 = Family(
    name="DeepSeek-V4",
    models="DeepSeek-V4-Flash and Pro",
    architecture="DeepseekV4ForCausalLM",
    model_type="deepseek_v4",
    read=read,
    names=(
        (r"^mtp\.(\d+)\.e_proj\.", r"draft.\1.embedding_projection."),
        (r"^mtp\.(\d+)\.h_proj\.", r"draft.\1.hidden_projection."),
        (r"^mtp\.(\d+)\.hc_head_", r"draft.\1.norm.hc_"),
        (r"^mtp\.(\d+)\.(?=(?:emb|head)\.)", r"draft.\1.copy."),
        (r"^mtp\.", "draft."),
        (r"^layers\.", "model.layers."),
        (r"^embed\.", "model.embed_tokens."),
        (r"^norm\.", "model.norm."),
        (r"^head\.", "lm_head."),
        (r"^(?:model\.hc_head\.hc|hc_head)_", "model.norm.hc_"),
        (r"\.(?:hc_attn_|attn_hc\.)", ".input_layernorm.hc_"),
        (r"\.(?:hc_ffn_|ffn_hc\.)", ".post_attention_layernorm.hc_"),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn\.", ".self_attn."),
        # The form that transformers saves.
        (r"\.self_attn\.compressor\.indexer\.(?:scorer\.)?", ".self_attn.indexer."),
        *((rf"\.self_attn\.compressor\.{old}", f".self_attn.compressor.{new}") for old, new in COMPRESSOR),
        *((rf"\.self_attn\.indexer\.{old}", f".self_attn.indexer.compressor.{new}") for old, new in COMPRESSOR),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.self_attn\.kv_proj\.", ".self_attn.wkv."),
        (r"\.self_attn\.norm\.", ".self_attn.kv_norm."),
        (r"\.o_([ab])_proj\.", r".wo_\1."),
        (r"\.self_attn\.sinks$", ".self_attn.attn_sink"),
        (r"\.ffn\.", ".mlp."),
        (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
        *W123,
    ),
)
