"""A feed-forward network without experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import share_inputs
from moeserve.layers.dense.mlp import MLP
from moeserve.layers.network import Build, FeedForwardSpec, NetworkPart, OverTP, Run
from moeserve.layers.norm import RowsForm
from moeserve.layers.rows import At, Row
from moeserve.ops.rows.activations import Activation, SwiGLU
from moeserve.ops.rows.interface import Rows


@dataclass(frozen=True, kw_only=True)
class DenseSpec(FeedForwardSpec):
    """The shape of a dense network."""

    has_dense = True

    width: int
    activation: Activation = SwiGLU()

    def build(self, build: Build) -> DenseNetwork:
        return DenseNetwork(self, build.hidden_size, build.num_chunks, build.context)


class DenseNetwork(OverTP):
    """A feed-forward network. Each tp rank has a share of its width."""

    def __init__(self, config: DenseSpec, hidden_size: int, num_chunks: int, context: BuildContext) -> None:
        super().__init__(context)
        self.config = config
        self.mlp = MLP(hidden_size, share_inputs(config.width, num_chunks, context), context, config.activation)

    @property
    def gathered_form(self) -> RowsForm:
        return "float8" if self.mlp.gate_up.is_in_blocks else "plain"

    def parts(self) -> Iterator[NetworkPart]:
        yield NetworkPart("dense networks", self)

    def rows(self, at: At) -> Iterator[Row]:
        return self.mlp.rows(at, self.config.width)

    def partial_sum(self, rows: Rows, run: Run, cache: Any) -> Tensor:
        output_TD: Tensor = self.mlp(rows)
        return output_TD
