"""A module for multi-token prediction (MTP; arXiv 2412.19437, section 2.2), which drafts a token after the next one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moeserve.layers.linear import Embedding, Linear, OutputHead
from moeserve.layers.network import Build
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rows import At, Row, some_rows, whole
from moeserve.models.model_config import DraftSpec

# X: width of all residual streams, concatenated


class DraftModule(nn.Module):
    """The parts of an MTP module around its decoder layer, replicated on every tp rank.

    At each position, the input of the decoder layer is a projection of two vectors. One is the hidden state at this
    position, of the model or of the module before. The other is the embedding of a later token: the next token for the
    first module, the token after the next for the second, and so on. If there are several residual streams, each is
    projected. The output passes through a separate norm and an LM head.
    """

    def __init__(self, config: DraftSpec, build: Build, embedding: Embedding | None, head: OutputHead | None) -> None:
        """
        Args:
            embedding: the module's own embedding; None: the module uses the model's.
            head: the module's own LM head; None: the module uses the model's.
        """
        super().__init__()
        self.config = config
        size, epsilon, context = build.hidden_size, build.norm_epsilon, build.context
        self.embedding_norm = RMSNorm(size, epsilon, context)
        self.hidden_norm = RMSNorm(size, epsilon, context)
        self.projection = Linear(2 * size, size, context)
        self.last = config.stream.last(build)
        self.embedding = embedding
        self.head = head

    def rows(self, at: At) -> Iterator[Row]:
        """Yield this module's rows of the weight mapping."""
        yield from self.embedding_norm.rows(at.under("embedding_norm"))
        yield from self.hidden_norm.rows(at.under("hidden_norm"))
        if at.has("embedding_projection.weight"):
            weight_OI, size = self.projection.weight, self.projection.weight.shape[0]
            yield at("embedding_projection.weight"), whole(weight_OI[:, :size], self.projection.weights)
            yield at("hidden_projection.weight"), whole(weight_OI[:, size:], self.projection.weights)
        else:
            yield from self.projection.rows(at.under("projection"))
        if self.embedding is not None:
            name, embedding = at("embedding.weight"), self.embedding
            yield name, some_rows(embedding.weight, embedding.share, at.stored[name][0])
        if self.head is not None:
            name, head = at("head.weight"), self.head
            yield name, some_rows(head.weight, head.share, at.stored[name][0], head.weights)
        yield from self.last.rows(At("model", at.stored, at.norm_offset) if self.config.shares_norm else at, "norm", "")

    def forward(self, embedded_tD: Tensor, hidden_tX: Tensor) -> Tensor:
        """Return the input [t, X] of the decoder layer.

        Args:
            embedded_tD: embeddings of the later tokens; see the class.
            hidden_tX: hidden states of the model, or of the module before.
        """
        num_tokens, size = embedded_tD.shape
        width = self.config.stream.width
        embedded = self.embedding_norm(embedded_tD).repeat_interleave(width, dim=0)
        hidden = self.hidden_norm(hidden_tX.view(num_tokens * width, size))
        return self.projection(torch.cat([embedded, hidden], dim=-1)).view(num_tokens, width * size)
