"""A norm whose rows are multiplied by gates that are computed from the rows (A.X K2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from moeserve.layers.linear import Linear
from moeserve.layers.network import Build
from moeserve.layers.norm import RMSNorm, RowsForm
from moeserve.layers.rows import At, Row
from moeserve.ops import rows


@dataclass(frozen=True)
class GatedNormSpec:
    """The shape of a gated norm."""

    rank: int  # size of the rows from which gates are projected

    def build(self, build: Build, form: RowsForm) -> GatedNorm:
        """Return the norm, whose rows are plain whatever `form` is: networks quantise plain rows themselves."""
        return GatedNorm(self, build)


class GatedNorm(nn.Module):
    """norm(x) * sigmoid(up(silu(down(norm(x)))))"""

    def __init__(self, config: GatedNormSpec, build: Build) -> None:
        super().__init__()
        self.norm = RMSNorm(build.hidden_size, build.norm_epsilon, build.context)
        self.down = Linear(build.hidden_size, config.rank, build.context)
        self.up = Linear(config.rank, build.hidden_size, build.context)
        self._gate = rows.make(build.context.backend).gate_rows

    def after_adding(self, update_tD: Tensor | None, hidden_tD: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden + update (hidden alone if update is None), and that sum normalised and gated."""
        sum_tD, normed_tD = self.norm.after_adding(update_tD, hidden_tD)
        inner_tR = self.down(normed_tD)
        return sum_tD, self._gate(self.up(self._gate(inner_tR, inner_tR)), normed_tD)

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        yield from self.norm.rows(at)
        yield from self.down.rows(at.under("gate_down"))
        yield from self.up.rows(at.under("gate_up"))
