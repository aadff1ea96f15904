"""Shared experts: the part of a mixture-of-experts layer that every token passes. Every rank has a copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.layers.linear import Linear
from moeserve.layers.mlp import GatedMLP
from moeserve.ops.gating import choose_gating

# T tokens, D model width


@dataclass(frozen=True, kw_only=True)
class SharedExpertsConfig:
    """Several shared experts are one network, as wide as all of them together."""

    width: int
    is_gated: bool = False  # each token decides how much of the output it takes (Qwen2-MoE)


class SharedExperts(nn.Module):
    """mlp(x), or sigmoid(gate(x)) * mlp(x)"""

    def __init__(
        self, config: SharedExpertsConfig, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.mlp = GatedMLP(hidden_size, slice(0, config.width), dtype=dtype, device=device)
        self.gate = Linear(hidden_size, 1, dtype=dtype, device=device) if config.is_gated else None
        self.scale = choose_gating(device.type)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        output_TD = self.mlp(hidden_TD)
        return output_TD if self.gate is None else self.scale(self.gate(hidden_TD), output_TD)
