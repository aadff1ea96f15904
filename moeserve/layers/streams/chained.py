"""A residual stream on which a network may read the update of the network before it instead of the stream (Inkling)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moeserve.layers.network import Build
from moeserve.layers.norm import NoNorm, RowsForm
from moeserve.layers.streams.residual import PlaceSpec, PlainStream, Residual


@dataclass(frozen=True)
class ChainedStream(PlainStream):
    """A stream of one row for each token.

    A network without a norm reads the previous network's update, and replaces that update by its own.
    """

    def place(self, build: Build, form: RowsForm, spec: PlaceSpec) -> Residual:
        if spec.has_norm:
            return super().place(build, form, spec)
        assert spec.entry_norm is None
        assert not spec.is_normed
        assert not spec.is_scaled
        return Chained(NoNorm(build.context), None, build)


class Chained(Residual):
    """The place of a network whose input is the output of the network before it, not the stream."""

    def enter(self, stream_tD: Tensor, update_tD: Tensor | None) -> tuple[Tensor, Any]:
        assert update_tD is not None
        return stream_tD, update_tD
