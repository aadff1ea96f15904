"""A residual stream that begins anew before each network: the network's output is added to its normalised input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moeserve.config.needs import Needs
from moeserve.layers.network import Build
from moeserve.layers.norm import RowsForm
from moeserve.layers.streams.residual import PlaceSpec, PlainStream, Residual


@dataclass(frozen=True)
class NormedStream(PlainStream):
    """A stream of one row for each token (MiniMax-01)."""

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="outputs that are added to normalised rows")

    def place(self, build: Build, form: RowsForm, spec: PlaceSpec) -> NormedResidual:
        assert spec.entry_norm is None
        assert spec.has_norm
        assert not spec.is_normed
        assert not spec.is_scaled
        return NormedResidual(self.norm(build, "plain"), None, build)


class NormedResidual(Residual):
    """The place of a network that reads the stream to which its output is added."""

    def enter(self, stream_tD: Tensor, update_tD: Tensor | None) -> tuple[Tensor, Any]:
        _, normed_tD = self.norm.after_adding(update_tD, stream_tD)
        return normed_tD, normed_tD
