"""Rows of the weight mapping for mixers with a recurrent state: linear attention and short convolutions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor

from moeserve.layers.linear import Linear
from moeserve.layers.linear_attention.attention import LinearAttention
from moeserve.layers.short_convolution.convolution import GatedConvolution
from moeserve.layers.weights import Weights
from moeserve.models.checkpoint.loading import Destination, Row, columns, rows, rows_of_heads, whole
from moeserve.models.family import LinearAttentionNames, LinearAttentionPart

# X values of all heads of this rank, D model width


@dataclass(frozen=True)
class _Part:
    """This rank's rows of a projection's part, ordered by head. `share` is their range among the rows of all ranks."""

    memory: Tensor
    owner: Weights | None
    share: slice
    num_rows: int  # number of rows of all ranks

    @classmethod
    def of_heads(cls, memory: Tensor, heads: slice, num_heads: int, owner: Weights | None = None) -> _Part:
        size = len(memory) // (heads.stop - heads.start)
        return cls(memory, owner, rows_of_heads(heads, size), num_heads * size)


def linear_attention_rows(
    prefix: str, layer: LinearAttention, names: LinearAttentionNames, names_in_checkpoint: Collection[str]
) -> Iterator[Row]:
    """Yield the mapping rows of one linear attention layer."""
    config, heads, num_heads = layer.config, layer.heads, layer.config.num_heads
    parts = _projections(layer)
    for name, joined in names.projections:
        if names.is_by_key_head:
            yield from _by_key_head(f"{prefix}.{name}.weight", [parts[part] for part in joined], layer)
        else:
            yield from _joined(f"{prefix}.{name}.weight", [parts[part] for part in joined])
    for low_rank, name in ((layer.decays, names.decays_down), (layer.gates, names.gates_down)):
        if low_rank is not None:
            yield f"{prefix}.{name}.weight", whole(low_rank.down.weight, low_rank.down.weights)
    convolutions = names.convolutions
    if f"{prefix}.{names.joined_convolution}.weight" in names_in_checkpoint:
        convolutions = ((names.joined_convolution, ("query", "key", "value")),)
    kinds = [("weight", layer.taps.T[:, None])] + ([] if layer.bias is None else [("bias", layer.bias)])
    for kind, memory in kinds:
        parts = _queries_keys_values(layer, memory)
        for name, joined in convolutions:
            yield from _joined(f"{prefix}.{name}.{kind}", [parts[part] for part in joined])
    before, after = names.log_decay_dims  # dimensions of size 1 around the heads
    shape = (*(1,) * before, num_heads, *(1,) * after)
    log_decay = layer.log_decay.view(*(1,) * before, -1, *(1,) * after)
    yield f"{prefix}.A_log", Destination(log_decay, shape, (*(slice(0, 1),) * before, heads))
    yield from _joined(f"{prefix}.dt_bias", [_Part.of_heads(layer.decay_bias, heads, num_heads)])
    if layer.skip is not None:
        yield f"{prefix}.D", rows(layer.skip, heads, num_heads)
    if config.is_delta:
        yield f"{prefix}.{names.norm}.weight", whole(layer.norm_weight)
    else:
        yield from _joined(f"{prefix}.{names.norm}.weight", [_Part.of_heads(layer.norm_weight, heads, num_heads)])
    value_rows = rows_of_heads(heads, config.value_dim)
    output = columns(layer.output.weight, value_rows, num_heads * config.value_dim, layer.output.weights)
    yield f"{prefix}.{names.output}.weight", output


def convolution_rows(prefix: str, layer: GatedConvolution) -> Iterator[Row]:
    """Yield the mapping rows of one of LFM2's short convolutions."""
    channels, num_channels = layer.channels, layer.config.num_channels
    kinds: list[tuple[str, Tensor, Tensor, Weights | None]]
    kinds = [("weight", layer.input.weight, layer.taps.T[:, None], layer.input.weights)]
    if layer.bias is not None:
        assert layer.input.bias is not None
        kinds.append(("bias", layer.input.bias, layer.bias, None))
    for kind, memory, of_convolution, owner in kinds:
        gates_and_values = [_Part.of_heads(part, channels, num_channels, owner) for part in memory.chunk(3)]
        yield from _joined(f"{prefix}.in_proj.{kind}", gates_and_values)
        yield f"{prefix}.conv.{kind}", rows(of_convolution, channels, num_channels)
    yield from summed_rows(f"{prefix}.out_proj", layer.output, channels, num_channels, layer.config.has_bias)


