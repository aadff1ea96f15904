"""Compressed convolutional attention (CCA, arXiv 2510.04476), as Zaya has it.

Queries and keys are projected to few heads, and convolved over the last tokens: first each channel by itself, then each
head with a matrix for each tap. Half of a token's values are computed from the token before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.distributed.mesh import share_of
from moeserve.kv.layer_cache import CacheDivision, CacheItems, Places
from moeserve.kv.rules import AnyRule, KeepState
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import num_input_chunks, share_inputs
from moeserve.layers.grouped_query.attention import AttentionSpec, key_value_items, make_key_value_cache
from moeserve.layers.linear import Linear
from moeserve.layers.network import AttentionCosts, Build, NetworkSpec, OverTP, Run
from moeserve.layers.rotary import RotarySpec
from moeserve.layers.rows import At, Destination, Row, rows_of_heads, some_rows
from moeserve.layers.weights import QuantizationLimits, Weights
from moeserve.ops import attention, convolution, mixing, products
from moeserve.ops import rows as row_operations
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights

# N query heads and G key-value heads of this rank, e = N + G, X = e * H, Y = G * H, w tokens before the current one


@dataclass(frozen=True, kw_only=True)
class ConvolutionalAttentionSpec(NetworkSpec):
    """The shape of one layer."""

    heads: AttentionSpec  # grouped-query attention with the same heads and the same cache
    num_channel_taps: int  # tokens that the convolution of channels spans, the current one included
    num_head_taps: int  # tokens that the convolution of heads spans

    @property
    def rotaries(self) -> tuple[RotarySpec]:
        return (self.heads.rotary,)

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="compressed convolutional attention")

    def cache_rules(self, block_size: int) -> tuple[AnyRule, ...]:
        """Return two rules that determine how long keys and values, and states, are kept."""
        return *self.heads.cache_rules(block_size), KeepState.of_blocks(block_size)

    def can_divide(self, num_ranks: int) -> bool:
        """True if the key-value heads can be divided evenly over `num_ranks` tp ranks."""
        return self.heads.num_kv_heads % num_ranks == 0

    def costs(self, hidden_size: int, tp: int) -> AttentionCosts:
        return self.heads.costs(hidden_size, tp)

    def build(self, build: Build) -> ConvolutionalAttention:
        return ConvolutionalAttention(self, build.hidden_size, build.context)


@dataclass(frozen=True)
class ConvolvedCache:
    """Keys and values of all tokens, and the last inputs of each request's convolutions."""

    key_values: KeyValueCache
    inputs: tuple[Tensor, ...]  # [rows, w, X] in the model's dtype, for each tap of the convolution of heads
    values: Tensor  # [rows, 1, Y]: values of the last token

    @property
    def states(self) -> tuple[Tensor, ...]:
        """The tensors of the states; their first dimension is the row."""
        return *self.inputs, self.values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the cache."""
        return *self.key_values.tensors, *self.states

    @property
    def tensors_of_items(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors of each of the layer's `cache_items`."""
        return self.key_values.tensors, self.states

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()


