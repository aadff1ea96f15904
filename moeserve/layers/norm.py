"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeserve.layers.weights import parameter
from moeserve.ops.norm import choose_rms_norm


class RMSNorm(nn.Module):
    """Scales each row to unit mean square, then by a learned weight per column."""

    def __init__(self, hidden_size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(hidden_size, dtype=dtype, device=device)
        self.epsilon = epsilon
        self.rms_norm = choose_rms_norm(device.type)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return self.rms_norm(hidden_TD, self.weight, self.epsilon)
