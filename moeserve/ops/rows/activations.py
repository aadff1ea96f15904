"""Activations between two products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Activation = Callable[..., Tensor]  # called with gates and ups of one shape, or only with ups; see `num_parts_of`


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up (arXiv 2002.05202)."""

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


@dataclass(frozen=True)
class LimitedSwiGLU:
    """min(silu(gate), limit) * up, with up within ± `limit` (Step-3.7)."""

    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class CutSwiGLU:
    """silu(gate) * up, with gate at most `limit` and up within ± `limit` (DeepSeek-V4)."""

    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class GeGLU:
    """gelu(gate) * up (arXiv 2002.05202), with the approximation of gelu by tanh (Gemma 4)."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True)
class SquaredReLU:
    """max(up, 0) ** 2, without a gate (arXiv 2109.08668)."""

    def __call__(self, up: Tensor) -> Tensor:
        return functional.relu(up).square()


def num_parts_of(activation: Activation | None) -> int:
    """Return the number of parts of the outputs that an activation combines: two (gates and ups), or one."""
    return 1 if activation is None or isinstance(activation, SquaredReLU) else 2
