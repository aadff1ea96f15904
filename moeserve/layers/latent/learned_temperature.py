"""Learned query temperatures, one for each head, that change with the logarithm of the position (Mistral Large 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext


class LearnedTemperature(nn.Module):
    """Multiplies a head's query at position p by weight * ln(1 + p) + bias, with a weight and a bias of the head."""

    def __init__(self, num_heads: int, context: BuildContext) -> None:
        super().__init__()
        self.weight = context.parameter(num_heads, dtype=torch.float32)
        self.bias = context.parameter(num_heads, dtype=torch.float32)

    @property
    def memories(self) -> tuple[tuple[str, Tensor], ...]:
        """The name and the memory of each weight."""
        return ("s", self.weight), ("b", self.bias)

    def forward(self, query_TNH: Tensor, positions_T: Tensor) -> Tensor:
        """Return the scaled queries, computed in float32 and rounded once."""
        # In float64, so that the rounded logarithm does not depend on the place in a vector register.
        log_T = (positions_T.clamp(min=0).double() + 1).log().float()
        factors_TN = log_T[:, None] * self.weight + self.bias
        return (query_TNH.float() * factors_TN[..., None]).to(query_TNH.dtype)
