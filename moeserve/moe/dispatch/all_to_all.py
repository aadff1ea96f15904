"""Dispatch that sends each token to the ranks that hold its experts, and to no other.

All ranks learn all routing first: from it, each knows what it sends and gets, then and on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.distributed.group import GroupCoordinator, PendingTensor
from moeserve.moe.dispatch.allgather import AllGatherDispatcher, Gathering, Returned, SmallTicket
from moeserve.moe.dispatch.base import Arrived, PackedTokens
from moeserve.moe.dispatch.exchange import ExchangeTicket, ReturningOutput
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
    """Only the rows that a rank needs come to it, in all but small steps. See `Dispatcher` for the contract.

    A token's row travels once to each rank that holds any of its experts, however many; every pair's output travels
    back once. (DeepEP, https://github.com/deepseek-ai/DeepEP, sends rows once in this way too.)
    """

    def __init__(self, group: GroupCoordinator, placement: Placement, device: torch.device) -> None:
        self.group = group
        self.for_small_steps = AllGatherDispatcher(group, placement, device)
        self.exchange = self.for_small_steps.exchange
        self.replicas = self.exchange.replicas
        ranks = [rank for rank, num_slots in enumerate(placement.num_slots) for _ in range(num_slots)]
        self.rank_of_physical = torch.tensor([*ranks, -1], device=device)  # -1 finds the last: padding stays padding
        self.ranks_W11 = torch.arange(group.world_size, device=device)[:, None, None]

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Travelling | Gathering:
        if self.for_small_steps.is_small(hidden_TD, routing, step):
            return self.for_small_steps.dispatch(hidden_TD, routing, step)
        own_TK = self.exchange.choose(routing, step)
        # collective: all ep ranks
        experts_NK = self.group.all_gather(own_TK, step.tokens_per_rank)
        assignment = self.exchange.assign(experts_NK, step)
        is_needed_WT = (self.rank_of_physical[own_TK] == self.ranks_W11).any(dim=-1)
        needed_tokens = is_needed_WT.nonzero()[:, 1]  # those that rank 0 needs first, each rank's ascending
        tokens_U, token_of_row_R = (assignment.packed_pairs_R // own_TK.shape[1]).unique(return_inverse=True)
        cuts = torch.searchsorted(tokens_U, torch.tensor(assignment.token_starts, device=tokens_U.device))
        # collective: all ep ranks
        pending_UD = self.group.all_to_all(
            self.exchange.pairs.gather(hidden_TD, needed_tokens),
            is_needed_WT.sum(dim=-1).tolist(),
            cuts.diff().tolist(),
        )
        ticket = self.exchange.ticket(own_TK, assignment, routing.weights_TK, hidden_TD.dtype)
        return Travelling(pending_UD, token_of_row_R, assignment.counts_e, ticket, self.exchange.pairs)

    def combine(self, output: Tensor, ticket: ExchangeTicket | SmallTicket) -> ReturningOutput | Returned:
        return self.for_small_steps.combine(output, ticket)
