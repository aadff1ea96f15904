"""Rows of the weight mapping for linear attention, whose projections and convolutions are stored in several ways."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from moeserve.layers.rows import At, Destination, Row, rows_of_heads, some_columns, some_rows, whole
from moeserve.layers.rows_of_parts import Part, by_key_head, joined
from moeserve.layers.weights import AnyWeights

if TYPE_CHECKING:
    from moeserve.layers.linear_attention.attention import LinearAttention

# A way to store the parts: the names of tensors, and the parts that each tensor has.
Way = dict[str, tuple[str, ...]]
KEYS_AND_VALUES = ("query", "key", "value")
BY_KEY_HEAD: Way = {  # all rows of a key head, then all rows of the next key head
    "in_proj_qkvz": ("query", "key", "value", "gate"),
    "in_proj_ba": ("rate", "decay"),
}
BY_KIND: Way = {
    "in_proj_qkv": KEYS_AND_VALUES,
    "in_proj_z": ("gate",),
    "in_proj_b": ("rate",),
    "in_proj_a": ("decay",),
}
ALONE: Way = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "g_proj": ("gate",),
    "b_proj": ("rate",),
    "f_proj": ("decay",),
}
CONVOLUTION: Way = {"conv1d": KEYS_AND_VALUES}
CONVOLUTIONS: Way = {"q_conv1d": ("query",), "k_conv1d": ("key",), "v_conv1d": ("value",)}
# Mamba-2 calls query, key, value, gate and decay C, B, x, z and dt.
MAMBA2: Way = {"in_proj": ("gate", "value", "key", "query", "decay")}
MAMBA2_CONVOLUTION: Way = {"conv1d": ("value", "key", "query")}


def linear_attention_rows(at: At, layer: LinearAttention) -> Iterator[Row]:
    """Yield the weight mapping of one layer."""
    config, heads, num_heads = layer.config, layer.heads, layer.config.num_heads
    parts = _projections(layer)
    way = _stored(at, BY_KEY_HEAD, BY_KIND, ALONE) if config.is_delta else MAMBA2
    for name, names in way.items():
        tensors = [parts[part] for part in names]
        if way is BY_KEY_HEAD:
            yield from by_key_head(at(f"{name}.weight"), tensors, layer.key_heads, config.num_key_heads)
        else:
            yield from joined(at(f"{name}.weight"), tensors)
    for low_rank, name in ((layer.decays, "f_a_proj"), (layer.gates, "g_a_proj")):
        if low_rank is not None:
            yield from low_rank.down.rows(at.under(name))
    way = _stored(at, CONVOLUTION, CONVOLUTIONS) if config.is_delta else MAMBA2_CONVOLUTION
    kinds = [("weight", layer.taps.T[:, None])] + ([] if layer.bias is None else [("bias", layer.bias)])
    for kind, memory in kinds:
        parts = _queries_keys_values(layer, memory)
        for name, names in way.items():
            yield from joined(at(f"{name}.{kind}"), [parts[part] for part in names])
    shape = at.stored.get(at("A_log"), ())
    before = len(
        tuple(itertools.takewhile(lambda size: size == 1, shape[:-1]))
    )  # dimensions of size 1 around the heads
    after = max(len(shape) - before - 1, 0)
    log_decay = layer.log_decay.view(*(1,) * before, -1, *(1,) * after)
    yield (
        at("A_log"),
        Destination(log_decay, (*(1,) * before, num_heads, *(1,) * after), (*(slice(0, 1),) * before, heads)),
    )
    yield from joined(at("dt_bias"), [Part.of_heads(layer.decay_bias, heads, num_heads)])
    if layer.skip is not None:
        yield at("D"), some_rows(layer.skip, heads, num_heads)
    if config.is_delta:
        yield at("norm.weight"), whole(layer.norm_weight)
    else:
        yield from joined(at("norm.weight"), [Part.of_heads(layer.norm_weight, heads, num_heads)])
    value_rows = rows_of_heads(heads, config.value_dim)
    output = some_columns(layer.output.weight, value_rows, num_heads * config.value_dim, layer.output.weights)
    yield at("o_proj.weight"), output


def _stored(at: At, *ways: Way) -> Way:
    """Return the way for which the checkpoint has the largest share of the tensors."""
    return max(ways, key=lambda way: sum(at.has(f"{name}.weight") for name in way) / len(way))


def _projections(layer: LinearAttention) -> dict[str, Part]:
    """Return this rank's parts of all projections, except the first factors of low-rank projections."""
    heads, num_heads = layer.heads, layer.config.num_heads
    parts = _queries_keys_values(layer, layer.input.weight, layer.input.weights)
    rates = list(layer.rates.weight.split(layer.rate_sizes))
    if layer.config.is_delta:
        parts["rate"] = Part.of_heads(rates[0], heads, num_heads, layer.rates.weights)
    if layer.decays is None or layer.gates is None:
        gates_XD = layer.input.weight.split(layer.projected_sizes)[3]
        parts["gate"] = Part.of_heads(gates_XD, heads, num_heads, layer.input.weights)
        parts["decay"] = Part.of_heads(rates[-1], heads, num_heads, layer.rates.weights)
    else:
        gates, decays = layer.gates.up, layer.decays.up
        parts["gate"] = Part.of_heads(gates.weight, heads, num_heads, gates.weights)
        parts["decay"] = Part.of_heads(decays.weight, heads, num_heads, decays.weights)
    return parts


def _queries_keys_values(layer: LinearAttention, memory: Tensor, owner: AnyWeights | None = None) -> dict[str, Part]:
    """Return the query, key and value parts of `memory`, which begins with their rows in this order."""
    query, key, value = memory[: sum(layer.projected_sizes[:3])].split(layer.projected_sizes[:3])
    num_heads, num_key_heads = layer.config.num_heads, layer.config.num_key_heads
    return {
        "query": Part.of_heads(query, layer.key_heads, num_key_heads, owner),
        "key": Part.of_heads(key, layer.key_heads, num_key_heads, owner),
        "value": Part.of_heads(value, layer.heads, num_heads, owner),
    }
