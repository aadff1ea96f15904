"""The choice of each token's experts as one operation: logits, scores, the best, and their weights, all in float32."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops import backend
from moeserve.ops.native import NATIVE_DTYPES, require_native

# T tokens, D model width, E experts, K experts per token, G groups of experts

TINY = 1e-20  # keeps weights that are all zero from being divided by zero


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


class RoutingKernel(Protocol):
    """Chooses each token's experts.

    Of experts that are equally good, and of groups, the kernels take the lowest index first; the reference takes what
    torch's topk gives, which may be any.

    Args:
        hidden_TD: any floating type.
        weight_ED: of the logits, like `bias_E`; these and the corrections are float32.

    Returns:
        Experts [T, K] int64, best first, and their weights [T, K] float32.
    """

    def __call__(
        self, hidden_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, correction_E: Tensor | None, /
    ) -> tuple[Tensor, Tensor]: ...


def choose_routing(device: str, config: RouterConfig) -> RoutingKernel:
    """The implementation for a device type."""
    reference = TorchRouting(config)
    match backend.of(device):
        case "native":
            return CpuRouting(require_native(), reference)
        case "triton":
            from moeserve.ops.gpu import route_in_float32

            return functools.partial(route_in_float32, config)
        case "torch":
            return reference


class TorchRouting:
    """The reference, on any device."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config

    def __call__(
        self, hidden_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, correction_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        scores_TE = functional.linear(hidden_TD.float(), weight_ED, bias_E)
        match config.scoring:
            case "softmax":
                scores_TE = scores_TE.softmax(dim=-1)
            case "sigmoid":
                scores_TE = scores_TE.sigmoid()
        ranked_TE = scores_TE if correction_E is None else scores_TE + correction_E
        if config.num_groups > 1:
            ranked_TE = self._keep_best_groups(ranked_TE)
        experts_TK = ranked_TE.topk(config.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(-1, experts_TK)
        if config.scoring == "softmax_of_chosen":
            weights_TK = weights_TK.softmax(dim=-1)
        if config.is_normalized:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + TINY)
        return experts_TK, weights_TK * config.scale

    def _keep_best_groups(self, ranked_TE: Tensor) -> Tensor:
        """The same ranks, with those of the experts that cannot be chosen at minus infinity."""
        config = self.config
        groups_TGe = ranked_TE.unflatten(-1, (config.num_groups, -1))
        ratings_TG = groups_TGe.topk(config.experts_rating_group, dim=-1).values.sum(dim=-1)
        best_groups = ratings_TG.topk(config.num_chosen_groups, dim=-1).indices
        is_out_TG = torch.ones_like(ratings_TG, dtype=torch.bool).scatter(-1, best_groups, False)
        return groups_TGe.masked_fill(is_out_TG[..., None], -math.inf).flatten(-2)


class CpuRouting:
    """One C++ call; the reference for float16."""

    def __init__(self, kernels: ModuleType, reference: TorchRouting) -> None:
        config = reference.config
        self.kernels = kernels
        self.reference = reference
        self.top_k = config.top_k
        self.rules = kernel_rules(config)

    def __call__(
        self, hidden_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, correction_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if hidden_TD.dtype not in NATIVE_DTYPES:
            return self.reference(hidden_TD, weight_ED, bias_E, correction_E)
        num_tokens = hidden_TD.shape[0]
        experts_TK = torch.empty(num_tokens, self.top_k, dtype=torch.int64)
        weights_TK = torch.empty(num_tokens, self.top_k, dtype=torch.float32)
        self.kernels.route(hidden_TD, weight_ED, bias_E, correction_E, experts_TK, weights_TK, **self.rules)
        return experts_TK, weights_TK


def kernel_rules(config: RouterConfig) -> dict[str, Any]:
    """What kernels are told besides how many experts are chosen."""
    return dict(
        scoring=config.scoring,
        num_groups=config.num_groups,
        num_chosen_groups=config.num_chosen_groups,
        experts_rating_group=config.experts_rating_group,
        is_normalized=config.is_normalized,
        scale=config.scale,
    )
