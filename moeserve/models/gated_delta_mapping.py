"""Rows of the weight mapping for gated delta networks (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor

from moeserve.layers.gated_delta import GatedDeltaNet
from moeserve.layers.weights import Weights
from moeserve.models.weight_loading import Destination, Row, columns, rows, rows_of_heads, whole


def gated_delta_rows(prefix: str, layer: GatedDeltaNet, names: Collection[str]) -> Iterator[Row]:
    """Yield the rows of one layer. Qwen3-Next joins the projections of each key head, Qwen3.5 those of each kind."""
    config, heads = layer.config, layer.heads
    query, key, value, gate = layer.input.weight.split(layer.projected_sizes)
    rate, decay = layer.rates.weight.chunk(2)
    key_dim, value_dim, per_key = config.key_dim, config.value_dim, config.num_heads // config.num_key_heads
    if f"{prefix}.in_proj_qkvz.weight" in names:
        parts = [(query, key_dim), (key, key_dim), (value, per_key * value_dim), (gate, per_key * value_dim)]
        yield from _by_key_head(f"{prefix}.in_proj_qkvz.weight", parts, layer, layer.input.weights)
        parts = [(rate, per_key), (decay, per_key)]
        yield from _by_key_head(f"{prefix}.in_proj_ba.weight", parts, layer, layer.rates.weights)
    else:
        name, owner = f"{prefix}.in_proj_qkv.weight", layer.input.weights
        yield from _by_kind(name, (query, key, value), layer, owner)
        yield (
            f"{prefix}.in_proj_z.weight",
            rows(gate, rows_of_heads(heads, value_dim), config.num_heads * value_dim, owner),
        )
        yield f"{prefix}.in_proj_b.weight", rows(rate, heads, config.num_heads, layer.rates.weights)
        yield f"{prefix}.in_proj_a.weight", rows(decay, heads, config.num_heads, layer.rates.weights)
    taps = layer.taps.T[:, None].split(layer.projected_sizes[:3])
    yield from _by_kind(f"{prefix}.conv1d.weight", taps, layer, None)
    yield f"{prefix}.A_log", rows(layer.log_decay, heads, config.num_heads)
    yield f"{prefix}.dt_bias", rows(layer.decay_bias, heads, config.num_heads)
    yield f"{prefix}.norm.weight", whole(layer.norm_weight)
    num_columns = config.num_heads * value_dim
    yield (
        f"{prefix}.out_proj.weight",
        columns(layer.output.weight, rows_of_heads(heads, value_dim), num_columns, layer.output.weights),
    )


def _by_key_head(name: str, parts: list[tuple[Tensor, int]], layer: GatedDeltaNet, owner: Weights) -> Iterator[Row]:
    """Yield a tensor that has, key head after key head, the rows of all parts. Each part has a size per key head."""
    num_rows = sum(size for _, size in parts)
    for slot, head in enumerate(range(layer.key_heads.start, layer.key_heads.stop)):
        first = head * num_rows
        for memory, size in parts:
            own = memory[slot * size : (slot + 1) * size]
            yield name, rows(own, slice(first, first + size), layer.config.num_key_heads * num_rows, owner)
            first += size


def _by_kind(name: str, parts: tuple[Tensor, ...], layer: GatedDeltaNet, owner: Weights | None) -> Iterator[Row]:
    """Yield a tensor that has the rows of all queries, below them those of all keys, and of all values."""
    config = layer.config
    sizes = [config.num_key_heads * config.key_dim] * 2 + [config.num_heads * config.value_dim]
    shares = [rows_of_heads(layer.key_heads, config.key_dim)] * 2 + [rows_of_heads(layer.heads, config.value_dim)]
    first = 0
    for memory, size, share in zip(parts, sizes, shares, strict=True):
        shape = (sum(sizes), *memory.shape[1:])
        yield name, Destination(memory, shape, (slice(first + share.start, first + share.stop),), owner)
        first += size
