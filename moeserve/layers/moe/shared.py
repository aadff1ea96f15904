"""Shared experts, which compute every token. Every rank holds all shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import InputShare
from moeserve.layers.dense.mlp import MLP
from moeserve.layers.linear import Linear
from moeserve.layers.rows import At, Row
from moeserve.ops import rows
from moeserve.ops.rows.activations import Activation, SwiGLU
from moeserve.ops.rows.interface import Rows, plain_rows


@dataclass(frozen=True, kw_only=True)
class SharedExpertsSpec:
    """The shape of shared experts: one network as wide as all of them together."""

    width: int
    activation: Activation = SwiGLU()
    is_gated: bool = False  # a gate scales the output of each token (Qwen2-MoE)


class SharedExperts(nn.Module):
    """Computes mlp(x), or sigmoid(gate(x)) * mlp(x)."""

    def __init__(self, config: SharedExpertsSpec, hidden_size: int, context: BuildContext) -> None:
        super().__init__()
        self.mlp = MLP(hidden_size, InputShare(slice(0, config.width), None), context, config.activation)
        self.gate = Linear(hidden_size, 1, context) if config.is_gated else None
        self.scale = rows.make(context.backend).gate_rows

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module.

        Args:
            at: the place of the layer's experts.
        """
        yield from self.mlp.rows(at.under("shared_experts"), self.mlp.width.stop)
        if self.gate is not None:
            yield from self.gate.rows(at.under("shared_expert_gate"))

    def forward(self, hidden_TD: Rows) -> Tensor:
        output_TD = self.mlp(hidden_TD)
        return output_TD if self.gate is None else self.scale(self.gate(plain_rows(hidden_TD)), output_TD)
