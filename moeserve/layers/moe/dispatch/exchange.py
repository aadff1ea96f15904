"""The assignment of a step's pairs to ranks, computed from the routing of all tokens, and the return of their outputs.

Pair p = n * K + k is token n with its k-th expert. Tokens are counted over all ranks, rank by rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.distributed.coordinator import GroupCoordinator, PendingTensor
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.base import pack, share_of_pairs
from moeserve.layers.moe.dispatch.expert_copies import ExpertCopies
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.ops import pairs
from moeserve.ops.pairs.interface import Keys, PairKernels
from moeserve.step_inputs import StepInputs

# N tokens of all ranks, M = N + 1, W ranks, w = W + 1, R pairs that this rank's experts compute; O pairs of this
# rank's tokens, without padding


@dataclass(frozen=True)
class Traffic:
    """The numbers of tokens and pairs that this rank exchanges with each rank. The host needs no more of a routing."""

    tokens_to: list[int]  # for each rank, the number of own tokens that its experts compute
    tokens_from: list[int]  # for each rank, the number of its tokens that this rank's experts compute
    pairs_to: list[int]  # for each rank, the number of own pairs that it computes
    pairs_from: list[int]  # for each rank, the number of its pairs that this rank computes


@dataclass(frozen=True)
class Assignment:
    """The pairs of a step that one rank computes, and the outputs that the rank receives."""

    traffic: Traffic
    packed_pairs_R: Tensor  # the pair of each row to compute; rows are sorted by local expert, then by pair
    counts_e: Tensor  # rows of each local expert
    pair_of_received_O: Tensor  # the own pair (t * K + k) of each output that returns
    first_tokens_w: Tensor  # the index of each rank's first token among the tokens of all ranks, and N at the end
    num_pairs_TW: Tensor  # for each own token, the number of its pairs that each rank computes
    needed_before_M: Tensor  # for each token, the number of earlier tokens that this rank computes; total at the end


@dataclass(frozen=True)
class Returns:
    """The return of a step's outputs to the ranks of their tokens.

    Outputs are sent rank by rank, sorted by expert. Sender and receiver both find this order by sorting.
    """

    weights_TK: Tensor
    row_of_sent_R: Tensor  # the packed row of each output that this rank sends
    send_sizes: list[int]  # the number of outputs for each rank
    pair_of_received_O: Tensor  # the own pair (t * K + k) of each output that returns
    receive_sizes: list[int]  # the number of outputs from each rank
    dtype: torch.dtype


class Exchange:
    """The part of a dispatch between ranks that does not depend on the choice of collectives.

    In a large step, the host waits for the GPU once per layer, for the sizes of all exchanges. Waiting once per step
    would not be enough, because a layer's routing depends on the layer before.
    """

    def __init__(self, group: GroupCoordinator, placement: Placement, context: BuildContext) -> None:
        """
        Args:
            placement: over the ranks of the group, or over a single rank if every rank computes all pairs. Only the
                number of slots of each rank is used here; `expert_copies` tracks the experts in the slots.
        """
        assert placement.num_ranks in (1, group.world_size), (placement.num_ranks, group.world_size)
        self.group = group
        rank = group.rank_in_group % placement.num_ranks
        self.expert_copies = ExpertCopies(placement, rank, group.node_of_rank[: placement.num_ranks], context)
        self.pairs = pairs.make(context.backend)
        self.pack = functools.partial(pack, self.pairs, gathers_late=context.backend.products_gather_rows)
        self.keys_of_ranks = Keys(placement.num_ranks)
        self.all_keys = Keys(sum(placement.num_slots))
        first_physical = placement.first_physical[rank]
        self.own_keys = Keys(placement.num_slots[rank], first_physical, self.all_keys.num_counted)
        ranks = [rank for rank, num_slots in enumerate(placement.num_slots) for _ in range(num_slots)]
        # Index -1, which is padding, reads the last element: a rank beyond all ranks of the group.
        self.rank_of_physical = torch.tensor([*ranks, placement.num_ranks], device=context.device)

    def choose(self, routing: Routing, step: StepInputs) -> Tensor:
        """Return the physical experts [T, K] of this rank's tokens, int64."""
        rank = self.group.rank_in_group
        assert len(routing.experts_TK) == step.tokens_per_rank[rank], (len(routing.experts_TK), step.tokens_per_rank)
        return self.expert_copies.choose(routing.experts_TK, first_token=sum(step.tokens_per_rank[:rank]))

    def expected_rows(self, step: StepInputs, top_k: int) -> int:
        """Return the approximate number of pairs that this rank computes."""
        return share_of_pairs(step.tokens_per_rank, top_k, self.own_keys.num_counted, self.all_keys.num_counted)

    def assign(self, own_TK: Tensor, experts_NK: Tensor, step: StepInputs) -> Assignment:
        """Assign pairs to ranks.

        Args:
            own_TK: physical experts of this rank's tokens.
            experts_NK: physical experts of all ranks' tokens.
        """
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
        traffic = Traffic(*sizes_4W.tolist())  # the host waits for the device
        return Assignment(
            traffic=traffic,
            packed_pairs_R=order_P[: sum(traffic.pairs_from)],
            counts_e=counts_e,
            pair_of_received_O=own_order_P[: sum(traffic.pairs_to)],
            first_tokens_w=first_tokens_w,
            num_pairs_TW=num_pairs_TW,
            needed_before_M=needed_before_M,
        )

    def returns(self, assignment: Assignment, weights_TK: Tensor, dtype: torch.dtype) -> Returns:
        """Return the order and sizes in which the outputs of an assignment are sent back."""
        first_pairs_W = assignment.first_tokens_w[1:] * weights_TK.shape[1]
        rank_of_row_R = torch.bucketize(assignment.packed_pairs_R, first_pairs_W, right=True)
        row_of_sent_R, _ = self.pairs.order(rank_of_row_R, self.keys_of_ranks)
        return Returns(
            weights_TK=weights_TK,
            row_of_sent_R=row_of_sent_R,
            send_sizes=assignment.traffic.pairs_from,
            pair_of_received_O=assignment.pair_of_received_O,
            receive_sizes=assignment.traffic.pairs_to,
            dtype=dtype,
        )

    def send_back(self, returns: Returns, output_RD: Tensor) -> PendingExchange:
        """Send each pair's output to the rank of the pair's token, which adds up the token's outputs."""
        sent_RD = self.pairs.gather(output_RD, returns.row_of_sent_R)
        # collective: all ep ranks
        return PendingExchange(
            self.group.all_to_all(sent_RD, returns.send_sizes, returns.receive_sizes), returns, self.pairs
        )


@dataclass(frozen=True)
class PendingExchange:
    """A combine in progress."""

    pending_OD: PendingTensor
    returns: Returns
    pairs: PairKernels

    def wait(self) -> Tensor:
        returns = self.returns
        return self.pairs.weighted_sum(
            self.pending_OD.wait(), returns.pair_of_received_O, returns.weights_TK, returns.dtype
        )


def _sum_before(numbers_N: Tensor) -> Tensor:
    """Return [M] int64: for each number, the sum of the numbers before it; at the end, the sum of all."""
    return functional.pad(numbers_N.cumsum(0), (1, 0))
