"""Dispatch by giving every rank every token: one collective there and one back, and more bytes than needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.distributed.group import GroupCoordinator
from moeserve.moe.dispatch.base import Arrived, PackedTokens
from moeserve.moe.dispatch.exchange import Exchange, ExchangeTicket, ReturningOutput
from moeserve.moe.placement import Placement
from moeserve.moe.router import Routing
from moeserve.step_inputs import StepInputs

# T tokens of this rank, N tokens of all ranks, D model width, K experts per token, X values that have the bits of K
# int32, V = X + D, R pairs that this rank computes


@dataclass(frozen=True)
class Gathered:
    """A dispatch that has arrived already."""

    arrived: Arrived[ExchangeTicket]

    def wait(self) -> Arrived[ExchangeTicket]:
        return self.arrived


class AllGatherDispatcher:
    """All ranks' tokens come to every rank, which picks those of its experts. See `Dispatcher` for the contract.

    Every token's row travels to each other rank once, and every pair's output travels back once.
    """

    def __init__(self, group: GroupCoordinator, placement: Placement, device: torch.device) -> None:
        self.group = group
        self.exchange = Exchange(group, placement, device)

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Gathered:
        own_TK = self.exchange.choose(routing, step)
        # Each row brings its routing as so many values more, which are but bits: one collective instead of two.
        routing_TX = own_TK.view(hidden_TD.dtype)
        # collective: all ep ranks
        both_NV = self.group.all_gather(torch.cat([routing_TX, hidden_TD], dim=1), step.tokens_per_rank)
        routing_NX, hidden_ND = both_NV.split([routing_TX.shape[1], hidden_TD.shape[1]], dim=1)
        experts_NK = routing_NX.flatten().view(torch.int32).view(-1, own_TK.shape[1])
        assignment = self.exchange.assign(own_TK, experts_NK, step)
        rows_RD = hidden_ND[assignment.packed_pairs_R // assignment.top_k]
        ticket = self.exchange.ticket(assignment, routing.weights_TK, hidden_TD.dtype)
        return Gathered(Arrived(PackedTokens(rows_RD, assignment.counts_e), ticket))

    def combine(self, output: Tensor, ticket: ExchangeTicket) -> ReturningOutput:
        return self.exchange.send_back(output, ticket)
