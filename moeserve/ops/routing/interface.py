"""The choice of each token's experts: its rule, and the operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

# W maximum number of copies of an expert


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """The rule by which a router computes experts and weights from logits.

    Scores are computed from logits. The experts with the highest score plus correction are chosen, and their scores are
    their weights.
    """

    num_experts: int
    top_k: int
    # Scores are the softmax over all experts, the sigmoid of each logit, the square root of the softplus of each logit,
    # or the logits. In the last case, weights are computed from the chosen experts' logits: the softmax, the sigmoids,
    # or for each expert the softmax over itself and the experts near it that were not chosen before it.
    scoring: Literal[
        "softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen", "sigmoid_of_chosen", "sparse_mixer"
    ] = "softmax"
    # For "sparse_mixer" (arXiv 2409.12136): an expert with logit a is near a better expert with logit b if b - a is at
    # most this fraction of max(b, |a|).
    tolerance: float = 0.0
    # Experts form groups of equal size, and only experts of the best groups can be chosen (arXiv 2405.04434). A group
    # is rated by the sum of the scores of its best one or two experts.
    num_groups: int = 1
    num_chosen_groups: int = 1
    experts_rating_group: Literal[1, 2] = 1
    is_normalized: bool = False  # divide the weights by their sum
    scale: float = 1.0  # multiply the weights by this number at the end
    has_bias: bool = False  # add a bias to the logits
    has_correction: bool = False  # a learned number per expert that affects only the choice (arXiv 2412.19437)
    # Number of rows of a table that gives the experts of each token id; scores then only determine weights
    # (DeepSeek-V4). None: experts are chosen by score.
    table_size: int | None = None
    num_zero_experts: int = 0  # number of further experts, numbered after all others, which return their input
    has_factors: bool = False  # a learned number per expert that multiplies its weight at the end (Gemma 4)

    @property
    def kernel_arguments(self) -> dict[str, Any]:
        """The rule as keyword arguments of kernels, without `top_k`."""
        return dict(
            scoring=self.scoring,
            num_groups=self.num_groups,
            num_chosen_groups=self.num_chosen_groups,
            experts_rating_group=self.experts_rating_group,
            is_normalized=self.is_normalized,
            scale=self.scale,
        )


class RouteTokens(Protocol):
    """Choose each token's experts, in float32.

    The kernels break ties between experts and between groups by the lowest index; the reference breaks them as
    torch.topk does, which is unspecified.

    Args:
        hidden_TD: any floating dtype.
        weight_ED: float32, like bias_E and correction_E.
        given_TK: the experts of each token, int64, if logits only determine weights.
        factors_E: float32; multiply the weights of the experts.
        out_TK: int64, contiguous: memory in which the experts are returned. On CPUs only.

    Returns:
        Experts [T, K] int64, best first, and their weights [T, K] float32.
    """

    def __call__(
        self,
        hidden_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        correction_E: Tensor | None,
        given_TK: Tensor | None = None,
        factors_E: Tensor | None = None,
        out_TK: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Tensor]: ...


# (experts_TK, copies_EW, num_copies_E, first_token) -> the physical expert of each choice [T, K], int64: token t gets
# copy (first_token + t) % num_copies_E[e] of expert e. Expert -1 is padding and stays -1.
ChooseCopies = Callable[[Tensor, Tensor, Tensor, int], Tensor]
