"""Activations between two products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Activation(Protocol):
    """A dataclass that is a function of gates and ups of one shape, or only of ups; see `num_parts_of`."""

    kernel_name: ClassVar[str]  # the activation's name in kernels; other fields are further arguments of kernels

    def __call__(self, *parts: Any, **options: Any) -> Tensor: ...


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up (arXiv 2002.05202)."""

    kernel_name: ClassVar[str] = "swiglu"

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within ± `limit` (gpt-oss)."""

    kernel_name: ClassVar[str] = "clamped_swiglu"
    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + 1)


@dataclass(frozen=True)
class LimitedSwiGLU:
    """min(silu(gate), limit) * up, with up within ± `limit` (Step-3.7)."""

    kernel_name: ClassVar[str] = "limited_swiglu"
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class CutSwiGLU:
    """silu(gate) * up, with gate at most `limit` and up within ± `limit` (DeepSeek-V4)."""

    kernel_name: ClassVar[str] = "cut_swiglu"
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class GeGLU:
    """gelu(gate) * up (arXiv 2002.05202), with the approximation of gelu by tanh (Gemma 4)."""

    kernel_name: ClassVar[str] = "geglu"

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True)
class CappedSwiGLU:
    """cap(gate, alpha) * sigmoid(gate) * cap(up, limit), where cap(x, c) is c * tanh(x / c) (Inkling 2)."""

    kernel_name: ClassVar[str] = "capped_swiglu"
    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        capped = self.alpha * torch.tanh(gate / self.alpha)
        return capped * torch.sigmoid(gate) * (self.limit * torch.tanh(up / self.limit))


@dataclass(frozen=True)
class SquaredReLU:
    """max(up, 0) ** 2, without a gate (arXiv 2109.08668)."""

    kernel_name: ClassVar[str] = "squared_relu"

    def __call__(self, up: Tensor) -> Tensor:
        return functional.relu(up).square()


def num_parts_of(activation: Activation | None) -> int:
    """Return the number of parts of the outputs that an activation combines: two (gates and ups), or one."""
    return 1 if activation is None or isinstance(activation, SquaredReLU) else 2


def kernel_arguments(activation: Activation | None) -> dict[str, Any]:
    """Return an activation as keyword arguments of kernels."""
    return {} if activation is None else {"activation": activation.kernel_name, **vars(activation)}
