"""Lightning attention (MiniMax): linear attention with a constant decay of each head, with a state per request."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.config.needs import Needs
from moeserve.distributed.mesh import share_of
from moeserve.kv.layer_cache import CacheDivision, CacheItems, Places
from moeserve.kv.rules import KeepState
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import num_input_chunks, share_inputs
from moeserve.layers.grouped_query.attention import TokenNorm
from moeserve.layers.linear import Linear
from moeserve.layers.network import Build, NetworkSpec, OverTP, Run
from moeserve.layers.rows import At, Row, rows_of_heads, whole
from moeserve.layers.rows_of_parts import Part, by_key_head, joined
from moeserve.layers.state_cache import StateCache
from moeserve.layers.weights import QuantizationLimits
from moeserve.ops import convolution, lightning_attention, rows
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights

# N heads of this rank, X = N * V, C = 3 * X channels: queries, keys and values


@dataclass(frozen=True, kw_only=True)
class LightningAttentionSpec(NetworkSpec):
    """The shape of one layer."""

    num_heads: int
    head_dim: int
    # Logarithms of decays are 2^(-8 n / num_heads) times this factor, for heads n = 1, 2, ...
    decay_factor: float
    output_factor: float = 1.0  # multiplies the normalised outputs
    norm_epsilon: float = 1e-6  # epsilon of the norm of a token's outputs over all heads

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="lightning attention")

    def cache_rules(self, block_size: int) -> tuple[KeepState]:
        """Return the rule that determines how long states of requests are kept."""
        return (KeepState.of_blocks(block_size),)

    def can_divide(self, num_ranks: int) -> bool:
        """True if the heads can be divided evenly over `num_ranks` tp ranks."""
        return self.num_heads % num_ranks == 0

    def log_decays(self, heads: slice) -> list[float]:
        """Return the logarithm of the rate at which each head's state decays."""
        factor = math.log(self.decay_factor)
        return [factor - 8 * (head + 1) / self.num_heads * math.log(2) for head in range(heads.start, heads.stop)]

    def build(self, build: Build) -> LightningAttention:
        return LightningAttention(self, build.hidden_size, build.context)


class LightningAttention(OverTP):
    """A layer in which each token updates the recurrent state of its request, and reads it.

    Each tp rank has a share of the heads, and its output is a partial sum over these heads.
    """

    def __init__(self, config: LightningAttentionSpec, hidden_size: int, context: BuildContext) -> None:
        super().__init__(context)
        tp = context.tp
        self.config, self.context = config, context
        self.heads = share_of(config.num_heads, tp.rank_in_group, tp.world_size)
        size = (self.heads.stop - self.heads.start) * config.head_dim
        share = share_inputs(config.num_heads * config.head_dim, num_input_chunks(config.can_divide), context)
        first = self.heads.start * config.head_dim
        self.projected_sizes = [3 * size, size]  # queries, keys and values together; gates
        cuts = (first, size, 2 * size, 3 * size)
        self.input = Linear(hidden_size, 4 * size, context, limits=QuantizationLimits(cuts=cuts))
        # The SiLU of queries, keys and values in float32 is a convolution of one tap.
        shape = ConvolutionShape(num_channels=3 * size, num_taps=1, is_gated=False)
        taps_1C = torch.ones(1, 3 * size, dtype=torch.float32, device=context.device)
        self.activation = ConvolutionWeights(taps_1C, None)
        self.activate = convolution.make(context.backend, shape)
        log_decays = config.log_decays(self.heads)
        self.log_decay = torch.tensor(log_decays, dtype=torch.float32, device=context.device)
        self.attend = lightning_attention.make(context.backend, context.dtype)
        self.norm = TokenNorm(self.heads, config.num_heads, config.head_dim, config.norm_epsilon, context)
        self.gate_rows = rows.make(context.backend).gate_rows
        self.output = Linear(
            size,
            hidden_size,
            context,
            limits=QuantizationLimits(5, (first,)),
            chunks=share.chunks,
        )

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items: the states of this rank's heads."""
        num_bytes = sum(tensor.nbytes for tensor in self._make_cache(1, torch.device("meta")).tensors)
        heads, size = range(self.heads.start, self.heads.stop), self.config.head_dim
        channels = range(heads.start * size, heads.stop * size)
        (rule,) = self.config.cache_rules(self.context.block_size)
        return (CacheItems(rule, num_bytes, (CacheDivision(2, (channels,)), CacheDivision(1, (heads,)))),)

    def make_cache(self, places: Places) -> StateCache:
        return self._make_cache(places.num_rows, self.context.device)

    def _make_cache(self, num_rows: int, device: torch.device) -> StateCache:
        num_heads, size = self.heads.stop - self.heads.start, self.config.head_dim
        return StateCache(
            torch.empty(num_rows, 0, 3 * num_heads * size, dtype=self.context.dtype, device=device),
            torch.empty(num_rows, num_heads, size, size, dtype=torch.float32, device=device),
        )

    def rows(self, at: At) -> Iterator[Row]:
        heads, num_heads, owner = self.heads, self.config.num_heads, self.input.weights
        queries_keys_values, gates = self.input.weight.split(self.projected_sizes)
        parts = [Part.of_heads(memory, heads, num_heads, owner) for memory in queries_keys_values.chunk(3)]
        yield from by_key_head(at("qkv_proj.weight"), parts, heads, num_heads)
        yield from joined(at("output_gate.weight"), [Part.of_heads(gates, heads, num_heads, owner)])
        yield at("norm.weight"), whole(self.norm.norm.weight, factor=self.config.output_factor)
        values = rows_of_heads(heads, self.config.head_dim)
        yield from self.output.summed_rows(at.under("o_proj"), values, num_heads * self.config.head_dim, has_bias=False)
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):  # computed here
            if at.has(name):
                yield at(name), None

    def partial_sum(self, hidden_TD: Tensor, run: Run, cache: StateCache) -> Tensor:
        assert cache.states is not None
        projected_TC, gates_TX = self.input(hidden_TD).split(self.projected_sizes, dim=1)
        mixed_TC = self.activate(projected_TC, self.activation, cache.inputs, run.step)
        attended_TX = self.attend(mixed_TC, self.log_decay, cache.states, run.step)
        normed_TNV = self.norm(attended_TX.unflatten(1, (-1, self.config.head_dim)))
        return self.output(self.gate_rows(gates_TX, normed_TNV.flatten(1)))
