"""A short convolution of the previous network's update (Inkling): update + convolution(update)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.config.needs import Needs
from moeserve.kv.layer_cache import CacheItems, Places
from moeserve.kv.rules import KeepState
from moeserve.layers.network import Build, Network, NetworkSpec, Run, gathered
from moeserve.layers.rows import At, Row, residual_taps, whole
from moeserve.layers.state_cache import StateCache
from moeserve.ops import convolution
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights


@dataclass(frozen=True, kw_only=True)
class UpdateConvolutionSpec(NetworkSpec):
    """The shape of one convolution. The convolution is placed on a `ChainedStream`, without a norm."""

    name = "update_convolution"

    num_taps: int  # tokens that the convolution spans, the current one included
    is_scaled: bool = False  # the result is multiplied by a learned number
    factor: float | None = None  # the result is multiplied by this number (Inkling 2)

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="a convolution of updates")

    def cache_rules(self, block_size: int) -> tuple[KeepState]:
        """Return the rule that determines how long states of requests are kept."""
        return (KeepState.of_blocks(block_size),)

    def build(self, build: Build) -> UpdateConvolution:
        return UpdateConvolution(self, build)


class UpdateConvolution(Network):
    """Convolves updates. Every tp rank convolves the updates of all tokens, and returns the rows of its own tokens."""

    def __init__(self, config: UpdateConvolutionSpec, build: Build) -> None:
        super().__init__()
        self.config, self.context, self.size = config, build.context, build.hidden_size
        self.taps = self.context.parameter(config.num_taps, self.size, dtype=torch.float32)
        self.scale: Tensor | None = self.context.parameter(1, dtype=torch.float32) if config.is_scaled else None
        if config.factor is not None:
            self.scale = torch.full((1,), config.factor, device=self.context.device)
        shape = ConvolutionShape(num_channels=self.size, num_taps=config.num_taps, is_gated=False, is_linear=True)
        self.convolve = convolution.make(self.context.backend, shape)

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items: the states, which every tp rank holds in full."""
        num_bytes = (self.config.num_taps - 1) * self.size * self.context.dtype.itemsize
        (rule,) = self.config.cache_rules(self.context.block_size)
        return (CacheItems(rule, num_bytes),)

    def make_cache(self, places: Places) -> StateCache:
        shape = places.num_rows, self.config.num_taps - 1, self.size
        return StateCache(torch.empty(shape, dtype=self.context.dtype, device=self.context.device))

    def rows(self, at: At) -> Iterator[Row]:
        yield from residual_taps(at("conv1d.weight"), self.taps, slice(0, self.size), self.size)
        if self.config.is_scaled:
            assert self.scale is not None
            yield at("scale"), whole(self.scale)

    def forward(self, update_tD: Any, run: Run, cache: StateCache) -> Tensor:
        update_TD = gathered(update_tD, self.context.tp, run.step)
        assert isinstance(update_TD, Tensor)
        weights = ConvolutionWeights(self.taps, None, self.scale)
        return self.convolve(update_TD, weights, cache.inputs, run.step)[run.step.own_rows]