class ConvolutionalAttention(OverTP):
    """Attention of each token to the tokens of its own request up to itself, or only to the last `window` tokens.

    Each tp rank has a share of the key-value heads with the query heads that read them. The convolution of a head is a
    sum over its taps. Each tap multiplies a matrix by the channels that were convolved for an earlier token. These
    channels are the result of a convolution of channels whose taps are shifted by as many tokens.
    """

    def __init__(self, config: ConvolutionalAttentionSpec, hidden_size: int, context: BuildContext) -> None:
        super().__init__(context)
        self.config, self.context, heads = config, context, config.heads
        size, rank, num_ranks = heads.head_dim, context.tp.rank_in_group, context.tp.world_size
        self.kv_heads, self.heads = (share_of(n, rank, num_ranks) for n in (heads.num_kv_heads, heads.num_heads))
        self.num_kv_heads = self.kv_heads.stop - self.kv_heads.start
        self.num_heads = self.heads.stop - self.heads.start
        self.num_all = self.num_heads + self.num_kv_heads
        channels = self.num_all * size
        self.projected_sizes = [channels, self.num_kv_heads * size]
        share = share_inputs(heads.num_heads * size, num_input_chunks(config.can_divide), context)
        # Errors in scores grow exponentially in the softmax, so queries and keys keep 8 bits.
        limits = QuantizationLimits(8, None)
        self.input = Linear(hidden_size, sum(self.projected_sizes), context, limits=limits)
        num_taps, wide = config.num_channel_taps + config.num_head_taps - 1, torch.float32
        # The taps of channels, shifted by 0, 1, ... tokens.
        self.taps = context.parameter(config.num_head_taps, num_taps, channels, dtype=wide)
        self.bias = context.parameter(channels, dtype=wide)
        shape = self.num_all, size, size
        self.maps = [
            Weights(products.PER_HEAD, shape, context, has_bias=shift == 0, limits=limits)
            for shift in range(config.num_head_taps)
        ]
        self.registered_maps = nn.ModuleList(self.maps)
        self.temperatures = context.parameter(self.num_kv_heads, dtype=wide)
        self.output = Linear(self.num_heads * size, hidden_size, context, chunks=share.chunks)
        # The first half of all channels of values comes from the token itself, the second half from the token before.
        first, half = self.kv_heads.start * size, heads.num_kv_heads * size // 2
        is_current_Y = torch.arange(first, first + self.num_kv_heads * size, device=context.device) < half
        self.value_taps = ConvolutionWeights(torch.stack([~is_current_Y, is_current_Y]).float(), None)
        linear = dict(is_gated=False, is_linear=True)
        self.convolve = convolution.make(
            context.backend, ConvolutionShape(num_channels=channels, num_taps=num_taps, **linear)
        )
        self.delay = convolution.make(
            context.backend, ConvolutionShape(num_channels=self.projected_sizes[1], num_taps=2, **linear)
        )
        self.mixing = mixing.make(context.backend)
        self._add = row_operations.make(context.backend).add
        self.backend = attention.make(
            context.backend,
            AttentionShape(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=size,
                dtype=context.dtype,
                scale=size**-0.5,
                window=heads.window,
            ),
        )

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items: keys and values, and states, of this rank's heads."""
        config, size = self.config.heads, self.config.heads.head_dim
        queries, keys = (rows_of_heads(share, size) for share in (self.heads, self.kv_heads))
        first = config.num_heads * size
        inputs = CacheDivision(2, (_range(queries), range(first + keys.start, first + keys.stop)))
        divisions = (*(inputs for _ in self.maps), CacheDivision(2, (_range(keys),)))
        num_bytes = sum(tensor.nbytes for tensor in self._make_states(1, torch.device("meta")))
        rule = self.config.cache_rules(self.context.block_size)[1]
        return *key_value_items(config, self.kv_heads, self.context), CacheItems(rule, num_bytes, divisions)

    def make_cache(self, places: Places) -> ConvolvedCache:
        key_values = make_key_value_cache(self.config.heads, self.num_kv_heads, places, self.context)
        *inputs, values = self._make_states(places.num_rows, self.context.device)
        return ConvolvedCache(key_values, tuple(inputs), values)

    def _make_states(self, num_rows: int, device: torch.device) -> list[Tensor]:
        (channels, width), num_before = self.projected_sizes, self.taps.shape[1] - 1
        shapes = [(num_rows, num_before, channels)] * len(self.maps) + [(num_rows, 1, width)]
        return [torch.empty(shape, dtype=self.context.dtype, device=device) for shape in shapes]

    def rows(self, at: At) -> Iterator[Row]:
        config, size = self.config.heads, self.config.heads.head_dim
        queries, keys = (rows_of_heads(share, size) for share in (self.heads, self.kv_heads))
        num_queries, num_keys = config.num_heads * size, config.num_kv_heads * size
        own_keys = slice(num_queries + keys.start, num_queries + keys.stop)
        sizes = [queries.stop - queries.start, keys.stop - keys.start]
        owner = self.input.weights
        query, key, value = self.input.weight.split([*sizes, sizes[1]])
        yield at("q_proj.weight"), some_rows(query, queries, num_queries, owner)
        yield at("k_proj.weight"), some_rows(key, keys, num_keys, owner)
        half = num_keys // 2
        for name, start in (("v_proj_current", 0), ("v_proj_delayed", half)):
            first, last = (min(max(end - start, 0), half) for end in (keys.start, keys.stop))
            memory = value[first + start - keys.start : last + start - keys.start]
            yield at(f"{name}.weight"), some_rows(memory, slice(first, last), half, owner) if first < last else None
        for own, part in zip((queries, own_keys), (slice(0, sizes[0]), slice(sizes[0], None)), strict=True):
            yield from self._convolution_rows(at, own, part, num_queries + num_keys)
        yield at("qk_norm.temp"), some_rows(self.temperatures, self.kv_heads, config.num_kv_heads)
        yield from self.output.summed_rows(at.under("o_proj"), queries, num_queries, has_bias=False)

    def _convolution_rows(self, at: At, own: slice, part: slice, num_channels: int) -> Iterator[Row]:
        """Yield the weight mapping of some channels: stored channels `own` are this rank's channels `part`."""
        name, size, (num_shifts, num_taps, _) = "conv_qk_depthwise", self.config.heads.head_dim, self.taps.shape
        num_stored = self.config.num_channel_taps
        shape = num_channels, 1, num_stored
        for shift in range(num_shifts):
            for tap in range(num_taps):
                stored = tap - (num_shifts - 1 - shift)
                is_zero = not 0 <= stored < num_stored
                one = slice(0, 1) if is_zero else slice(stored, stored + 1)
                place = Destination(self.taps[shift, tap, part], shape, (own, slice(0, 1), one))
                yield at(f"{name}.weight"), dataclasses.replace(place, factor=0.0) if is_zero else place
            maps = self.maps[shift]
            memory = maps.open.weight_eOI.flatten(0, 1)[part]
            one = slice(num_shifts - 1 - shift, num_shifts - shift)
            stored_shape = num_channels, size, num_shifts
            place = Destination(memory, stored_shape, (own, slice(0, size), one), maps)
            yield at("conv_qk_grouped.weight"), place
        bias_eH = self.maps[0].open.bias_eO
        assert bias_eH is not None
        yield at(f"{name}.bias"), some_rows(self.bias[part], own, num_channels)
        yield at("conv_qk_grouped.bias"), some_rows(bias_eH.flatten()[part], own, num_channels)

    def partial_sum(self, hidden_TD: Tensor, run: Run, cache: ConvolvedCache) -> Tensor:
        step, size = run.step, self.config.heads.head_dim
        projected_TX, value_TY = self.input(hidden_TD).split(self.projected_sizes, dim=1)
        convolved_TX: Tensor | None = None
        for maps, taps_WX, inputs in zip(self.maps, self.taps, cache.inputs, strict=True):
            channels_TX = self.convolve(projected_TX, ConvolutionWeights(taps_WX, self.bias), inputs, step)
            product_TX = maps.product.multiply(channels_TX.unflatten(1, (self.num_all, size))).flatten(1)
            convolved_TX = product_TX if convolved_TX is None else self._add(convolved_TX, product_TX)
        assert convolved_TX is not None
        convolved_TeH = convolved_TX.unflatten(1, (self.num_all, size))
        mixed_TeH = self.mixing.mix_heads(projected_TX, convolved_TeH, self.temperatures)
        query_TNH, key_TGH = mixed_TeH.split([self.num_heads, self.num_kv_heads], dim=1)
        value_TGH = self.delay(value_TY, self.value_taps, cache.values, step).unflatten(1, (self.num_kv_heads, size))
        step = step.of_group(cache.key_values.group)
        rotation = run.rotations[self.config.heads.rotary]
        query_TNH = self.backend.rotate_and_write(query_TNH, key_TGH, value_TGH, rotation, cache.key_values, step)
        return self.output(self.backend.attend(query_TNH, cache.key_values, step).flatten(1))


def _range(part: slice) -> range:
    return range(part.start, part.stop)
