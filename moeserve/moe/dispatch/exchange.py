"""Who computes which pairs of a step, once every rank knows all routing; and the way of the outputs back.

Pair p = n * K + k is token n of all ranks' tokens, rank by rank, and its k-th expert. Does not know how tokens travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.distributed.coordinator import GroupCoordinator, PendingTensor
from moeserve.expert_placement.placement import Placement
from moeserve.moe.dispatch.base import share_of_pairs
from moeserve.moe.dispatch.expert_copies import ExpertCopies
from moeserve.moe.router import Routing
from moeserve.ops.pairs import Keys, PairKernels, choose_pairs
from moeserve.step_inputs import StepInputs

# T tokens of this rank, N tokens of all ranks, M = N + 1, D model width, K experts per token, R pairs that this rank
# computes, O pairs of this rank's tokens that are not padding, e local experts, W ranks, w = W + 1


@dataclass(frozen=True)
class Traffic:
    """What goes between this rank and each, by rank: all that the host has to know of a step's routing."""

    tokens_to: list[int]  # of this rank's tokens, those that the other's experts need, each once
    tokens_from: list[int]
    pairs_to: list[int]  # of this rank's tokens' pairs, those that the other computes
    pairs_from: list[int]


@dataclass(frozen=True)
class Assignment:
    """One step's pairs as one rank sees them."""

    traffic: Traffic
    packed_pairs_R: Tensor  # the pair of each packed row: by local expert, then ascending
    counts_e: Tensor
    pair_of_received_O: Tensor  # own pair t * K + k of each output that comes back
    first_tokens_w: Tensor  # of each rank, its first token among all; then N
    num_pairs_TW: Tensor  # of each own token, how many a rank computes
    needed_before_M: Tensor  # of the tokens before each, how many this rank's experts need; then of all


@dataclass(frozen=True)
class ExchangeHandle:
    """Outputs come back rank by rank, from each by expert: each end finds the order by sorting its own pairs."""

    weights_TK: Tensor
    row_of_sent_R: Tensor  # the packed row that is sent in each place
    send_sizes: list[int]  # outputs that go to each rank
    pair_of_received_O: Tensor  # own pair t * K + k of each output that comes back
    receive_sizes: list[int]  # outputs that come from each rank
    dtype: torch.dtype


