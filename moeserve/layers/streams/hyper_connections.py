"""Several residual streams, which hyper-connections mix around each network (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.layers.network import Build
from moeserve.layers.norm import RMSNorm, RowsForm
from moeserve.layers.rows import At, Row, whole
from moeserve.layers.streams.residual import Place
from moeserve.ops import streams as stream_operations
from moeserve.ops.streams.interface import StreamsConfig, StreamsWeights

# S streams, X = S * D, C coefficients


@dataclass(frozen=True)
class Streams:
    """Several residual streams, and the coefficients of the network that runs on them."""

    values_TX: Tensor
    coefficients_TC: Tensor | None = None  # float32; None: no network is running


@dataclass(frozen=True, kw_only=True)
class HyperStreams(StreamsConfig):
    """Several rows for each token."""

    @property
    def width(self) -> int:
        return self.num_streams

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_order="hyper-connections")

    def place(
        self,
        build: Build,
        form: RowsForm,
        entry_norm: nn.Module | None,
        *,
        has_norm: bool,
        is_normed: bool,
        is_scaled: bool,
    ) -> HyperConnection:
        assert entry_norm is None
        assert has_norm
        assert not is_normed
        assert not is_scaled
        return HyperConnection(self, build, form)

    def last(self, build: Build) -> HyperConnection:
        return HyperConnection(self, build, num_kinds=1)

    def start(self, hidden_tX: Tensor) -> Streams:
        """Return the streams: copies of embedded tokens, or those of the previous pipeline stage."""
        return Streams(hidden_tX)


class HyperConnection(Place):
    """The place of a network between streams."""

    def __init__(self, config: StreamsConfig, build: Build, form: RowsForm = "plain", *, num_kinds: int = 3) -> None:
        """
        Args:
            num_kinds: 3 around a network; 1 for the last place, whose normalised streams are the model's output.
        """
        super().__init__()
        context, hidden_size, norm_epsilon = build.context, build.hidden_size, build.norm_epsilon
        num_coefficients = config.num_coefficients if num_kinds == 3 else config.num_streams
        wide = torch.float32
        self.map = context.parameter(num_coefficients, config.num_streams * hidden_size, dtype=wide)
        self.base = context.parameter(num_coefficients, dtype=wide)
        self.scales = context.parameter(num_kinds, dtype=wide)
        self.norm = RMSNorm(hidden_size, norm_epsilon, context, form)
        self.kernels = stream_operations.make(context.backend, config, norm_epsilon)

    def enter(self, stream: Streams, update_TD: Tensor | None) -> tuple[Streams, Any]:
        values_TX = self.close(stream, update_TD)
        weights = StreamsWeights(self.map, self.base, self.scales)
        collapsed_TD, coefficients_TC = self.kernels.collapse(values_TX, weights)
        _, normed = self.norm.after_adding(None, collapsed_TD)
        return Streams(values_TX, coefficients_TC), normed

    def leave(self, stream: Streams, update_TD: Tensor) -> tuple[Streams, Tensor | None]:
        return stream, update_TD

    def close(self, stream: Streams, update_TD: Tensor | None) -> Tensor:
        if update_TD is None:
            return stream.values_TX
        assert stream.coefficients_TC is not None
        return self.kernels.expand(stream.values_TX, update_TD, stream.coefficients_TC)

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from self.norm.rows(at.under(norm_name))
        for name, memory in (("fn", self.map), ("base", self.base), ("scale", self.scales)):
            yield at(f"{norm_name}.hc_{name}"), whole(memory)
