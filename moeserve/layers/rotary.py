"""Rotary position embedding: the angles of a step, computed once, and the rotation of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# T tokens, N heads, H head size, F rotated pairs (H / 2)


@dataclass(frozen=True)
class RotaryConfig:
    """Which frequencies turn the pairs of a head. The scalings are those of published checkpoints.

    `linear` divides every frequency by `factor` (position interpolation, arXiv 2306.15595). `llama3` divides only the
    slow ones, whose wavelength exceeds original_max_position_embeddings / low_freq_factor, keeps the fast ones, and
    blends in between (Llama 3.1 release).
    """

    head_dim: int
    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def frequencies(self) -> Tensor:
        """Radians per position of each pair, [F] float32."""
        exponents_F = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequencies_F = 1.0 / self.theta**exponents_F
        match self.scaling:
            case "default":
                return frequencies_F
            case "linear":
                return frequencies_F / self.factor
            case "llama3":
                turns_F = self.original_max_position_embeddings * frequencies_F / (2 * math.pi)
                keep_F = (turns_F - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
                keep_F = keep_F.clamp(0.0, 1.0)
                return keep_F * frequencies_F + (1 - keep_F) * frequencies_F / self.factor


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of one step's positions, shared by all layers. [T, 1, F] float32 each."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def at(cls, positions_T: Tensor, frequencies_F: Tensor) -> Rotation:
        angles_T1F = (positions_T.to(torch.float32)[:, None] * frequencies_F)[:, None, :]
        return cls(angles_T1F.cos(), angles_T1F.sin())

    def apply(self, heads_TNH: Tensor) -> Tensor:
        """Turns the pairs (h, h + H/2) of each head, in float32. Returns the dtype it was given."""
        first_TNF, second_TNF = heads_TNH.float().chunk(2, dim=-1)
        turned = (
            first_TNF * self.cosines - second_TNF * self.sines,
            second_TNF * self.cosines + first_TNF * self.sines,
        )
        return torch.cat(turned, dim=-1).to(heads_TNH.dtype)
