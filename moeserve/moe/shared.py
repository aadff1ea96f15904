"""Shared experts, which compute every token. Every rank holds all of them."""

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
    """One network as wide as all shared experts together."""

    width: int
    is_gated: bool = False  # a gate scales the output of each token (Qwen2-MoE)


class SharedExperts(nn.Module):
    """Computes mlp(x), or sigmoid(gate(x)) * mlp(x)."""

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
