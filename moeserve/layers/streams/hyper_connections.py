"""Several residual streams, which hyper-connections read, write and perhaps mix around each network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.config.needs import Needs
from moeserve.layers.network import Build
from moeserve.layers.norm import RMSNorm, RowsForm
from moeserve.layers.rows import At, Row, whole
from moeserve.layers.streams.residual import Place, PlaceSpec
from moeserve.ops import rows
from moeserve.ops import streams as stream_operations
from moeserve.ops.streams.interface import StreamsSpec, StreamsWeights

# S streams, X = S * D, C coefficients


@dataclass(frozen=True)
class Streams:
    """Several residual streams, and the coefficients of the network that runs on them."""

    values_TX: Tensor
    coefficients_TC: Tensor | None = None  # float32; None: no network is running


@dataclass(frozen=True, kw_only=True)
class HyperStreams(StreamsSpec):
    """A stream of several rows for each token.

    A network without a norm reads all rows of a token, and its output has as many rows.
    """

    ends_in_mean: bool = False  # the hidden states are the mean of the streams (GLM-5.3), not a learned sum

    @property
    def width(self) -> int:
        return self.num_streams

    @property
    def needs(self) -> Needs:
        independent = None if self.num_iterations else "hyper-connections that do not mix streams"
        return Needs(without_gpu_order="hyper-connections", without_gpu_kernels=independent)

    def place(self, build: Build, form: RowsForm, spec: PlaceSpec) -> StreamsPlace:
        assert spec.entry_norm is None
        assert not spec.is_normed
        assert not spec.is_scaled
        return self.connect(build, form) if spec.has_norm else StreamsPlace(self, build)

    def connect(self, build: Build, form: RowsForm) -> StreamsPlace:
        """Return the place of a network that reads a row for each token."""
        return HyperConnection(self, build, form, num_kinds=self.num_kinds)

    def last(self, build: Build) -> StreamsPlace:
        return StreamsMean(self, build) if self.ends_in_mean else HyperConnection(self, build, num_kinds=1)

    def start(self, hidden_tX: Tensor) -> Streams:
        """Return the streams: copies of embedded tokens, or the streams that the previous pipeline stage sent."""
        return Streams(hidden_tX)


class StreamsPlace(Place):
    """The `Place` of a network whose inputs and outputs are as wide as all residual streams together."""

    def __init__(self, config: StreamsSpec, build: Build) -> None:
        super().__init__()
        self.kernels = stream_operations.make(build.context.backend, config, build.norm_epsilon)
        self._add = rows.make(build.context.backend).add

    def enter(self, stream: Streams, update_TD: Tensor | None) -> tuple[Streams, Any]:
        values_TX = self.close(stream, update_TD)
        return Streams(values_TX), values_TX

    def leave(self, stream: Streams, update_TD: Tensor) -> tuple[Streams, Tensor | None]:
        if stream.coefficients_TC is None:
            return Streams(self._add(stream.values_TX, update_TD)), None
        return stream, update_TD

    def close(self, stream: Streams, update_TD: Tensor | None) -> Tensor:
        if update_TD is None:
            return stream.values_TX
        assert stream.coefficients_TC is not None
        return self.kernels.expand(stream.values_TX, update_TD, stream.coefficients_TC)

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from ()


class StreamsSum(StreamsPlace):
    """A place that reads a weighted sum of streams."""

    def __init__(self, config: StreamsSpec, build: Build, form: RowsForm) -> None:
        super().__init__(config, build)
        self.norm = RMSNorm(build.hidden_size, build.norm_epsilon, build.context, form)

    @property
    def weights(self) -> StreamsWeights:
        """The weights that compute the coefficients of the sum."""
        raise NotImplementedError

    def enter(self, stream: Streams, update_TD: Tensor | None) -> tuple[Streams, Any]:
        values_TX = self.close(stream, update_TD)
        collapsed_TD, coefficients_TC = self.kernels.collapse(values_TX, self.weights)
        _, normed = self.norm.after_adding(None, collapsed_TD)
        return Streams(values_TX, coefficients_TC), normed

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from self.norm.rows(at.under(norm_name))


class StreamsMean(StreamsSum):
    """The last place, which reads the mean of the streams."""

    def __init__(self, config: StreamsSpec, build: Build) -> None:
        super().__init__(dataclasses.replace(config, epsilon=0.0), build, "plain")
        num_streams, device = config.num_streams, build.context.device
        # The sigmoid of this number is 1 / num_streams.
        base = -math.log(num_streams - 1) if num_streams > 1 else math.inf
        self._weights = StreamsWeights(
            torch.zeros(num_streams, num_streams * build.hidden_size, device=device),
            torch.full((num_streams,), base, device=device),
            torch.zeros(1, device=device),
        )

    @property
    def weights(self) -> StreamsWeights:
        return self._weights


class HyperConnection(StreamsSum):
    """The place of a network that reads a learned sum of the streams."""

    def __init__(self, config: StreamsSpec, build: Build, form: RowsForm = "plain", *, num_kinds: int) -> None:
        """
        Args:
            num_kinds: number of kinds of coefficients; 1 for the last place, whose rows are the hidden states.
        """
        super().__init__(config, build, form)
        context, hidden_size = build.context, build.hidden_size
        num_coefficients = config.num_coefficients if num_kinds > 1 else config.num_streams
        wide = torch.float32
        self.map = context.parameter(num_coefficients, config.num_streams * hidden_size, dtype=wide)
        self.base = context.parameter(num_coefficients, dtype=wide)
        self.scales = context.parameter(num_kinds, dtype=wide)

    @property
    def weights(self) -> StreamsWeights:
        return StreamsWeights(self.map, self.base, self.scales)

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from super().rows(at, norm_name, output_norm_name)
        for name, memory in (("fn", self.map), ("base", self.base), ("scale", self.scales)):
            yield at(f"{norm_name}.hc_{name}"), whole(memory)
