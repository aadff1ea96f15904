"""Which copy of an expert a token goes to. Knows nothing of ranks and groups."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.moe.placement import Placement

# T tokens, K experts per token, E logical experts, C copies of an expert at most


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
