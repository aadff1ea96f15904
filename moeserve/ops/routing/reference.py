"""The choice of each token's experts, and of copies of experts, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.routing.interface import RouterSpec

# G groups of experts, e experts of a group, W maximum number of copies of an expert

TINY = 1e-20  # avoids a division by zero where all weights are zero


class TorchRouter:
    """A `RouteTokens` in plain torch."""

    def __init__(self, config: RouterSpec) -> None:
        self.config = config

    def __call__(
        self,
        hidden_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        correction_E: Tensor | None,
        given_TK: Tensor | None = None,
        factors_E: Tensor | None = None,
        out_TK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        scores_TE = functional.linear(hidden_TD.float(), weight_ED, bias_E)
        match config.scoring:
            case "softmax":
                scores_TE = scores_TE.softmax(dim=-1)
            case "sigmoid":
                scores_TE = scores_TE.sigmoid()
            case "sqrt_softplus":
                scores_TE = functional.softplus(scores_TE).sqrt()
        ranked_TE = scores_TE if correction_E is None else scores_TE + correction_E
        if config.num_groups > 1:
            ranked_TE = self._keep_best_groups(ranked_TE)
        experts_TK = ranked_TE.topk(config.top_k, dim=-1).indices if given_TK is None else given_TK
        if out_TK is not None:
            experts_TK = out_TK.copy_(experts_TK)
        weights_TK = scores_TE.gather(-1, experts_TK)
        if config.scoring == "softmax_of_chosen":
            weights_TK = weights_TK.softmax(dim=-1)
        if config.scoring == "sigmoid_of_chosen":
            weights_TK = weights_TK.sigmoid()
        if config.scoring == "sparse_mixer":
            weights_TK = self._softmaxes_in_turn(scores_TE, experts_TK)
        if config.is_normalized:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + TINY)
        weights_TK = weights_TK * config.scale
        return experts_TK, weights_TK if factors_E is None else weights_TK * factors_E[experts_TK]

    def _softmaxes_in_turn(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """Return [T, K]: each chosen expert's softmax over the experts near it that were not chosen before it."""
        left_TE, weights = logits_TE, []
        for expert_T1 in experts_TK.split(1, dim=-1):
            largest_T1 = logits_TE.gather(-1, expert_T1)
            sizes_TE = logits_TE.abs().clamp(min=largest_T1)
            is_far_TE = (largest_T1 - logits_TE) / sizes_TE > self.config.tolerance
            weights.append(left_TE.masked_fill(is_far_TE, -math.inf).softmax(dim=-1).gather(-1, expert_T1))
            left_TE = left_TE.scatter(-1, expert_T1, -math.inf)
        return torch.cat(weights, dim=-1)

    def _keep_best_groups(self, ranked_TE: Tensor) -> Tensor:
        """Return the scores [T, E], with minus infinity for experts outside the best groups."""
        config = self.config
        groups_TGe = ranked_TE.unflatten(-1, (config.num_groups, -1))
        ratings_TG = groups_TGe.topk(config.experts_rating_group, dim=-1).values.sum(dim=-1)
        best_groups = ratings_TG.topk(config.num_chosen_groups, dim=-1).indices
        is_out_TG = torch.ones_like(ratings_TG, dtype=torch.bool).scatter(-1, best_groups, False)
        return groups_TGe.masked_fill(is_out_TG[..., None], -math.inf).flatten(-2)


def choose_expert_copies(experts_TK: Tensor, copies_EW: Tensor, num_copies_E: Tensor, first_token: int) -> Tensor:
    tokens_T1 = torch.arange(first_token, first_token + len(experts_TK), device=experts_TK.device)[:, None]
    known_TK = experts_TK.clamp(min=0)
    return copies_EW[known_TK, tokens_T1 % num_copies_E[known_TK]].where(experts_TK >= 0, -1)
