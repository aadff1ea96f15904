"""The gated short convolution of LFM2: a layer that mixes each token with the few tokens before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kv.layer_cache import CacheDivision, CacheItems, Places
from moeserve.kv.rules import KeepState
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import num_input_chunks, share_inputs
from moeserve.layers.linear import Linear
from moeserve.layers.network import Build, NetworkSpec, OverTP, Run
from moeserve.layers.rows import At, Row, some_rows
from moeserve.layers.rows_of_parts import Part, joined
from moeserve.layers.state_cache import StateCache
from moeserve.layers.weights import AnyWeights, QuantizationLimits
from moeserve.ops import convolution
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights


@dataclass(frozen=True, kw_only=True)
class ShortConvolutionSpec(NetworkSpec):
    """The shape of one layer."""

    num_channels: int
    num_taps: int  # tokens that the convolution spans, the current one included
    has_bias: bool = False  # both projections and the convolution have biases

    @property
    def num_heads(self) -> int:
        """The units that tp ranks divide: channels."""
        return self.num_channels

    def cache_rules(self, block_size: int) -> tuple[KeepState]:
        """Return the rule that determines how long states of requests are kept."""
        return (KeepState.of_blocks(block_size),)

    def can_divide(self, num_ranks: int) -> bool:
        """True if the channels can be divided evenly over `num_ranks` tp ranks."""
        return self.num_channels % num_ranks == 0

    def build(self, build: Build) -> GatedConvolution:
        return GatedConvolution(self, build.hidden_size, build.context)


class GatedConvolution(OverTP):
    """output(C * convolution(B * x)), where B, C and x are projections of the token.

    Each tp rank has a share of the channels, and its output is a partial sum over these channels.
    """

    def __init__(self, config: ShortConvolutionSpec, hidden_size: int, context: BuildContext) -> None:
        super().__init__(context)
        self.config = config
        self.context = context
        share = share_inputs(config.num_channels, num_input_chunks(config.can_divide), context)
        self.channels = share.inputs
        size, first = self.channels.stop - self.channels.start, self.channels.start
        self.shape = ConvolutionShape(num_channels=size, num_taps=config.num_taps, is_gated=True)
        self.input = Linear(
            hidden_size,
            3 * size,
            context,
            has_bias=config.has_bias,
            limits=QuantizationLimits(cuts=(first, size, 2 * size)),
        )
        self.taps = context.parameter(config.num_taps, size, dtype=torch.float32)
        self.bias = context.parameter(size, dtype=torch.float32) if config.has_bias else None
        self.output = Linear(
            size,
            hidden_size,
            context,
            has_bias=config.has_bias and context.tp.rank_in_group == 0,  # added once: outputs are summed
            limits=QuantizationLimits(5, (first,)),
            chunks=share.chunks,
        )
        self.convolve = convolution.make(context.backend, self.shape)

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items: the states of this rank's channels."""
        num_inputs = (self.shape.num_taps - 1) * self.shape.num_channels
        division = CacheDivision(2, (range(self.channels.start, self.channels.stop),))
        (rule,) = self.config.cache_rules(self.context.block_size)
        return (CacheItems(rule, num_inputs * self.context.dtype.itemsize, (division,)),)

    def make_cache(self, places: Places) -> StateCache:
        shape = (places.num_rows, self.shape.num_taps - 1, self.shape.num_channels)
        return StateCache(torch.empty(shape, dtype=self.context.dtype, device=self.context.device))

    def rows(self, at: At) -> Iterator[Row]:
        channels, num_channels = self.channels, self.config.num_channels
        kinds: list[tuple[str, Tensor, Tensor, AnyWeights | None]]
        kinds = [("weight", self.input.weight, self.taps.T[:, None], self.input.weights)]
        if self.bias is not None:
            assert self.input.bias is not None
            kinds.append(("bias", self.input.bias, self.bias, None))
        for kind, memory, of_convolution, owner in kinds:
            gates_and_values = [Part.of_heads(part, channels, num_channels, owner) for part in memory.chunk(3)]
            yield from joined(at(f"in_proj.{kind}"), gates_and_values)
            yield at(f"conv.{kind}"), some_rows(of_convolution, channels, num_channels)
        yield from self.output.summed_rows(at.under("out_proj"), channels, num_channels, has_bias=self.config.has_bias)

    def partial_sum(self, hidden_TD: Tensor, run: Run, cache: StateCache) -> Tensor:
        weights = ConvolutionWeights(self.taps, self.bias)
        return self.output(self.convolve(self.input(hidden_TD), weights, cache.inputs, run.step))
