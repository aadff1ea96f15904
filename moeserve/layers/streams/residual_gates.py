"""A residual stream with a learned gate for each column, by which a network's output is added (Muse Spark)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.layers.network import Build
from moeserve.layers.norm import NormAfterEmbedding, RMSNorm, RowsForm, ScaledFirstNorm
from moeserve.layers.rows import At, Row, whole
from moeserve.layers.streams.residual import PlaceSpec, PlainStream, Residual
from moeserve.ops import mixing
from moeserve.ops.mixing.interface import Affine

SMALLEST_SQUARE = 1e-3  # minimum of the square of the stream's factor


@dataclass(frozen=True)
class EmbeddingNorm:
    """The norm before the first network, whose inputs are embedded tokens normalised without weights."""

    def build(self, build: Build, form: RowsForm) -> NormAfterEmbedding:
        return NormAfterEmbedding(build.hidden_size, build.norm_epsilon, build.context, form, has_weight=False)


class WholeNorm(RMSNorm):
    """An RMSNorm whose stored weights are complete: `At.norm_offset` is not added to them."""

    def rows(self, at: At) -> Iterator[Row]:
        yield at("weight"), whole(self.weight)


@dataclass(frozen=True)
class LastNorm:
    """The norm after all networks."""

    def build(self, build: Build, form: RowsForm) -> WholeNorm:
        return WholeNorm(build.hidden_size, build.norm_epsilon, build.context, form)


@dataclass(frozen=True, kw_only=True)
class ResidualGates(PlainStream):
    """A stream of one row for each token.

    The outputs of all networks are normalised. The norm of an output has weights if the place `is_normed`.
    """

    last_norm: LastNorm = LastNorm()
    temperature: float  # divides the stored gates
    output_epsilon: float  # epsilon of the norms of outputs

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="gates of the residual stream")

    def place(self, build: Build, form: RowsForm, spec: PlaceSpec) -> GatedResidual:
        assert spec.has_norm
        assert not spec.is_scaled
        return GatedResidual(spec.entry_norm or self.norm(build, form), self, build, has_weights=spec.is_normed)


class GatedResidual(Residual):
    """The place of a network with norms of its input and output.

    The new stream is the sum of the output and the stream, each multiplied by a factor for each column.
    """

    def __init__(self, norm: nn.Module, config: ResidualGates, build: Build, *, has_weights: bool) -> None:
        size, epsilon, context = build.hidden_size, config.output_epsilon, build.context
        kind = ScaledFirstNorm if has_weights else functools.partial(RMSNorm, has_weight=False)
        super().__init__(norm, kind(size, epsilon, context), build)
        self.gate = context.parameter(size, dtype=torch.float32)
        self.temperature = config.temperature
        self._mix = mixing.make(context.backend).add

    @functools.cached_property
    def _factors(self) -> tuple[Affine, Affine]:
        """The factors of the output and of the stream. Available after weights are loaded."""
        of_output_D = (self.gate / self.temperature).sigmoid()
        square_D = (1 - of_output_D) * (1 + of_output_D)
        return Affine(of_output_D), Affine(square_D.clamp(min=SMALLEST_SQUARE).sqrt())

    def leave(self, stream_tD: Tensor, update_tD: Tensor) -> tuple[Tensor, None]:
        assert self.output_norm is not None
        of_output, of_stream = self._factors
        return self._mix(self.output_norm(update_tD), of_output, stream_tD, of_stream), None

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from super().rows(at, norm_name, output_norm_name)
        yield at(f"{output_norm_name}.gate"), whole(self.gate)
