"""What all dispatchers do with pairs of a token and one of its experts: choose the copy, sort, and sum up.

Pair p = t * K + k is token t and its k-th expert. Knows nothing of ranks and groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.moe.placement import Placement

# T tokens, D model width, K experts per token, P pairs = T * K, R pairs that are not padding, E logical experts,
# C copies of an expert at most


class Replicas:
    """Which physical expert a token goes to: copies of an expert take turns, from one token of the step to the next."""

    def __init__(self, placement: Placement, device: torch.device) -> None:
        copies = placement.physical_of_logical
        self.is_identity = placement.logical_of_physical == tuple(range(placement.num_logical))
        width = max(map(len, copies))
        table = [[of_one[turn % len(of_one)] for turn in range(width)] for of_one in copies]
        # The last row is the one that -1 finds: padding stays padding.
        self.physical_EC = torch.tensor([*table, [-1] * width], device=device)
        self.num_copies_E = torch.tensor([*map(len, copies), 1], device=device)

    def choose(self, experts_TK: Tensor, first_token: int) -> Tensor:
        """Physical experts [T, K]. `first_token` is the number of the first token among those of all ranks."""
        if self.is_identity:
            return experts_TK
        tokens_T = torch.arange(first_token, first_token + len(experts_TK), device=experts_TK.device)
        return self.physical_EC[experts_TK, tokens_T[:, None] % self.num_copies_E[experts_TK]]


def sort_pairs(keys_P: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Pairs [R] in the order of their keys, those of one key ascending; and how many each key has.

    Args:
        keys_P: from 0 to num_keys - 1, or -1 for a pair that is left out.
        num_keys: how many keys there are.
    """
    counts = (keys_P + 1).bincount(minlength=num_keys + 1)
    return keys_P.argsort(stable=True)[int(counts[0]) :], counts[1:]


def weighted_sum(output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token's outputs times their weights, added in float32 and in the order of k: [T, D] of a dtype."""
    num_tokens, top_k = weights_TK.shape
    pairs_PD = output_RD.new_zeros(num_tokens * top_k, output_RD.shape[1])
    pairs_PD[pair_of_row_R] = output_RD
    pairs_TKD = pairs_PD.view(num_tokens, top_k, output_RD.shape[1])
    total_TD = pairs_TKD[:, 0].float() * weights_TK[:, :1]
    for k in range(1, top_k):
        total_TD += pairs_TKD[:, k].float() * weights_TK[:, k : k + 1]
    return total_TD.to(dtype)