def summed_rows(prefix: str, linear: Linear, share: slice, num_columns: int, has_bias: bool) -> Iterator[Row]:
    """Yield the rows of a projection whose columns are divided over the tp ranks. One rank adds the bias."""
    yield f"{prefix}.weight", columns(linear.weight, share, num_columns, linear.weights)
    if has_bias:
        yield f"{prefix}.bias", None if linear.bias is None else whole(linear.bias)


def _projections(layer: LinearAttention) -> dict[LinearAttentionPart, _Part]:
    """Return this rank's parts of all projections, except the first factors of low-rank projections."""
    heads, num_heads = layer.heads, layer.config.num_heads
    parts = _queries_keys_values(layer, layer.input.weight, layer.input.weights)
    rates = list(layer.rates.weight.split(layer.rate_sizes))
    if layer.config.is_delta:
        parts["rate"] = _Part.of_heads(rates[0], heads, num_heads, layer.rates.weights)
    if layer.decays is None or layer.gates is None:
        gates_XD = layer.input.weight.split(layer.projected_sizes)[3]
        parts["gate"] = _Part.of_heads(gates_XD, heads, num_heads, layer.input.weights)
        parts["decay"] = _Part.of_heads(rates[-1], heads, num_heads, layer.rates.weights)
    else:
        gates, decays = layer.gates.up, layer.decays.up
        parts["gate"] = _Part.of_heads(gates.weight, heads, num_heads, gates.weights)
        parts["decay"] = _Part.of_heads(decays.weight, heads, num_heads, decays.weights)
    return parts


def _queries_keys_values(
    layer: LinearAttention, memory: Tensor, owner: Weights | None = None
) -> dict[LinearAttentionPart, _Part]:
    """Return the query, key and value parts of `memory`, which begins with their rows in this order."""
    query, key, value = memory[: sum(layer.projected_sizes[:3])].split(layer.projected_sizes[:3])
    num_heads, num_key_heads = layer.config.num_heads, layer.config.num_key_heads
    return {
        "query": _Part.of_heads(query, layer.key_heads, num_key_heads, owner),
        "key": _Part.of_heads(key, layer.key_heads, num_key_heads, owner),
        "value": _Part.of_heads(value, layer.heads, num_heads, owner),
    }


def _joined(name: str, parts: list[_Part]) -> Iterator[Row]:
    """Yield the rows of a tensor that stores all heads of the first part, then all heads of the second, and so on."""
    num_rows, first = sum(part.num_rows for part in parts), 0
    for part in parts:
        share = slice(first + part.share.start, first + part.share.stop)
        yield name, Destination(part.memory, (num_rows, *part.memory.shape[1:]), (share,), part.owner)
        first += part.num_rows


def _by_key_head(name: str, parts: list[_Part], layer: LinearAttention) -> Iterator[Row]:
    """Yield the rows of a tensor that is ordered by key head, each with its rows of all parts."""
    sizes = [part.num_rows // layer.config.num_key_heads for part in parts]
    num_rows = sum(part.num_rows for part in parts)
    for slot, head in enumerate(range(layer.key_heads.start, layer.key_heads.stop)):
        first = head * sum(sizes)
        for part, size in zip(parts, sizes, strict=True):
            own = part.memory[slot * size : (slot + 1) * size]
            yield name, rows(own, slice(first, first + size), num_rows, part.owner)
            first += size
