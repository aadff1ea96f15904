"""Which copy of an expert a token goes to. Knows where copies are, and no tokens' way there."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.expert_placement.placement import Placement, copies_in_turn
from moeserve.ops.copies import choose_copies

# T tokens, K experts per token, E logical experts, W turns at most


class Replicas:
    """The physical expert of each choice: near copies, in turns from one token of the step to the next.

    See `copies_in_turn`: tokens that are spread over all ranks alike give every copy the same work.
    """

    def __init__(self, placement: Placement, rank_in_group: int, node_of_rank: tuple[int, ...], device: torch.device):
        """
        Args:
            rank_in_group: whose tokens are sent.
            node_of_rank: by rank of the group: a number of its host.
        """
        self.device = device
        self._rank = rank_in_group
        self._node_of_rank = node_of_rank
        most_copies = min(placement.num_ranks, 1 + sum(placement.num_slots) - placement.num_logical)
        most_copies = max(most_copies, *map(len, placement.physical_of_logical))  # two on one rank
        self.physical_EW = torch.empty(placement.num_logical, most_copies, dtype=torch.int64, device=device)
        self.num_turns_E = torch.empty(placement.num_logical, dtype=torch.int64, device=device)
        self._choose = choose_copies(device.type)
        self.place(placement)
        self.is_identity = placement.logical_of_physical == tuple(range(placement.num_logical))

    def place(self, placement: Placement) -> None:
        """Other experts are in the slots from now on. The tables stay where they are: graphs know them by address."""
        turns = copies_in_turn(placement, self._rank, self._node_of_rank)
        width = self.physical_EW.shape[1]
        self.physical_EW.copy_(torch.tensor([[*of_one, *[-1] * (width - len(of_one))] for of_one in turns]))
        self.num_turns_E.copy_(torch.tensor([len(of_one) for of_one in turns]))
        self.is_identity = False

    def choose(self, experts_TK: Tensor, first_token: int) -> Tensor:
        """Physical experts [T, K]; padding stays padding.

        Args:
            first_token: the number of the first token among those of all ranks.
        """
        if self.is_identity:
            return experts_TK
        return self._choose(experts_TK, self.physical_EW, self.num_turns_E, first_token)
