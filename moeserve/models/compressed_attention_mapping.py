"""Rows of the weight mapping for compressed attention and hyper-connections (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from moeserve.layers.compressed.attention import CompressedSparseAttention, Pooling
from moeserve.layers.streams.hyper_connections import HyperConnection
from moeserve.models.checkpoint.loading import Row, columns, rows, rows_of_heads, whole


def compressed_attention_rows(prefix: str, layer: CompressedSparseAttention, names: Collection[str]) -> Iterator[Row]:
    """Yield the rows of one layer. Transformers saves the key norm under another name than published checkpoints."""
    config, heads = layer.config, layer.heads
    query, key = layer.compress.weight.split(layer.compressed_sizes)
    yield f"{prefix}.wq_a.weight", whole(query, layer.compress.weights)
    yield f"{prefix}.wkv.weight", whole(key, layer.compress.weights)
    yield f"{prefix}.q_norm.weight", whole(layer.query_norm.weight)
    key_norm = f"{prefix}.kv_norm.weight"
    yield key_norm if key_norm in names else f"{prefix}.norm.weight", whole(layer.key_norm.weight)
    num_rows = config.num_heads * config.head_dim
    share = rows_of_heads(heads, config.head_dim)
    yield f"{prefix}.wq_b.weight", rows(layer.query.weight, share, num_rows, layer.query.weights)
    yield f"{prefix}.attn_sink", rows(layer.sinks, heads, config.num_heads)
    ranks, num_ranks = rows_of_heads(layer.groups, config.group_rank), config.num_groups * config.group_rank
    maps_OI = layer.group_maps.open.weight_eOI.flatten(0, 1)
    yield f"{prefix}.wo_a.weight", rows(maps_OI, ranks, num_ranks, layer.group_maps)
    yield f"{prefix}.wo_b.weight", columns(layer.output.weight, ranks, num_ranks, layer.output.weights)
    if layer.entries is not None:
        yield from _pooling(f"{prefix}.compressor", layer.entries)
    if layer.indexer is not None:
        index = layer.indexer
        yield from _pooling(f"{prefix}.indexer.compressor", index.keys)
        yield f"{prefix}.indexer.wq_b.weight", whole(index.query.weight, index.query.weights)
        yield f"{prefix}.indexer.weights_proj.weight", whole(index.weights.weight, index.weights.weights)


def _pooling(prefix: str, pooling: Pooling) -> Iterator[Row]:
    values, gates = pooling.project.weight.split(pooling.sizes)
    yield f"{prefix}.wkv.weight", whole(values, pooling.project.weights)
    yield f"{prefix}.wgate.weight", whole(gates, pooling.project.weights)
    yield f"{prefix}.ape", whole(pooling.bias)
    yield f"{prefix}.norm.weight", whole(pooling.norm.weight)


def connection_rows(prefix: str, connection: HyperConnection) -> Iterator[Row]:
    """Yield the rows of the coefficients of one sublayer."""
    yield f"{prefix}fn", whole(connection.map)
    yield f"{prefix}base", whole(connection.base)
    yield f"{prefix}scale", whole(connection.scales)
