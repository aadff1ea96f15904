"""The layer for multi-token prediction (arXiv 2412.19437, section 2.2): guesses the token after the next one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeserve.layers.context import ModelContext
from moeserve.layers.linear import Linear
from moeserve.layers.norm import RMSNorm

# t this tp rank's share of a step's tokens, D model width


class DraftInput(nn.Module):
    """The part of a draft layer before and after its decoder layer, whole on every tp rank.

    The decoder layer reads, at the position of each token, a projection of the model's last hidden state there and of
    the embedding of the next token. Its output, after a norm of its own, goes through the model's head.
    """

    def __init__(self, hidden_size: int, norm_epsilon: float, context: ModelContext) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(hidden_size, norm_epsilon, context)
        self.hidden_norm = RMSNorm(hidden_size, norm_epsilon, context)
        self.projection = Linear(2 * hidden_size, hidden_size, context)
        self.norm = RMSNorm(hidden_size, norm_epsilon, context)

    def forward(self, embedded_tD: Tensor, hidden_tD: Tensor) -> Tensor:
        """Return the input [t, D] of the decoder layer.

        Args:
            embedded_tD: of the next tokens.
        """
        return self.projection(torch.cat([self.embedding_norm(embedded_tD), self.hidden_norm(hidden_tD)], dim=-1))
