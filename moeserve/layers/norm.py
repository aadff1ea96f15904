"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeserve.layers.weights import parameter
from moeserve.ops.norm import choose_add_rms_norm, choose_rms_norm, choose_rms_norm_in_place


class RMSNorm(nn.Module):
    """Scales each row to unit mean square, then by a learned weight per column."""

    def __init__(self, hidden_size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(hidden_size, dtype=dtype, device=device)
        self.epsilon = epsilon
        self.rms_norm = choose_rms_norm(device.type)
        self.rms_norm_in_place = choose_rms_norm_in_place(device.type)
        self.add_rms_norm = choose_add_rms_norm(device.type)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return self.rms_norm(hidden_TD, self.weight, self.epsilon)

    def in_place(self, hidden_TD: Tensor) -> None:
        """Normalises hidden states where they are, which may be a view of something wider."""
        self.rms_norm_in_place(hidden_TD, self.weight, self.epsilon)

    def after_adding(self, update_TD: Tensor | None, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states with the update, if there is one; and the same normalised."""
        if update_TD is None:
            return hidden_TD, self(hidden_TD)
        return self.add_rms_norm(hidden_TD, update_TD, self.weight, self.epsilon)
