"""A residual stream on which a network may read the update of the network before it instead of the stream (Inkling)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moeserve.layers.network import Build
from moeserve.layers.norm import NoNorm, RowsForm
from moeserve.layers.streams.residual import PlainStream, Residual


@dataclass(frozen=True)
class ChainedStream(PlainStream):
    """One row for each token. A network without a norm reads the update before it, and replaces it by its own."""

    def place(
        self,
        build: Build,
        form: RowsForm,
        entry_norm: nn.Module | None,
        *,
        has_norm: bool,
        is_normed: bool,
        is_scaled: bool,
    ) -> Residual:
        if has_norm:
            return super().place(build, form, entry_norm, has_norm=True, is_normed=is_normed, is_scaled=is_scaled)
        assert entry_norm is None
        assert not is_normed
        assert not is_scaled
        return Chained(NoNorm(build.context), None, build)


class Chained(Residual):
    """The place of a network that reads the update of the one before it."""

    def enter(self, stream_tD: Tensor, update_tD: Tensor | None) -> tuple[Tensor, Any]:
        assert update_tD is not None
        return stream_tD, update_tD
