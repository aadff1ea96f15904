"""Dispatch that sends each token to the ranks that hold its experts, and to no other.

All ranks learn all routing first: from it, each knows what it sends and gets, then and on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.distributed.group import GroupCoordinator, PendingTensor
from moeserve.moe.dispatch.base import Arrived, PackedTokens
from moeserve.moe.dispatch.exchange import Exchange, ExchangeTicket, ReturningOutput
from moeserve.moe.placement import Placement
from moeserve.moe.router import Routing
from moeserve.ops.pairs import PairKernels
from moeserve.step_inputs import StepInputs

# T tokens of this rank, D model width, K experts per token, R pairs that this rank computes, U tokens (each once) that
# this rank's experts need, W ranks of the group


@dataclass(frozen=True)
class Travelling:
    """A dispatch under way."""

    pending_UD: PendingTensor
    token_of_row_R: Tensor  # of packed row r, among the U tokens
    counts_e: Tensor
    ticket: ExchangeTicket
    pairs: PairKernels

    def wait(self) -> Arrived[ExchangeTicket]:
        rows_RD = self.pairs.gather(self.pending_UD.wait(), self.token_of_row_R)
        return Arrived(PackedTokens(rows_RD, self.counts_e), self.ticket)


class AllToAllDispatcher:
    """Only the rows that a rank needs come to it. See `Dispatcher` for the contract.

    A token's row travels once to each rank that holds any of its experts, however many; every pair's output travels
    back once. (DeepEP, https://github.com/deepseek-ai/DeepEP, sends rows once in this way too.)
    """

    def __init__(self, group: GroupCoordinator, placement: Placement, device: torch.device) -> None:
        self.group = group
        self.exchange = Exchange(group, placement, device)
        self.ranks_W11 = torch.arange(group.world_size, device=device)[:, None, None]

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Travelling:
        own_TK = self.exchange.choose(routing, step)
        # collective: all ep ranks
        experts_NK = self.group.all_gather(own_TK, step.tokens_per_rank)
        assignment = self.exchange.assign(own_TK, experts_NK, step)
        is_needed_WT = (assignment.rank_of_own_TK == self.ranks_W11).any(dim=-1)
        needed_tokens = is_needed_WT.nonzero()[:, 1]  # those that rank 0 needs first, each rank's ascending
        tokens_U, index_R = (assignment.pairs_here_R // assignment.top_k).unique_consecutive(return_inverse=True)
        # collective: all ep ranks
        pending_UD = self.group.all_to_all(
            self.exchange.pairs.gather(hidden_TD, needed_tokens),
            is_needed_WT.sum(dim=-1).tolist(),
            assignment.count_by_rank(tokens_U),
        )
        ticket = self.exchange.ticket(assignment, routing.weights_TK, hidden_TD.dtype)
        return Travelling(pending_UD, index_R[assignment.row_order_R], assignment.counts_e, ticket, self.exchange.pairs)

    def combine(self, output: Tensor, ticket: ExchangeTicket) -> ReturningOutput:
        return self.exchange.send_back(output, ticket)