class Exchange:
    """The part of a dispatch among ranks that does not depend on how tokens travel.

    The host waits for a GPU once in each dispatch of a large step: for the sizes of all that is sent and received, then
    and on the way back. Once for a step it cannot be: how a layer routes is known when the one before it is computed.
    """

    def __init__(self, group: GroupCoordinator, placement: Placement, device: torch.device) -> None:
        """
        Args:
            placement: for the numbers of slots of each rank, which stay; what they hold, `expert_copies` knows.
        """
        assert placement.num_ranks == group.world_size, (placement.num_ranks, group.world_size)
        self.group = group
        self.expert_copies = ExpertCopies(placement, group.rank_in_group, group.node_of_rank, device)
        self.pairs = choose_pairs(device.type)
        self.keys_of_ranks = Keys(placement.num_ranks)
        self.all_keys = Keys(sum(placement.num_slots))
        first_physical = placement.first_physical[group.rank_in_group]
        self.own_keys = Keys(placement.num_slots[group.rank_in_group], first_physical, self.all_keys.num_counted)
        ranks = [rank for rank, num_slots in enumerate(placement.num_slots) for _ in range(num_slots)]
        # Of padding, which is -1, the last is found: a rank further than there are.
        self.rank_of_physical = torch.tensor([*ranks, placement.num_ranks], device=device)

    def choose(self, routing: Routing, step: StepInputs) -> Tensor:
        """Physical experts [T, K] of this rank's tokens, int64."""
        rank = self.group.rank_in_group
        assert len(routing.experts_TK) == step.tokens_per_rank[rank], (len(routing.experts_TK), step.tokens_per_rank)
        return self.expert_copies.choose(routing.experts_TK, first_token=sum(step.tokens_per_rank[:rank]))

    def expected_rows(self, step: StepInputs, top_k: int) -> int:
        """About how many pairs this rank computes."""
        return share_of_pairs(step.tokens_per_rank, top_k, self.own_keys.num_counted, self.all_keys.num_counted)

    def assign(self, own_TK: Tensor, experts_NK: Tensor, step: StepInputs) -> Assignment:
        """Who computes what, from the physical experts of this rank's tokens, and from those of all ranks'."""
        num_ranks = self.group.world_size
        first_tokens = torch.tensor([*accumulate(step.tokens_per_rank, initial=0)])
        first_tokens_w = first_tokens.to(own_TK.device, non_blocking=True)
        order_P, counts_e = self.pairs.order(experts_NK, self.own_keys)
        own_order_P, _ = self.pairs.order(own_TK, self.all_keys)

        ranks_TK = self.rank_of_physical[own_TK]
        num_pairs_Tw = ranks_TK.new_zeros(len(ranks_TK), num_ranks + 1)
        num_pairs_TW = num_pairs_Tw.scatter_add_(1, ranks_TK, torch.ones_like(ranks_TK))[:, :num_ranks]
        num_pairs_N = (self.rank_of_physical[experts_NK] == self.group.rank_in_group).sum(dim=1)
        computed_before_M = _sum_before(num_pairs_N)
        needed_before_M = _sum_before(num_pairs_N > 0)
        sizes_4W = torch.stack(
            [
                (num_pairs_TW > 0).sum(dim=0),
                needed_before_M[first_tokens_w].diff(),
                num_pairs_TW.sum(dim=0),
                computed_before_M[first_tokens_w].diff(),
            ]
        )
        traffic = Traffic(*sizes_4W.tolist())  # the host waits for the device, which has the sorting to do meanwhile
        return Assignment(
            traffic=traffic,
            packed_pairs_R=order_P[: sum(traffic.pairs_from)],
            counts_e=counts_e,
            pair_of_received_O=own_order_P[: sum(traffic.pairs_to)],
            first_tokens_w=first_tokens_w,
            num_pairs_TW=num_pairs_TW,
            needed_before_M=needed_before_M,
        )

    def handle(self, assignment: Assignment, weights_TK: Tensor, dtype: torch.dtype) -> ExchangeHandle:
        """What the way back needs."""
        first_pairs_W = assignment.first_tokens_w[1:] * weights_TK.shape[1]
        rank_of_row_R = torch.bucketize(assignment.packed_pairs_R, first_pairs_W, right=True)
        row_of_sent_R, _ = self.pairs.order(rank_of_row_R, self.keys_of_ranks)
        return ExchangeHandle(
            weights_TK=weights_TK,
            row_of_sent_R=row_of_sent_R,
            send_sizes=assignment.traffic.pairs_from,
            pair_of_received_O=assignment.pair_of_received_O,
            receive_sizes=assignment.traffic.pairs_to,
            dtype=dtype,
        )

    def send_back(self, output_RD: Tensor, handle: ExchangeHandle) -> ReturningOutput:
        """Every pair's output to the rank of its token, which sums up."""
        sent_RD = self.pairs.gather(output_RD, handle.row_of_sent_R)
        # collective: all ep ranks
        return ReturningOutput(
            self.group.all_to_all(sent_RD, handle.send_sizes, handle.receive_sizes), handle, self.pairs
        )


@dataclass(frozen=True)
class ReturningOutput:
    """A combine under way."""

    pending_OD: PendingTensor
    handle: ExchangeHandle
    pairs: PairKernels

    def wait(self) -> Tensor:
        handle = self.handle
        return self.pairs.weighted_sum(
            self.pending_OD.wait(), handle.pair_of_received_O, handle.weights_TK, handle.dtype
        )


def _sum_before(numbers_N: Tensor) -> Tensor:
    """[M] int64: the sum of those before each, then of all."""
    return functional.pad(numbers_N.cumsum(0), (1, 0))
