"""Linear attention: gated delta networks, Kimi delta attention, and Mamba-2, with a state of fixed size per request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moeserve.distributed.mesh import share_of
from moeserve.kv.layer_cache import CacheDivision, CacheItems, Places
from moeserve.kv.rules import KeepState
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import num_input_chunks, share_inputs
from moeserve.layers.linear import Linear
from moeserve.layers.linear_attention.rows import linear_attention_rows
from moeserve.layers.network import Build, NetworkSpec, OverTP, Run
from moeserve.layers.rows import At, Row
from moeserve.layers.state_cache import StateCache
from moeserve.layers.weights import QuantizationLimits
from moeserve.ops import convolution as convolution_ops
from moeserve.ops import linear_attention
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights
from moeserve.ops.linear_attention.interface import LinearAttentionShape, LinearAttentionWeights

# N value heads of this rank, K values of a key, X = N * V, C channels of the convolution


@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec(NetworkSpec):
    """The shape of one layer. Value head n reads key head n // (num_heads / num_key_heads)."""

    num_heads: int  # value heads
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_taps: int  # tokens that the convolution spans, the current one included
    norm_epsilon: float
    is_delta: bool = True  # ops/linear_attention/interface.py describes this field and the next three
    has_channel_decays: bool = False
    decay_floor: float | None = None
    gate: Literal["silu", "sigmoid"] = "silu"
    low_rank: int | None = None  # rank of the two-step projections to decays and gates; None: one projection
    has_convolution_bias: bool = False

    def cache_rules(self, block_size: int) -> tuple[KeepState]:
        """Return the rule that determines how long states of requests are kept."""
        return (KeepState.of_blocks(block_size),)

    def can_divide(self, num_ranks: int) -> bool:
        """True if the key heads and the value heads can be divided evenly over `num_ranks` tp ranks."""
        return self.num_heads % num_ranks == 0 and self.num_key_heads % num_ranks == 0

    def build(self, build: Build) -> LinearAttention:
        return LinearAttention(self, build.hidden_size, build.context)


class LowRankLinear(nn.Module):
    """A low-rank projection: the first factor is whole on every rank, the second has this rank's outputs."""

    def __init__(
        self, hidden_size: int, rank: int, num_outputs: int, limits: QuantizationLimits, context: BuildContext
    ) -> None:
        super().__init__()
        self.down = Linear(hidden_size, rank, context, limits=QuantizationLimits(limits.min_bits))
        self.up = Linear(rank, num_outputs, context, limits=limits)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """Return the projected rows [T, O]."""
        output_TO: Tensor = self.up(self.down(hidden_TD))
        return output_TO


