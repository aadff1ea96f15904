"""The mixer of Mamba-1 as Jamba has it: norms of the step sizes and of the vectors B and C."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.config.needs import Needs
from moeserve.kv.layer_cache import CacheDivision, CacheItems, Places
from moeserve.kv.rules import KeepState
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import num_input_chunks, share_inputs
from moeserve.layers.linear import Linear
from moeserve.layers.network import Build, NetworkSpec, OverTP, Run
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rows import At, Row, some_rows
from moeserve.layers.rows_of_parts import Part, joined
from moeserve.layers.state_cache import StateCache
from moeserve.layers.weights import QuantizationLimits
from moeserve.ops import convolution, selective_scan
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights
from moeserve.ops.selective_scan.reference import SelectiveScanWeights

# C channels, N values of a channel's state, R rank of the projection to step sizes, P = R + 2 * N


@dataclass(frozen=True, kw_only=True)
class MambaSpec(NetworkSpec):
    """The shape of one layer."""

    num_channels: int
    state_size: int  # number of values of a channel's state (N)
    rank: int  # rank of the two-step projection to step sizes (R)
    num_taps: int  # tokens that the convolution spans, the current one included
    norm_epsilon: float
    has_convolution_bias: bool = True

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="the selective scan of Mamba-1")

    def cache_rules(self, block_size: int) -> tuple[KeepState]:
        """Return the rule that determines how long states of requests are kept."""
        return (KeepState.of_blocks(block_size),)

    def can_divide(self, num_ranks: int) -> bool:
        """True if the channels can be divided evenly over `num_ranks` tp ranks."""
        return self.num_channels % num_ranks == 0

    def build(self, build: Build) -> MambaMixer:
        return MambaMixer(self, build.hidden_size, build.context)


class MambaMixer(OverTP):
    """A layer in which each token updates the states of its request's channels, and reads them.

    Each tp rank has a share of the channels. A projection of all channels selects a token's step sizes, B and C, so the
    ranks add their parts of this projection. The output is a partial sum over this rank's channels.

    Errors in step sizes affect all later tokens, so the weights that select step sizes are float32, or have 8 bits if
    weights are quantised.
    """

    def __init__(self, config: MambaSpec, hidden_size: int, context: BuildContext) -> None:
        super().__init__(context)
        self.config, self.context = config, context
        share = share_inputs(config.num_channels, num_input_chunks(config.can_divide), context)
        self.channels = share.inputs
        first, size = self.channels.start, self.channels.stop - self.channels.start
        exact = dataclasses.replace(context, dtype=torch.float32)
        self.selected_sizes = [config.rank, config.state_size, config.state_size]
        limits = QuantizationLimits(8, None)
        self.input = Linear(hidden_size, 2 * size, context, limits=QuantizationLimits(cuts=(first, size)))
        self.taps = exact.parameter(config.num_taps, size)
        self.bias = exact.parameter(size) if config.has_convolution_bias else None
        self.select = Linear(size, sum(self.selected_sizes), exact, limits=limits, chunks=share.chunks)
        self.step_norm = RMSNorm(config.rank, config.norm_epsilon, exact)
        self.input_norm = RMSNorm(config.state_size, config.norm_epsilon, exact)
        self.output_norm = RMSNorm(config.state_size, config.norm_epsilon, exact)
        self.steps = Linear(config.rank, size, exact, has_bias=True, limits=limits)
        self.log_decay = exact.parameter(size, config.state_size)
        self.skip = exact.parameter(size)
        self.output = Linear(size, hidden_size, context, limits=QuantizationLimits(5, (first,)), chunks=share.chunks)
        shape = ConvolutionShape(num_channels=size, num_taps=config.num_taps, is_gated=False)
        self.convolve = convolution.make(context.backend, shape)
        self.scan = selective_scan.make(context.backend)

    @property
    def norms(self) -> tuple[RMSNorm, RMSNorm, RMSNorm]:
        """The norms of step sizes, B and C, in this order."""
        return self.step_norm, self.input_norm, self.output_norm

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items: the states of this rank's channels."""
        own = range(self.channels.start, self.channels.stop)
        num_bytes = sum(tensor.nbytes for tensor in self._make_cache(1, torch.device("meta")).tensors)
        (rule,) = self.config.cache_rules(self.context.block_size)
        return (CacheItems(rule, num_bytes, (CacheDivision(2, (own,)), CacheDivision(1, (own,)))),)

    def make_cache(self, places: Places) -> StateCache:
        return self._make_cache(places.num_rows, self.context.device)

    def _make_cache(self, num_rows: int, device: torch.device) -> StateCache:
        size = self.channels.stop - self.channels.start
        inputs_shape = num_rows, self.config.num_taps - 1, size
        return StateCache(
            torch.empty(inputs_shape, dtype=self.context.dtype, device=device),
            torch.empty(num_rows, size, self.config.state_size, dtype=torch.float32, device=device),
        )

    def rows(self, at: At) -> Iterator[Row]:
        channels, number = self.channels, self.config.num_channels
        parts = [Part.of_heads(part, channels, number, self.input.weights) for part in self.input.weight.chunk(2)]
        yield from joined(at("in_proj.weight"), parts)
        yield at("conv1d.weight"), some_rows(self.taps.T[:, None], channels, number)
        if self.bias is not None:
            yield at("conv1d.bias"), some_rows(self.bias, channels, number)
        yield from self.select.summed_rows(at.under("x_proj"), channels, number, has_bias=False)
        for norm, name in zip(self.norms, ("dt_layernorm", "b_layernorm", "c_layernorm"), strict=True):
            yield from norm.rows(at.under(name))
        assert self.steps.bias is not None
        yield at("dt_proj.weight"), some_rows(self.steps.weight, channels, number, self.steps.weights)
        yield at("dt_proj.bias"), some_rows(self.steps.bias, channels, number)
        yield at("A_log"), some_rows(self.log_decay, channels, number)
        yield at("D"), some_rows(self.skip, channels, number)
        yield from self.output.summed_rows(at.under("out_proj"), channels, number, has_bias=False)

    def partial_sum(self, hidden_TD: Tensor, run: Run, cache: StateCache) -> Tensor:
        assert cache.states is not None
        sizes = run.step.tp_sizes
        inputs, gates_TC = self.input(hidden_TD).chunk(2, dim=1)
        values_TC = self.convolve(inputs, ConvolutionWeights(self.taps, self.bias), cache.inputs, run.step)
        # collective: all tp ranks
        selected_tP = self.tp.reduce_scatter(self.select(values_TC), sizes, torch.float32)
        for norm, part in zip(self.norms, selected_tP.split(self.selected_sizes, dim=1), strict=True):
            norm.in_place(part)
        # collective: all tp ranks
        steps_TR, inputs_TN, outputs_TN = self.tp.all_gather(selected_tP, sizes).split(self.selected_sizes, dim=1)
        weights = SelectiveScanWeights(self.log_decay, self.skip)
        mixed_TC = self.scan(
            values_TC, self.steps(steps_TR), inputs_TN, outputs_TN, gates_TC, weights, cache.states, run.step
        )
        return self.output(mixed_TC)
