"""Dispatch by giving every rank every token: one collective there and one back, and more bytes than needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.distributed.group import GroupCoordinator, PendingTensor
from moeserve.moe.dispatch.base import Arrived, PackedTokens
from moeserve.moe.dispatch.exchange import Exchange, ExchangeTicket, ReturningOutput
from moeserve.moe.placement import Placement
from moeserve.moe.router import Routing
from moeserve.step_inputs import StepInputs

# T tokens of this rank, N tokens of all ranks, D model width, K experts per token, X values that have the bits of K
# int32, V = X + D, R pairs that this rank computes


@dataclass(frozen=True)
class Gathering:
    """A dispatch under way."""

    pending_NV: PendingTensor  # of each token its routing, as X values, and its row
    own_TK: Tensor  # physical experts
    weights_TK: Tensor
    exchange: Exchange
    step: StepInputs

    def wait(self) -> Arrived[ExchangeTicket]:
        both_NV = self.pending_NV.wait()
        top_k = self.own_TK.shape[1]
        routing_size = top_k * self.own_TK.element_size() // both_NV.element_size()
        routing_NX, hidden_ND = both_NV[:, :routing_size], both_NV[:, routing_size:]
        experts_NK = routing_NX.flatten().view(torch.int32).view(-1, top_k)
        assignment = self.exchange.assign(self.own_TK, experts_NK, self.step)
        rows_RD = self.exchange.pairs.gather(hidden_ND, assignment.packed_pairs_R, top_k)
        ticket = self.exchange.ticket(assignment, self.weights_TK, both_NV.dtype)
        return Arrived(PackedTokens(rows_RD, assignment.counts_e), ticket)


class AllGatherDispatcher:
    """All ranks' tokens come to every rank, which picks those of its experts. See `Dispatcher` for the contract.

    Every token's row travels to each other rank once, and every pair's output travels back once.
    """

    def __init__(self, group: GroupCoordinator, placement: Placement, device: torch.device) -> None:
        self.group = group
        self.exchange = Exchange(group, placement, device)

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Gathering:
        own_TK = self.exchange.choose(routing, step)
        # Each row brings its routing as so many values more, which are but bits: one collective instead of two.
        both_TV = torch.cat([own_TK.view(hidden_TD.dtype), hidden_TD], dim=1)
        # collective: all ep ranks
        pending_NV = self.group.begin_all_gather(both_TV, step.tokens_per_rank)
        return Gathering(pending_NV, own_TK, routing.weights_TK, self.exchange, step)

    def combine(self, output: Tensor, ticket: ExchangeTicket) -> ReturningOutput:
        return self.exchange.send_back(output, ticket)
