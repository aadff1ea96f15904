"""A residual stream on which a network reads the same normalised rows as the network before it (Cohere)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.layers.network import Build
from moeserve.layers.norm import NoNorm, RowsForm
from moeserve.layers.rows import At, Row
from moeserve.layers.streams.residual import Place, PlaceSpec, PlainStream
from moeserve.ops import rows


@dataclass(frozen=True)
class Forked:
    """The stream, and the rows that the last network with a norm has read."""

    stream_tD: Tensor
    rows_tD: Any = None


@dataclass(frozen=True)
class ParallelStream:
    """A stream of one row for each token.

    A network without a norm reads the rows of the network before it, in plain form.
    """

    plain: PlainStream  # the stream that has the same norms
    width: int = 1

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="networks that read the same rows")

    def place(self, build: Build, form: RowsForm, spec: PlaceSpec) -> Fork:
        assert spec.entry_norm is None
        assert not spec.is_normed
        assert not spec.is_scaled
        return Fork(self.plain.norm(build, "plain"), build) if spec.has_norm else Join(NoNorm(build.context), build)

    def last(self, build: Build) -> Fork:
        return Fork(self.plain.norm(build, "plain"), build)

    def start(self, hidden_tD: Tensor) -> Forked:
        return Forked(hidden_tD)


class Fork(Place):
    """The place of a network whose rows the next network may read too."""

    def __init__(self, norm: nn.Module, build: Build) -> None:
        super().__init__()
        self.norm = norm
        self._add = rows.make(build.context.backend).add

    def enter(self, stream: Forked, update_tD: Tensor | None) -> tuple[Forked, Any]:
        stream_tD, rows_tD = self.norm.after_adding(update_tD, stream.stream_tD)
        return Forked(stream_tD, rows_tD), rows_tD

    def leave(self, stream: Forked, update_tD: Tensor) -> tuple[Forked, Tensor]:
        return stream, update_tD

    def close(self, stream: Forked, update_tD: Tensor | None) -> Tensor:
        return stream.stream_tD if update_tD is None else self._add(stream.stream_tD, update_tD)

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from self.norm.rows(at.under(norm_name))


class Join(Fork):
    """The place of a network that reads the same normalised rows as the network before it."""

    def enter(self, stream: Forked, update_tD: Tensor | None) -> tuple[Forked, Any]:
        stream_tD, _ = self.norm.after_adding(update_tD, stream.stream_tD)
        return Forked(stream_tD), stream.rows_tD
