"""Dispatch where every expert lives on this rank: a sort by expert, and its inverse. Nothing travels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.moe.dispatch.base import Arrived, PackedTokens
from moeserve.moe.router import Routing
from moeserve.step_inputs import StepInputs

# T tokens, D model width, K experts per token, R rows = T * K


@dataclass(frozen=True)
class LocalTicket:
    weights_TK: Tensor
    pair_of_row_R: Tensor  # row r computes pair t * K + k: token t, its k-th expert
    dtype: torch.dtype


@dataclass(frozen=True)
class Here:
    """A dispatch that has arrived already."""

    arrived: Arrived[LocalTicket]

    def wait(self) -> Arrived[LocalTicket]:
        return self.arrived


@dataclass(frozen=True)
class Done:
    """A combine that is complete already."""

    hidden_TD: Tensor

    def wait(self) -> Tensor:
        return self.hidden_TD


class LocalDispatcher:
    """The dispatcher of one rank. See `Dispatcher` for the contract."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Here:
        experts_R = routing.experts_TK.flatten()
        pair_of_row_R = experts_R.argsort(stable=True)
        token_of_row_R = pair_of_row_R // routing.experts_TK.shape[1]
        tokens = PackedTokens(hidden_TD[token_of_row_R], experts_R.bincount(minlength=self.num_experts))
        return Here(Arrived(tokens, LocalTicket(routing.weights_TK, pair_of_row_R, hidden_TD.dtype)))

    def combine(self, output_RD: Tensor, ticket: LocalTicket) -> Done:
        num_tokens, top_k = ticket.weights_TK.shape
        pairs_RD = torch.empty_like(output_RD)
        pairs_RD[ticket.pair_of_row_R] = output_RD
        pairs_TKD = pairs_RD.view(num_tokens, top_k, -1)
        total_TD = pairs_TKD[:, 0].float() * ticket.weights_TK[:, :1]
        for k in range(1, top_k):
            total_TD += pairs_TKD[:, k].float() * ticket.weights_TK[:, k : k + 1]
        return Done(total_TD.to(ticket.dtype))
