"""The choice of a physical expert for each token, if a logical expert has several copies."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.placement.placement import Placement, copies_in_turn
from moeserve.ops import routing
from moeserve.ops.upload import uploaded

# W maximum number of turns


class ExpertCopies:
    """Maps logical to physical experts. Successive tokens use the copies of an expert in turn, near copies first.

    See `copies_in_turn`. If tokens are spread evenly over the ranks, every copy gets the same work.
    """

    def __init__(self, placement: Placement, rank_in_group: int, node_of_rank: tuple[int, ...], context: BuildContext):
        """
        Args:
            placement: the initial placement, which `place` replaces.
            rank_in_group: the rank whose tokens are sent.
            node_of_rank: the number of the host of each rank of the group.
        """
        self.device = device = context.device
        self._rank = rank_in_group
        self._node_of_rank = node_of_rank
        max_copies = min(placement.num_ranks, 1 + sum(placement.num_slots) - placement.num_logical)
        max_copies = max(max_copies, *map(len, placement.physical_of_logical))  # a rank may hold two copies
        self.physical_EW = torch.empty(placement.num_logical, max_copies, dtype=torch.int64, device=device)
        self.num_copies_E = torch.empty(placement.num_logical, dtype=torch.int64, device=device)
        self._choose = routing.make_copies(context.backend)
        self.place(placement)
        self.is_identity = placement.logical_of_physical == tuple(range(placement.num_logical))

    def place(self, placement: Placement) -> None:
        """Switch to another placement, in place: captured graphs read the tables at their address."""
        turns = copies_in_turn(placement, self._rank, self._node_of_rank)
        width = self.physical_EW.shape[1]
        padded = [[*of_one, *[-1] * (width - len(of_one))] for of_one in turns]
        self.physical_EW.copy_(uploaded(padded, self.device))
        self.num_copies_E.copy_(uploaded([len(of_one) for of_one in turns], self.device))
        self.is_identity = False

    def choose(self, experts_TK: Tensor, first_token: int) -> Tensor:
        """Return physical experts [T, K]; padding (-1) stays padding.

        Args:
            experts_TK: logical experts, int64.
            first_token: the index of this rank's first token among the tokens of all ranks.
        """
        if self.is_identity:
            return experts_TK
        return self._choose(experts_TK, self.physical_EW, self.num_copies_E, first_token)
