"""A residual stream with learned functions of each column, applied when a network's output is added (Zaya)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.layers.build_context import BuildContext
from moeserve.layers.network import Build
from moeserve.layers.norm import RMSNorm, RowsForm
from moeserve.layers.rows import At, Row, whole
from moeserve.layers.streams.residual import PlaceSpec, PlainStream, Residual
from moeserve.ops import mixing
from moeserve.ops.mixing.interface import Affine


class Columns(nn.Module):
    """The function (x + bias) * scale of each column."""

    def __init__(self, hidden_size: int, context: BuildContext) -> None:
        super().__init__()
        self.scale, self.bias = (context.parameter(hidden_size, dtype=torch.float32) for _ in range(2))

    @property
    def affine(self) -> Affine:
        """The function in the form that operations take."""
        return Affine(self.scale, self.bias)

    def rows(self, at: At, name: str) -> Iterator[Row]:
        """Yield the weight mapping of this module. The names of the weights begin with `name`."""
        yield at(f"{name}_scale"), whole(self.scale)
        yield at(f"{name}_bias"), whole(self.bias)


@dataclass(frozen=True)
class AffineStream(PlainStream):
    """A stream of one row for each token.

    After a network, the new stream is a function of the network's output plus a function of the stream.
    """

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="learned functions of the residual stream")

    def place(self, build: Build, form: RowsForm, spec: PlaceSpec) -> AffineResidual:
        assert spec.has_norm
        assert not spec.is_normed
        assert not spec.is_scaled
        return AffineResidual(spec.entry_norm or self.norm(build, "plain"), build)


class AffineResidual(Residual):
    """The place of a network with a norm before the network, and two functions after it."""

    def __init__(self, norm: nn.Module, build: Build) -> None:
        super().__init__(norm, None, build)
        self.of_output, self.of_stream = (Columns(build.hidden_size, build.context) for _ in range(2))
        self._mix = mixing.make(build.context.backend).add

    def leave(self, stream_tD: Tensor, update_tD: Tensor) -> tuple[Tensor, None]:
        return self._mix(update_tD, self.of_output.affine, stream_tD, self.of_stream.affine), None

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from super().rows(at, norm_name, output_norm_name)
        own = at.under(output_norm_name)
        yield from self.of_output.rows(own, "hidden_states")
        yield from self.of_stream.rows(own, "residual")


@dataclass(frozen=True)
class FirstNorm:
    """The norm before the first network, and a function of the embedded tokens that is applied before the norm."""

    def build(self, build: Build, form: RowsForm) -> FirstRows:
        return FirstRows(build)


class FirstRows(nn.Module):
    """The affine map of the embedded tokens that begins the residual stream, and the norm of its result."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.columns = Columns(build.hidden_size, build.context)
        self.norm = RMSNorm(build.hidden_size, build.norm_epsilon, build.context)
        self._mix = mixing.make(build.context.backend).add

    def after_adding(self, update_tD: Tensor | None, hidden_tD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stream and its normalised rows. There is no update before the first network."""
        assert update_tD is None
        stream_tD = self._mix(hidden_tD, self.columns.affine)
        return stream_tD, self.norm(stream_tD)

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        yield from self.norm.rows(at)
        yield from self.columns.rows(at, "input")
