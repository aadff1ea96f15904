"""Gated delta network (arXiv 2412.06464): linear attention with a state of fixed size for each request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.distributed.mesh import share_of
from moeserve.layers.cache import CacheNeeds, CacheSize
from moeserve.layers.context import ModelContext
from moeserve.layers.input_share import num_input_chunks, share_inputs
from moeserve.layers.linear import Linear
from moeserve.layers.norm import RowsForm
from moeserve.layers.rotary import RotaryConfig, Rotations
from moeserve.layers.weights import QuantizationLimits
from moeserve.ops.gated_delta import GatedDeltaCache, GatedDeltaShape, GatedDeltaWeights
from moeserve.step_inputs import StepInputs

# T tokens, N value heads of this rank, C channels of the convolution, W tokens that it spans, V values of a head


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """The shape of one layer. Value head n reads key head n // (num_heads / num_key_heads)."""

    num_heads: int  # of values
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_taps: int  # tokens of the convolution, its own included
    rotaries: tuple[RotaryConfig, ...] = ()

    def can_divide(self, num_ranks: int) -> bool:
        """True if this many tp ranks can each have equally many heads of both kinds."""
        return self.num_heads % num_ranks == 0 and self.num_key_heads % num_ranks == 0


class GatedDeltaNet(nn.Module):
    """A gated delta network: each token updates the recurrent state of its request, and reads it.

    Each tp rank has a share of the heads, and its output is a partial sum over these heads.
    """

    input_form: RowsForm = "plain"

    def __init__(self, config: GatedDeltaConfig, hidden_size: int, norm_epsilon: float, context: ModelContext) -> None:
        super().__init__()
        tp = context.tp
        self.config = config
        self.context = context
        self.heads = share_of(config.num_heads, tp.rank_in_group, tp.world_size)
        self.key_heads = share_of(config.num_key_heads, tp.rank_in_group, tp.world_size)
        num_heads, num_key_heads = (int(heads.stop - heads.start) for heads in (self.heads, self.key_heads))
        key_size, value_size = num_key_heads * config.key_dim, num_heads * config.value_dim
        self.projected_sizes = [key_size, key_size, value_size, value_size]  # queries, keys, values, gates
        first_key, first_value = self.key_heads.start * config.key_dim, self.heads.start * config.value_dim
        cuts = (first_key, first_value, key_size, 2 * key_size, 2 * key_size + value_size)
        self.input = Linear(hidden_size, sum(self.projected_sizes), context, limits=QuantizationLimits(cuts=cuts))
        # An error of the decay affects all later tokens, so its few weights are never quantised below 8 bits.
        self.rates = Linear(hidden_size, 2 * num_heads, context, limits=QuantizationLimits(8, None))
        self.shape = GatedDeltaShape(
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            num_taps=config.num_taps,
            norm_epsilon=norm_epsilon,
        )
        self.taps = context.parameter(config.num_taps, self.shape.num_channels, dtype=torch.float32)
        self.log_decay = context.parameter(num_heads, dtype=torch.float32)
        self.decay_bias = context.parameter(num_heads, dtype=torch.float32)
        self.norm_weight = context.parameter(config.value_dim, dtype=torch.float32)
        self.output = Linear(
            value_size,
            hidden_size,
            context,
            limits=QuantizationLimits(cuts=(first_value,)),
            chunks=share_inputs(
                config.num_heads * config.value_dim, num_input_chunks(config.can_divide), context
            ).chunks,
        )
        self.mix = context.kernels.make_gated_delta(self.shape)

    @property
    def cache_needs(self) -> CacheNeeds:
        shape, itemsize = self.shape, self.context.dtype.itemsize
        inputs = (shape.num_taps - 1) * shape.num_channels * itemsize
        recurrent = shape.num_heads * shape.key_dim * shape.value_dim * torch.float32.itemsize
        return CacheNeeds(state_bytes=inputs + recurrent)

    def make_cache(self, size: CacheSize) -> GatedDeltaCache:
        shape, device = self.shape, self.context.device
        inputs_shape = (size.num_states, shape.num_taps - 1, shape.num_channels)
        states_shape = (size.num_states, shape.num_heads, shape.key_dim, shape.value_dim)
        return GatedDeltaCache(
            torch.empty(inputs_shape, dtype=self.context.dtype, device=device),
            torch.empty(states_shape, dtype=torch.float32, device=device),
        )

    def forward(self, hidden_TD: Tensor, rotations: Rotations, cache: GatedDeltaCache, step: StepInputs) -> Tensor:
        projected, num_channels = self.input(hidden_TD), self.shape.num_channels
        weights = GatedDeltaWeights(self.taps, self.log_decay, self.decay_bias, self.norm_weight)
        mixed_TX = self.mix(
            projected[:, :num_channels], projected[:, num_channels:], self.rates(hidden_TD), weights, cache, step
        )
        return self.output(mixed_TX)
