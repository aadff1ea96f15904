"""The activations of gated feed-forward networks: two halves in, one out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GatedActivation = Callable[[Tensor, Tensor], Tensor]  # (gate, up) -> the product, all of one shape


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up (arXiv 2002.05202)"""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within ± `limit` (gpt-oss)."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + 1)
