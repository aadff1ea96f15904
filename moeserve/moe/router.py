"""Chooses the experts of each token. Knows logical experts only, not where they live."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeserve.layers.weights import parameter

# T tokens, D model width, E experts, K experts per token, G groups of experts

TINY = 1e-20  # keeps weights that are all zero from being divided by zero


@dataclass(frozen=True)
class Routing:
    """The experts of each token and what each one's output is multiplied by."""

    experts_TK: Tensor  # int64
    weights_TK: Tensor  # float32


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How logits become experts and weights.

    Logits become scores; the best experts are chosen by their scores (and corrections); their weights are the scores.
    """

    num_experts: int
    top_k: int
    # softmax over all experts, each expert's own sigmoid, or softmax over the chosen experts only
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    # The experts stand in groups of equal size, and only those of the best groups can be chosen (arXiv 2405.04434). A
    # group is as good as its best expert, or as its best two together.
    num_groups: int = 1
    num_chosen_groups: int = 1
    experts_rating_group: Literal[1, 2] = 1
    is_normalized: bool = False  # weights are divided by their sum
    scale: float = 1.0  # what weights are multiplied with in the end
    has_bias: bool = False  # of the logits
    has_correction: bool = False  # a learned number per expert that counts for the choice alone (arXiv 2412.19437)


class Router(nn.Module):
    """Computes in float32, whatever the model's dtype: choosing experts is the one step where rounding can jump."""

    def __init__(self, config: RouterConfig, hidden_size: int, *, device: torch.device) -> None:
        super().__init__()
        self.config = config
        num_experts, dtype = config.num_experts, torch.float32
        self.weight = parameter(num_experts, hidden_size, dtype=dtype, device=device)
        self.bias = parameter(num_experts, dtype=dtype, device=device) if config.has_bias else None
        self.correction = parameter(num_experts, dtype=dtype, device=device) if config.has_correction else None

    def forward(self, hidden_TD: Tensor) -> Routing:
        config = self.config
        scores_TE = functional.linear(hidden_TD.float(), self.weight, self.bias)
        match config.scoring:
            case "softmax":
                scores_TE = scores_TE.softmax(dim=-1)
            case "sigmoid":
                scores_TE = scores_TE.sigmoid()
        ranked_TE = scores_TE if self.correction is None else scores_TE + self.correction
        if config.num_groups > 1:
            ranked_TE = self._keep_best_groups(ranked_TE)
        experts_TK = ranked_TE.topk(config.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(-1, experts_TK)
        if config.scoring == "softmax_of_chosen":
            weights_TK = weights_TK.softmax(dim=-1)
        if config.is_normalized:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + TINY)
        return Routing(experts_TK, weights_TK * config.scale)

    def _keep_best_groups(self, ranked_TE: Tensor) -> Tensor:
        """The same ranks, with those of the experts that cannot be chosen at minus infinity."""
        config = self.config
        groups_TGe = ranked_TE.unflatten(-1, (config.num_groups, -1))
        ratings_TG = groups_TGe.topk(config.experts_rating_group, dim=-1).values.sum(dim=-1)
        best_groups = ratings_TG.topk(config.num_chosen_groups, dim=-1).indices
        is_out_TG = torch.ones_like(ratings_TG, dtype=torch.bool).scatter(-1, best_groups, False)
        return groups_TGe.masked_fill(is_out_TG[..., None], -math.inf).flatten(-2)
