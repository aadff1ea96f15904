"""The text part of MiniMax-M3: an indexer chooses the blocks to attend to; MiniMax-M2's router; a shared expert."""

from __future__ import annotations

from moeserve.layers.block_sparse.attention import BlockSparseSpec
from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import BLOCK_SPARSE, Family, inside_other_model
from moeserve.models.fields import read_attention, read_listed_dense, read_model, read_router_without_groups, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.rows.activations import ClampedSwiGLU

TYPES = ("full_attention", "minimax_m3_sparse")
# transformers' keys and the published keys, which are in an object of their own.
PUBLISHED = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def read(config: ConfigValues) -> ModelSpec:
    config = _with_published_names(config)
    config.require("hidden_act", "silu", "swigluoai")  # the activation is swigluoai even if the key says silu
    activation = ClampedSwiGLU(alpha=config.number("swiglu_alpha"), limit=config.number("swiglu_limit"))
    scale = config.number("routed_scaling_factor")
    moe = MoESpec(
        router=read_router_without_groups(config, "num_local_experts", "num_experts", scale=scale),
        expert_width=read_width(config, "intermediate_size"),
        activation=activation,
        shared=SharedExpertsSpec(width=read_width(config, "shared_intermediate_size"), activation=activation),
    )
    dense = DenseSpec(width=read_width(config, "dense_intermediate_size"), activation=activation)
    listed = read_listed_dense(config.replaced({"first_k_dense_replace": 0} | config.values), moe)
    full = read_attention(config, default_fraction=1.0, normalized="head")
    is_sparse = config.flags_of_layers("layer_types", TYPES, len(listed)) or [False] * len(listed)
    sparse = _read_sparse(config, full) if any(is_sparse) else full
    layers = [
        Layer.of(sparse if chooses else full, moe if network is moe else dense)
        for chooses, network in zip(is_sparse, listed, strict=True)
    ]
    return read_model(config, layers, hidden_act=config.get("hidden_act") or "silu")


def _with_published_names(config: ConfigValues) -> ConfigValues:
    published = config.object("sparse_attention_config")
    if published is None:
        return config
    values = {key: published.values[name] for key, name in PUBLISHED.items() if name in published.values}
    flags = published.get("sparse_attention_freq")
    if flags is not None and config.get("layer_types") is None:
        if not isinstance(flags, list) or not all(flag in (0, 1) for flag in flags):
            raise published.wrong("sparse_attention_freq", "must list 0 or 1 for each layer")
        values["layer_types"] = [TYPES[flag] for flag in flags]
    return config.replaced(config.values | values)


def _read_sparse(config: ConfigValues, attention: AttentionSpec) -> BlockSparseSpec:
    num_heads = config.integer("index_n_heads", high=2**14)
    few, many = sorted((num_heads, attention.num_kv_heads))
    if many % few or attention.num_heads % num_heads:
        raise config.wrong("index_n_heads", "must divide the heads, and be a divisor or multiple of key-value heads")
    top_k = config.integer("index_topk_blocks")
    return BlockSparseSpec(
        attention=attention,
        num_index_heads=num_heads,
        index_size=config.integer("index_head_dim", low=attention.rotary.dim, high=2**14),
        block_size=config.integer("index_block_size", high=2**20),
        top_k=top_k,
        num_local=config.integer("index_local_blocks", low=0, high=top_k),
    )


MINIMAX_M3_VL = inside_other_model(
    Family(
        name="MiniMax-M3",
        architecture="MiniMaxM3SparseForConditionalGeneration",
        model_type="minimax_m3_vl_text",
        other_architectures=(
            "MiniMaxM3VLForConditionalGeneration",
            "MiniMaxM3VLForCausalLM",
            "MiniMaxM3SparseForCausalLM",
        ),
        read=read,
        left_out=("mtp.", "patch_merge_mlp."),
        names=(
            *BLOCK_SPARSE,
            (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
            (r"\.self_attn\.index_([qk])_(proj|norm)\.", r".self_attn.indexer.\1_\2."),
        ),
        norm_offset=1.0,
    )
)
