"""Qwen4-Exp: Qwen3.5 with gated residual streams, embeddings of n-grams, and attention with an indexer."""

from __future__ import annotations

import dataclasses

from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.indexed.attention import IndexedAttentionSpec
from moeserve.layers.linear_attention.attention import LinearAttentionSpec
from moeserve.layers.ngram.embedding import NgramSpec
from moeserve.layers.streams.gated_streams import GatedStreams
from moeserve.models.config_values import ConfigValues
from moeserve.models.families import qwen3_next
from moeserve.models.families.deepseek_v4 import MAX_STREAMS
from moeserve.models.model_config import Block, Layer, ModelSpec
from moeserve.ops.convolution.interface import MAX_TAPS

INDEXED, FULL = "indexed_attention", "full_attention"  # two names of the same kind of layer


def read(config: ConfigValues) -> ModelSpec:
    types = config.get("layer_types")
    if isinstance(types, list):
        config = config.replaced(config.values | {"layer_types": [FULL if name == INDEXED else name for name in types]})
    model = qwen3_next.read(config)
    streams = GatedStreams(
        num_streams=config.integer("hc_count", low=2, high=MAX_STREAMS), rank=config.integer("hc_lowrank", high=2**16)
    )
    config.require("output_gate_type", "silu", "sigmoid")
    is_sigmoid = config.get("output_gate_type") == "sigmoid"
    embedded = sorted(config.layer_numbers("ple_layer_ids", len(model.layers), first=1))
    layers = []
    for number, layer in enumerate(model.layers, 1):
        mixer, network = layer.networks
        if isinstance(mixer, LinearAttentionSpec):
            mixer = dataclasses.replace(mixer, gate="sigmoid" if is_sigmoid else "silu")
        elif isinstance(mixer, AttentionSpec):
            mixer = _read_indexed(config, mixer)
        blocks = [Block(mixer), Block(network)]
        if number in embedded:
            ngrams = _read_ngrams(config, embedded.index(number), streams.num_streams)
            blocks.insert(0, Block(ngrams, has_norm=False))
        layers.append(Layer(tuple(blocks)))
    return dataclasses.replace(model, layers=tuple(layers), stream=streams, draft=None)


def _read_indexed(config: ConfigValues, attention: AttentionSpec) -> IndexedAttentionSpec:
    config.require("indexer_kv_heads", 1)
    window, top_k = config.integer("indexer_compress_ratio", high=2**10), config.integer("indexer_budget", high=2**20)
    if top_k % window:
        raise config.wrong("indexer_budget", f"must be a multiple of indexer_compress_ratio={window}")
    return IndexedAttentionSpec(
        attention=attention,
        num_index_heads=config.integer("indexer_n_heads", high=2**14),
        index_size=config.integer("indexer_head_dim", low=attention.rotary.dim, high=2**14),
        window=window,
        top_k=top_k,
    )


def _read_ngrams(config: ConfigValues, index: int, num_streams: int) -> NgramSpec:
    length = config.integer("ngram_size", low=2, high=8)
    if not config.token_ids("eos_token_id"):
        raise config.wrong("eos_token_id", "must name a token: n-grams do not reach across it")
    ngrams = NgramSpec(
        vocab_size=config.integer("vocab_size", high=2**24),
        num_streams=num_streams,
        max_length=length,
        tables_per_length=config.integer("heads_per_ngram", high=2**8),
        first_size=config.integer("ngram_vocab_size_base", high=2**31),
        size_multiple=config.integer("make_ngram_vocab_size_divisible_by", high=2**20),
        index=index,
        seed=config.integer("seed", low=0),
        separator=config.token_ids("eos_token_id")[0],
        embedded_size=config.integer("ple_embed_dim", config.integer("hidden_size"), high=2**18),
        num_taps=config.integer("ple_conv_kernel_size", low=2, high=(MAX_TAPS - 1) // length + 1),
    )
    if ngrams.embedded_size % ngrams.num_tables:
        raise config.wrong("ple_embed_dim", f"must be a multiple of {ngrams.num_tables}, the number of tables")
    return ngrams


QWEN4_EXP = dataclasses.replace(
    qwen3_next.QWEN3_5_MOE,
    name="Qwen4-Exp",
    models="",
    architecture="Qwen4ExpForConditionalGeneration",
    model_type="qwen4_exp_text",
    other_architectures=("Qwen4ExpForCausalLM",),
    read=read,
    names=(
        *qwen3_next.NAMES,
        (r"\.attn_hyper_connection\.", ".input_layernorm."),
        (r"\.mlp_hyper_connection\.", ".post_attention_layernorm."),
        (r"^model\.hyper_connection_mixer\.", "model.norm."),
    ),
)
