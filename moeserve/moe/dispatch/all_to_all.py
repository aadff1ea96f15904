"""Dispatch that sends each token to the ranks that hold its experts, and to no other.

All ranks learn all routing first: from it, each knows what it sends and gets, then and on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.distributed.coordinator import GroupCoordinator, PendingTensor
from moeserve.expert_placement.placement import Placement
from moeserve.moe.dispatch.allgather import AllGatherDispatcher, Gathering, Returned, SmallHandle
from moeserve.moe.dispatch.base import Arrived, PackedTokens
from moeserve.moe.dispatch.exchange import ExchangeHandle, ReturningOutput
from moeserve.moe.router import Routing
from moeserve.ops.pairs import PairKernels
from moeserve.step_inputs import StepInputs

# T tokens of this rank, D model width, K experts per token, R pairs that this rank computes, U tokens (each once) that
# this rank's experts need, S tokens that it sends (once to each rank), W ranks of the group


@dataclass(frozen=True)
class Travelling:
    """A dispatch under way."""

    pending_UD: PendingTensor
    token_of_row_R: Tensor  # of packed row r, among the U tokens
    counts_e: Tensor
    handle: ExchangeHandle
    pairs: PairKernels

    def wait(self) -> Arrived[ExchangeHandle]:
        rows_RD = self.pairs.gather(self.pending_UD.wait(), self.token_of_row_R)
        return Arrived(PackedTokens(rows_RD, self.counts_e), self.handle)


class AllToAllDispatcher:
    """Only the rows that a rank needs come to it, in all but small steps. See `Dispatcher` for the contract.

    A token's row travels once to each rank that holds any of its experts, however many; every pair's output travels
    back once. (DeepEP, https://github.com/deepseek-ai/DeepEP, sends rows once in this way too.) How many rows each pair
    of ranks exchanges, then and on the way back, ranks read from the routing that all have gathered: see `Exchange`.
    """

    def __init__(self, group: GroupCoordinator, placement: Placement, device: torch.device) -> None:
        self.group = group
        self.for_small_steps = AllGatherDispatcher(group, placement, device)
        self.exchange = self.for_small_steps.exchange
        self.expert_copies = self.exchange.expert_copies
        self.ranks_W = torch.arange(group.world_size, device=device)

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Travelling | Gathering:
        if self.for_small_steps.is_small(hidden_TD, routing, step):
            return self.for_small_steps.dispatch(hidden_TD, routing, step)
        exchange = self.exchange
        own_TK = exchange.choose(routing, step)
        # collective: all ep ranks
        experts_NK = self.group.all_gather(own_TK, step.tokens_per_rank)
        assignment = exchange.assign(own_TK, experts_NK, step)
        traffic = assignment.traffic
        # Token t for rank w is pair t * W + w: by rank, then ascending.
        sent_to_TW = torch.where(assignment.num_pairs_TW > 0, self.ranks_W, -1)
        sent_S = exchange.pairs.order(sent_to_TW, exchange.keys_of_ranks)[0][: sum(traffic.tokens_to)]
        # collective: all ep ranks
        pending_UD = self.group.all_to_all(
            exchange.pairs.gather(hidden_TD, sent_S, len(self.ranks_W)), traffic.tokens_to, traffic.tokens_from
        )
        token_of_row_R = assignment.needed_before_M[assignment.packed_pairs_R // own_TK.shape[1]]
        handle = exchange.handle(assignment, routing.weights_TK, hidden_TD.dtype)
        return Travelling(pending_UD, token_of_row_R, assignment.counts_e, handle, exchange.pairs)

    def combine(self, output: Tensor, handle: ExchangeHandle | SmallHandle) -> ReturningOutput | Returned:
        return self.for_small_steps.combine(output, handle)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return self.for_small_steps.is_capturable(tokens_per_rank, bytes_per_token)
