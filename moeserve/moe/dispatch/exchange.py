"""Who computes which pairs of a step, once every rank knows all routing; and the way of the outputs back.

Pair p = n * K + k is token n of all ranks' tokens, rank by rank, and its k-th expert. Does not know how tokens travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from moeserve.distributed.group import GroupCoordinator, PendingTensor
from moeserve.moe.dispatch.base import share_of_pairs
from moeserve.moe.dispatch.replicas import Replicas
from moeserve.moe.placement import Placement
from moeserve.moe.router import Routing
from moeserve.ops.pairs import Keys, PairKernels, choose_pairs
from moeserve.step_inputs import StepInputs

# T tokens of this rank, N tokens of all ranks, D model width, K experts per token, R pairs that this rank computes, O
# pairs of this rank's tokens that are not padding, e local experts, W ranks


@dataclass(frozen=True)
class Assignment:
    """One step's pairs as one rank sees them."""

    packed_pairs_R: Tensor  # the pair of each packed row: by local expert, then ascending
    counts_e: Tensor
    token_starts: list[int]  # of each rank, its first token among all; then N


@dataclass(frozen=True)
class ExchangeTicket:
    """Outputs come back rank by rank, from each by expert: each end finds the order by sorting its own pairs."""

    weights_TK: Tensor
    row_of_sent_R: Tensor  # the packed row that is sent in each place
    send_sizes: list[int]  # outputs that go to each rank
    pair_of_received_O: Tensor  # own pair t * K + k of each output that comes back
    receive_sizes: list[int]  # outputs that come from each rank
    dtype: torch.dtype


class Exchange:
    """The part of a dispatch among ranks that does not depend on how tokens travel."""

    def __init__(self, group: GroupCoordinator, placement: Placement, device: torch.device) -> None:
        """
        Args:
            placement: for the numbers of slots of each rank, which stay; what they hold, `replicas` knows.
        """
        assert placement.num_ranks == group.world_size, (placement.num_ranks, group.world_size)
        self.group = group
        self.replicas = Replicas(placement, group.rank_in_group, group.node_of_rank, device)
        self.pairs = choose_pairs(device.type)
        self.num_slots = placement.num_slots  # of each rank
        self.all_keys = Keys(sum(placement.num_slots))
        first_physical = placement.first_physical[group.rank_in_group]
        self.own_keys = Keys(placement.num_slots[group.rank_in_group], first_physical, self.all_keys.num_counted)

    def choose(self, routing: Routing, step: StepInputs) -> Tensor:
        """Physical experts [T, K] of this rank's tokens, int64."""
        rank = self.group.rank_in_group
        assert len(routing.experts_TK) == step.tokens_per_rank[rank], (len(routing.experts_TK), step.tokens_per_rank)
        return self.replicas.choose(routing.experts_TK, first_token=sum(step.tokens_per_rank[:rank]))

    def expected_rows(self, step: StepInputs, top_k: int) -> int:
        """About how many pairs this rank computes."""
        return share_of_pairs(step.tokens_per_rank, top_k, self.own_keys.num_counted, sum(self.num_slots))

    def assign(self, experts_NK: Tensor, step: StepInputs) -> Assignment:
        """Who computes what, from the physical experts of all ranks' tokens."""
        packed_pairs_R, counts_e = self.pairs.sort(experts_NK, self.own_keys)
        return Assignment(packed_pairs_R, counts_e, list(accumulate(step.tokens_per_rank, initial=0)))

    def ticket(self, own_TK: Tensor, assignment: Assignment, weights_TK: Tensor, dtype: torch.dtype) -> ExchangeTicket:
        """What the way back needs, from the physical experts of this rank's tokens."""
        num_ranks, top_k = len(self.num_slots), own_TK.shape[1]
        first_pairs = torch.tensor([start * top_k for start in assignment.token_starts[1:]], device=own_TK.device)
        rank_of_row_R = torch.bucketize(assignment.packed_pairs_R, first_pairs, right=True)
        row_of_sent_R, send_sizes = self.pairs.sort(rank_of_row_R, Keys(num_ranks))
        pair_of_received_O, counts = self.pairs.sort(own_TK, self.all_keys)
        counts_of_physical = iter(counts.tolist())
        return ExchangeTicket(
            weights_TK=weights_TK,
            row_of_sent_R=row_of_sent_R,
            send_sizes=send_sizes.tolist(),
            pair_of_received_O=pair_of_received_O,
            receive_sizes=[sum(islice(counts_of_physical, num_slots)) for num_slots in self.num_slots],
            dtype=dtype,
        )

    def send_back(self, output_RD: Tensor, ticket: ExchangeTicket) -> ReturningOutput:
        """Every pair's output to the rank of its token, which sums up."""
        sent_RD = self.pairs.gather(output_RD, ticket.row_of_sent_R)
        # collective: all ep ranks
        return ReturningOutput(
            self.group.all_to_all(sent_RD, ticket.send_sizes, ticket.receive_sizes), ticket, self.pairs
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
