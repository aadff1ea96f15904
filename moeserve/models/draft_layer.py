"""The multi-token prediction (MTP) layer (arXiv 2412.19437, section 2.2), which drafts the token after the next one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moeserve.layers.context import ModelContext
from moeserve.layers.linear import Linear
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rows import At, Row, whole


class DraftInput(nn.Module):
    """The input projection and the norms of an MTP layer around its decoder layer, replicated on every tp rank.

    At each position, the input of the decoder layer is a projection of two vectors: the model's last hidden state at
    this position, and the embedding of the next token. The output passes through a separate norm and the model's LM
    head.
    """

    def __init__(self, hidden_size: int, norm_epsilon: float, context: ModelContext) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(hidden_size, norm_epsilon, context)
        self.hidden_norm = RMSNorm(hidden_size, norm_epsilon, context)
        self.projection = Linear(2 * hidden_size, hidden_size, context)
        self.norm = RMSNorm(hidden_size, norm_epsilon, context)

    def rows(self, at: At, *, shares_norm: bool) -> Iterator[Row]:
        """Yield the rows of its weights.

        Args:
            shares_norm: the norm of the output is that of the decoder.
        """
        yield from self.embedding_norm.rows(at.under("embedding_norm"))
        yield from self.hidden_norm.rows(at.under("hidden_norm"))
        yield from self.projection.rows(at.under("projection"))
        name = "model.norm.weight" if shares_norm else at("norm.weight")
        yield name, whole(self.norm.weight, offset=at.norm_offset)

    def forward(self, embedded_tD: Tensor, hidden_tD: Tensor) -> Tensor:
        """Return the input [t, D] of the decoder layer.

        Args:
            embedded_tD: embeddings of the next tokens.
        """
        return self.projection(torch.cat([self.embedding_norm(embedded_tD), self.hidden_norm(hidden_tD)], dim=-1))