class LinearAttention(OverTP):
    """A layer in which each token updates the recurrent state of its request, and reads it.

    Each tp rank has a share of the heads, and its output is a partial sum over these heads.
    """

    def __init__(self, config: LinearAttentionSpec, hidden_size: int, context: BuildContext) -> None:
        super().__init__(context)
        tp = context.tp
        self.config = config
        self.context = context
        self.heads = share_of(config.num_heads, tp.rank_in_group, tp.world_size)
        self.key_heads = share_of(config.num_key_heads, tp.rank_in_group, tp.world_size)
        num_heads, num_key_heads = (int(heads.stop - heads.start) for heads in (self.heads, self.key_heads))
        self.shape = shape = LinearAttentionShape(
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            is_delta=config.is_delta,
            norm_epsilon=config.norm_epsilon,
            has_channel_decays=config.has_channel_decays,
            decay_floor=config.decay_floor,
            gate=config.gate,
        )
        key_size, value_size = num_key_heads * config.key_dim, num_heads * config.value_dim
        first_key, first_value = self.key_heads.start * config.key_dim, self.heads.start * config.value_dim
        first_decay = self.heads.start * shape.num_decays // num_heads
        self.projected_sizes = [key_size, key_size, value_size]  # queries, keys, values; gates
        self.rate_sizes = [num_heads] * config.is_delta
        # An error in the decay affects all later tokens, so its few weights are never quantised below 8 bits.
        decay_limits = QuantizationLimits(8, (first_decay,))
        self.decays: LowRankLinear | None = None
        self.gates: LowRankLinear | None = None
        if config.low_rank is None:
            self.projected_sizes.append(value_size)
            self.rate_sizes.append(shape.num_decays)
        else:
            self.decays = LowRankLinear(hidden_size, config.low_rank, shape.num_decays, decay_limits, context)
            gate_limits = QuantizationLimits(cuts=(first_value,))
            self.gates = LowRankLinear(hidden_size, config.low_rank, value_size, gate_limits, context)
        cuts = (first_key, first_value, key_size, 2 * key_size, 2 * key_size + value_size)
        self.input = Linear(hidden_size, sum(self.projected_sizes), context, limits=QuantizationLimits(cuts=cuts))
        self.rates = Linear(hidden_size, sum(self.rate_sizes), context, limits=QuantizationLimits(8, None))
        self.taps = context.parameter(config.num_taps, shape.num_channels, dtype=torch.float32)
        self.bias = context.parameter(shape.num_channels, dtype=torch.float32) if config.has_convolution_bias else None
        self.log_decay = context.parameter(num_heads, dtype=torch.float32)
        self.decay_bias = context.parameter(shape.num_decays, dtype=torch.float32)
        self.skip = None if config.is_delta else context.parameter(num_heads, dtype=torch.float32)
        norm_size = config.value_dim if config.is_delta else value_size
        self.norm_weight = context.parameter(norm_size, dtype=torch.float32)
        self.output = Linear(
            value_size,
            hidden_size,
            context,
            limits=QuantizationLimits(5, (first_value,)),
            chunks=share_inputs(
                config.num_heads * config.value_dim, num_input_chunks(config.can_divide), context
            ).chunks,
        )
        convolution = ConvolutionShape(num_channels=shape.num_channels, num_taps=config.num_taps, is_gated=False)
        self.convolve = convolution_ops.make(context.backend, convolution)
        self.attend = linear_attention.make(context.backend, shape)

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items: the states of this rank's heads, and of their channels in the convolution."""
        config, shape, channels, first = self.config, self.shape, [], 0
        inputs = (config.num_taps - 1) * shape.num_channels * self.context.dtype.itemsize
        recurrent = shape.num_heads * shape.key_dim * shape.value_dim * torch.float32.itemsize
        for heads, num_heads, size in (
            (self.key_heads, config.num_key_heads, config.key_dim),
            (self.key_heads, config.num_key_heads, config.key_dim),
            (self.heads, config.num_heads, config.value_dim),
        ):
            channels.append(range(first + heads.start * size, first + heads.stop * size))
            first += num_heads * size
        divisions = CacheDivision(2, tuple(channels)), CacheDivision(1, (range(self.heads.start, self.heads.stop),))
        (rule,) = config.cache_rules(self.context.block_size)
        return (CacheItems(rule, inputs + recurrent, divisions),)

    def make_cache(self, places: Places) -> StateCache:
        shape, device = self.shape, self.context.device
        inputs_shape = (places.num_rows, self.config.num_taps - 1, shape.num_channels)
        states_shape = (places.num_rows, shape.num_heads, shape.key_dim, shape.value_dim)
        return StateCache(
            torch.empty(inputs_shape, dtype=self.context.dtype, device=device),
            torch.empty(states_shape, dtype=torch.float32, device=device),
        )

    def rows(self, at: At) -> Iterator[Row]:
        return linear_attention_rows(at, self)

    def partial_sum(self, hidden_TD: Tensor, run: Run, cache: StateCache) -> Tensor:
        assert cache.states is not None
        projected, rates = self.input(hidden_TD), self.rates(hidden_TD)
        num_channels, num_rates = self.shape.num_channels, self.shape.num_heads if self.config.is_delta else 0
        convolution = ConvolutionWeights(self.taps, self.bias)
        weights = LinearAttentionWeights(self.log_decay, self.decay_bias, self.norm_weight, self.skip)
        mixed_TX = self.attend(
            self.convolve(projected[:, :num_channels], convolution, cache.inputs, run.step),
            projected[:, num_channels:] if self.gates is None else self.gates(hidden_TD),
            rates[:, num_rates:] if self.decays is None else self.decays(hidden_TD),
            rates[:, :num_rates] if num_rates else None,
            weights,
            cache.states,
            run.step,
        )
        return self.output(mixed_TX)
