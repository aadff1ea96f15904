"""Several residual streams whose gated mean networks read. The gates are computed from all streams (Qwen4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.layers.linear import Linear
from moeserve.layers.network import Build
from moeserve.layers.norm import RowsForm
from moeserve.layers.rows import At, Row, whole
from moeserve.layers.streams.hyper_connections import HyperStreams, Streams, StreamsPlace
from moeserve.layers.weights import QuantizationLimits
from moeserve.ops import rows

# S streams, X = S * D, R size of the rows from which gates are projected


@dataclass(frozen=True, kw_only=True)
class GatedStreams(HyperStreams):
    """A stream of several rows for each token, which are gated by column."""

    num_iterations: int = 0
    epsilon: float = 0.0
    rank: int  # size of the rows from which gates are projected (R)

    def connect(self, build: Build, form: RowsForm) -> GatedConnection:
        return GatedConnection(self, build)

    def last(self, build: Build) -> GatedConnection:
        return GatedConnection(self, build, is_last=True)


class StreamsNorm(nn.Module):
    """Scales each stream to unit mean square, then by a learned weight per column."""

    def __init__(self, num_streams: int, build: Build) -> None:
        super().__init__()
        self.weight = build.context.parameter(num_streams * build.hidden_size)
        self.num_streams, self.epsilon = num_streams, build.norm_epsilon
        self._norm_in_place = rows.make(build.context.backend).rms_norm_in_place

    def forward(self, streams_TX: Tensor) -> Tensor:
        normed_TX = streams_TX.clone()
        parts = (each.chunk(self.num_streams, dim=-1) for each in (normed_TX, self.weight))
        for part_TD, weight_D in zip(*parts, strict=True):
            self._norm_in_place(part_TD, weight_D, self.epsilon)
        return normed_TX

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        yield at("weight"), whole(self.weight, offset=at.norm_offset)


class GatedConnection(StreamsPlace):
    """The place of a network that reads the mean of gated streams, and whose output is added to each with a weight."""

    def __init__(self, config: GatedStreams, build: Build, *, is_last: bool = False) -> None:
        """
        Args:
            is_last: True: the place is after all networks, where nothing is added to the streams.
        """
        super().__init__(config, build)
        self.num_streams, width = config.num_streams, config.num_streams * build.hidden_size
        self.norm = StreamsNorm(config.num_streams, build)
        self.down = Linear(width, config.rank, build.context)
        self.up = Linear(config.rank, width, build.context)
        limits = QuantizationLimits(8, None)
        self.weigh = None if is_last else Linear(width, config.num_streams, build.context, limits=limits)
        self._gate = rows.make(build.context.backend).gate_rows

    def enter(self, stream: Streams, update_TD: Tensor | None) -> tuple[Streams, Any]:
        values_TX = self.close(stream, update_TD)
        normed_TX = self.norm(values_TX)
        inner_TR = self.down(normed_TX) / self.num_streams
        gated_TX = self._gate(self.up(self._gate(inner_TR, inner_TR)), normed_TX)
        # Streams are added one after the other, because the order of additions must not depend on the number of tokens.
        sum_TD, *others = (part.float() for part in gated_TX.chunk(self.num_streams, dim=1))
        for part_TD in others:
            sum_TD = sum_TD + part_TD
        mean_TD = (sum_TD / self.num_streams).to(values_TX.dtype)
        if self.weigh is None:
            return Streams(values_TX), mean_TD
        weights_TS = self.weigh(normed_TX) / self.num_streams
        weights_TS = self._gate(weights_TS, torch.full_like(weights_TS, 2.0)).float()
        return Streams(values_TX, weights_TS.repeat(1, 2)), mean_TD  # the first half, weights of a sum, is not used

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        own = at.under(norm_name)
        yield from self.norm.rows(own.under("hc_norm"))
        yield from self.down.rows(own.under("input_mix_weight_down"))
        yield from self.up.rows(own.under("input_mix_weight_up"))
        if self.weigh is not None:
            yield from self.weigh.rows(own.under("block_inject_weight"))
