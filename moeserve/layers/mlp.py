"""The feed-forward network that every token passes: of dense layers, and of shared experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeserve.layers.linear import Linear
from moeserve.layers.weights import Weights
from moeserve.ops.activation import SwiGLU

# T tokens, D model width


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)). With a share of the width, outputs are to be summed over the shares."""

    def __init__(self, hidden_size: int, width: slice, *, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            width: which of the network's inner values are here.
        """
        super().__init__()
        self.width = width
        num_inner, cuts = width.stop - width.start, [width.start]
        self.gate_up = Weights(
            1, 2 * num_inner, hidden_size, activation=SwiGLU(), cuts=cuts, dtype=dtype, device=device
        )
        self.down = Linear(num_inner, hidden_size, cuts=cuts, dtype=dtype, device=device)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return self.down(self.gate_up.product.multiply(hidden_TD))
