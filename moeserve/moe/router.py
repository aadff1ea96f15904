"""Chooses the experts of each token. Knows logical experts only, not where they live."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeserve.layers.linear import parameter

# T tokens, D model width, E experts, K experts per token


@dataclass(frozen=True)
class Routing:
    """The experts of each token and what each one's output is multiplied by."""

    experts_TK: Tensor  # int64
    weights_TK: Tensor  # float32


class SoftmaxRouter(nn.Module):
    """Softmax over all experts, the top k kept and scaled to sum to one (Mixtral, arXiv 2401.04088)."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter(num_experts, hidden_size, dtype=dtype, device=device)
        self.top_k = top_k

    def forward(self, hidden_TD: Tensor) -> Routing:
        logits_TE = functional.linear(hidden_TD, self.weight)
        probabilities_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        weights_TK, experts_TK = torch.topk(probabilities_TE, self.top_k, dim=-1)
        return Routing(experts_TK, weights_TK / weights_TK.sum(dim=-1, keepdim=True))
