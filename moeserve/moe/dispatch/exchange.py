"""Who computes which pairs of a step, once every rank knows all routing; and the way of the outputs back.

Pair p = n * K + k is token n of all ranks' tokens, rank by rank, and its k-th expert. Does not know how tokens travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moeserve.distributed.group import GroupCoordinator, PendingTensor
from moeserve.moe.dispatch.replicas import Replicas
from moeserve.moe.placement import Placement
from moeserve.moe.router import Routing
from moeserve.ops.pairs import PairKernels, choose_pairs
from moeserve.step_inputs import StepInputs

# T tokens of this rank, N tokens of all ranks, D model width, K experts per token, P pairs = T * K, R pairs that this
# rank computes, O pairs of this rank's tokens that are not padding, e local experts


@dataclass(frozen=True)
class Assignment:
    """One step's pairs as one rank sees them."""

    pairs_here_R: Tensor  # those that this rank computes, ascending: tokens of rank 0 first
    row_order_R: Tensor  # packed row r computes pair pairs_here_R[row_order_R[r]]
    counts_e: Tensor
    token_starts: Tensor  # on the host: of each rank, its first token among all; then N
    rank_of_own_TK: Tensor  # who computes the pairs of this rank's tokens; -1: padding
    top_k: int

    @property
    def packed_pairs_R(self) -> Tensor:
        """The pair of each packed row."""
        return self.pairs_here_R[self.row_order_R]

    def count_by_rank(self, ascending_tokens: Tensor) -> list[int]:
        """How many of some tokens each rank brought."""
        cuts = torch.searchsorted(ascending_tokens, self.token_starts.to(ascending_tokens.device))
        return cuts.diff().tolist()


@dataclass(frozen=True)
class ExchangeTicket:
    weights_TK: Tensor
    row_order_R: Tensor
    send_sizes: list[int]  # outputs that go to each rank
    pair_of_received_O: Tensor  # own pair t * K + k of each output that comes back
    receive_sizes: list[int]  # outputs that come from each rank
    dtype: torch.dtype


class Exchange:
    """The part of a dispatch among ranks that does not depend on how tokens travel."""

    def __init__(self, group: GroupCoordinator, placement: Placement, device: torch.device) -> None:
        assert placement.num_ranks == group.world_size, (placement.num_ranks, group.world_size)
        self.group = group
        self.replicas = Replicas(placement, device)
        self.pairs = choose_pairs(device.type)
        self.first_physical = placement.first_physical[group.rank_in_group]
        self.num_local = placement.num_slots[group.rank_in_group]
        ranks = [rank for rank, num_slots in enumerate(placement.num_slots) for _ in range(num_slots)]
        self.rank_of_physical = torch.tensor([*ranks, -1], device=device)  # -1 finds the last: padding stays padding

    def choose(self, routing: Routing, step: StepInputs) -> Tensor:
        """Physical experts [T, K] of this rank's tokens, int32."""
        rank = self.group.rank_in_group
        assert len(routing.experts_TK) == step.tokens_per_rank[rank], (len(routing.experts_TK), step.tokens_per_rank)
        return self.replicas.choose(routing.experts_TK, first_token=sum(step.tokens_per_rank[:rank])).int()

    def assign(self, own_TK: Tensor, experts_NK: Tensor, step: StepInputs) -> Assignment:
        """Who computes what, from the physical experts of this rank's tokens and of all ranks'."""
        local_of_pair = experts_NK.flatten() - self.first_physical
        pairs_here_R = ((local_of_pair >= 0) & (local_of_pair < self.num_local)).nonzero().flatten()
        local_R = local_of_pair[pairs_here_R]
        return Assignment(
            pairs_here_R=pairs_here_R,
            row_order_R=local_R.argsort(stable=True),
            counts_e=local_R.bincount(minlength=self.num_local),
            token_starts=torch.tensor(list(accumulate(step.tokens_per_rank, initial=0))),
            rank_of_own_TK=self.rank_of_physical[own_TK],
            top_k=own_TK.shape[1],
        )

    def ticket(self, assignment: Assignment, weights_TK: Tensor, dtype: torch.dtype) -> ExchangeTicket:
        """What the way back needs."""
        pair_of_received_O, receive_sizes = self.pairs.sort(assignment.rank_of_own_TK.flatten(), self.group.world_size)
        return ExchangeTicket(
            weights_TK=weights_TK,
            row_order_R=assignment.row_order_R,
            send_sizes=assignment.count_by_rank(assignment.pairs_here_R // assignment.top_k),
            pair_of_received_O=pair_of_received_O,
            receive_sizes=receive_sizes.tolist(),
            dtype=dtype,
        )

    def send_back(self, output_RD: Tensor, ticket: ExchangeTicket) -> ReturningOutput:
        """Every pair's output to the rank of its token, which sums up."""
        by_pair_RD = torch.empty_like(output_RD)
        by_pair_RD[ticket.row_order_R] = output_RD
        # collective: all ep ranks
        return ReturningOutput(
            self.group.all_to_all(by_pair_RD, ticket.send_sizes, ticket.receive_sizes), ticket, self.pairs
        )


@dataclass(frozen=True)
class ReturningOutput:
    """A combine under way."""

    pending_OD: PendingTensor
    ticket: ExchangeTicket
    pairs: PairKernels

    def wait(self) -> Tensor:
        ticket = self.ticket
        return self.pairs.weighted_sum(
            self.pending_OD.wait(), ticket.pair_of_received_O, ticket.weights_TK, ticket.dtype
        )
