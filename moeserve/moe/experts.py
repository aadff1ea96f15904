"""The expert networks of this rank and their weights. Knows neither tokens nor routing weights nor ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeserve.layers.linear import parameter
from moeserve.moe.dispatch.base import PackedTokens, SlottedTokens
from moeserve.ops.activation import GatedActivation
from moeserve.ops.experts import ExpertWeights, choose_experts, choose_slotted_experts

# R rows, S slots of each expert, D model width, I expert width, e local experts


class Experts(nn.Module):
    """Gated feed-forward networks side by side: down(activation(gate(x), up(x))), each on its own rows.

    `num_experts` are those of this rank, copies included; there may be none.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_width: int,
        activation: GatedActivation,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate_up = parameter(num_experts, 2 * expert_width, hidden_size, dtype=dtype, device=device)
        self.down = parameter(num_experts, hidden_size, expert_width, dtype=dtype, device=device)
        self.gate_up_bias = parameter(num_experts, 2 * expert_width, dtype=dtype, device=device) if has_bias else None
        self.down_bias = parameter(num_experts, hidden_size, dtype=dtype, device=device) if has_bias else None
        self.weights = ExpertWeights(self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        self.kernel = choose_experts(device.type, activation)
        self.slotted_kernel = choose_slotted_experts(device.type, activation)

    def forward(self, tokens: PackedTokens | SlottedTokens) -> Tensor:
        """Outputs in the layout of the tokens: [R, D], or [e, S, D]."""
        match tokens:
            case PackedTokens():
                return self.kernel(tokens.rows_RD, tokens.counts_e, self.weights)
            case SlottedTokens():
                return self.slotted_kernel(tokens.slots_eSD, tokens.counts_e, self.weights)
