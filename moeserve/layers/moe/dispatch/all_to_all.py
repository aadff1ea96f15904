"""Dispatch by all-to-all: each token is sent to the ranks of its experts only.

All ranks first gather the routing of all tokens. From this routing, each rank computes the rows that it sends and
receives, for dispatch and combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moeserve.distributed.coordinator import PendingTensor
from moeserve.layers.moe.dispatch.base import Dispatched, PackedTokens
from moeserve.layers.moe.dispatch.exchange import Exchange, Returns
from moeserve.layers.moe.router import Routing
from moeserve.ops.products.interface import RowGroups
from moeserve.step_inputs import StepInputs

# R pairs that this rank computes, U distinct tokens that this rank's experts need, S rows that this rank sends (each
# token once to each rank that needs it), W ranks of the group


@dataclass(frozen=True)
class PendingAllToAll:
    """A dispatch in progress."""

    pending_UD: PendingTensor
    token_of_row_R: Tensor  # the index, among the U tokens, of each packed row's token
    counts_e: Tensor
    returns: Returns
    exchange: Exchange

    def wait(self) -> Dispatched:
        rows_RD = self.exchange.pairs.gather(self.pending_UD.wait(), self.token_of_row_R)
        return Dispatched(
            PackedTokens(rows_RD, RowGroups(self.counts_e)), partial(self.exchange.send_back, self.returns)
        )


class AllToAllDispatcher:
    """Sends each rank only the rows that the rank needs. See `Dispatcher` for the contract.

    A token's row is sent once to each rank that holds any of its experts; every pair's output is sent back once. All
    ranks compute the sizes of these exchanges from the gathered routing: see `Exchange`.
    """

    takes_float8 = False

    def __init__(self, exchange: Exchange) -> None:
        self.group = exchange.group
        self.exchange = exchange
        self.expert_copies = exchange.expert_copies
        self.ranks_W = torch.arange(self.group.world_size, device=exchange.rank_of_physical.device)

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> PendingAllToAll:
        exchange = self.exchange
        own_TK = exchange.choose(routing, step)
        # collective: all ep ranks
        experts_NK = self.group.all_gather(own_TK, step.tokens_per_rank)
        assignment = exchange.assign(own_TK, experts_NK, step)
        traffic = assignment.traffic
        # Token t for rank w is pair t * W + w. Sorted by rank, then by token.
        sent_to_TW = torch.where(assignment.num_pairs_TW > 0, self.ranks_W, -1)
        sent_S = exchange.pairs.order(sent_to_TW, exchange.keys_of_ranks)[0][: sum(traffic.tokens_to)]
        # collective: all ep ranks
        pending_UD = self.group.all_to_all(
            exchange.pairs.gather(hidden_TD, sent_S, len(self.ranks_W)), traffic.tokens_to, traffic.tokens_from
        )
        token_of_row_R = assignment.needed_before_M[assignment.packed_pairs_R // own_TK.shape[1]]
        returns = exchange.returns(assignment, routing.weights_TK, hidden_TD.dtype)
        return PendingAllToAll(pending_UD, token_of_row_R, assignment.counts_e, returns, exchange)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return False  # the host reads sizes
