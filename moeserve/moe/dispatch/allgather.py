"""Dispatch by giving every rank every token: one collective there and one back, and more bytes than needed.

A step of few tokens is carried in shapes that do not depend on its routing: rows for all pairs of all tokens, of which
a rank computes some, and back to the tokens' ranks as a sum in which all terms but one are zero. So nothing has to be
known on the host between the collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.distributed.coordinator import GroupCoordinator, PendingTensor
from moeserve.expert_placement.placement import Placement
from moeserve.moe.dispatch.base import Arrived, PackedTokens
from moeserve.moe.dispatch.exchange import Exchange, ExchangeHandle, ReturningOutput
from moeserve.moe.router import Routing
from moeserve.ops.pairs import PairKernels
from moeserve.step_inputs import StepInputs

# T tokens of this rank, N tokens of all ranks, D model width, K experts per token, X values that have the bits of K
# int64, V = X + D, P pairs = N * K of all ranks, p = T * K of this rank, R pairs that this rank computes

MAX_SMALL_BYTES = 2**19  # of the rows of all pairs of a step of few tokens
# The same of a step that is padded for a graph. Above, what all those rows take on their way costs more than a graph
# saves: at some 300 GB/s a fifth of a millisecond, in which Python launches a layer.
MAX_CAPTURED_BYTES = 2**26


@dataclass(frozen=True)
class SmallHandle:
    weights_TK: Tensor
    pair_of_row_P: Tensor  # of each row that this rank computed; -1 for the others
    pairs_per_rank: list[int]
    dtype: torch.dtype


@dataclass(frozen=True)
class Gathering:
    """A dispatch under way."""

    pending_NV: PendingTensor  # of each token its routing, as X values, and its row
    own_TK: Tensor  # physical experts
    weights_TK: Tensor
    is_small: bool
    exchange: Exchange
    step: StepInputs

    def wait(self) -> Arrived[ExchangeHandle | SmallHandle]:
        both_NV, exchange = self.pending_NV.wait(), self.exchange
        top_k = self.own_TK.shape[1]
        routing_size = top_k * self.own_TK.element_size() // both_NV.element_size()
        hidden_ND = both_NV[:, routing_size:]
        if both_NV.shape[1] * both_NV.element_size() % self.own_TK.element_size() == 0:
            experts_NK = both_NV.view(torch.int64)[:, :top_k]
        else:
            experts_NK = both_NV[:, :routing_size].flatten().view(torch.int64).view(-1, top_k)
        if self.is_small:
            pair_of_row_P, counts_e = exchange.pairs.order(experts_NK, exchange.own_keys)
            sizes = [num_tokens * top_k for num_tokens in self.step.tokens_per_rank]
            small_handle = SmallHandle(self.weights_TK, pair_of_row_P, sizes, both_NV.dtype)
            rows_PD = exchange.pairs.gather(hidden_ND, pair_of_row_P, top_k)
            expected_rows = exchange.expected_rows(self.step, top_k)
            tokens = PackedTokens(rows_PD, counts_e, has_spare_rows=True, expected_rows=expected_rows)
            return Arrived(tokens, small_handle)
        assignment = exchange.assign(self.own_TK, experts_NK, self.step)
        rows_RD = exchange.pairs.gather(hidden_ND, assignment.packed_pairs_R, top_k)
        handle = exchange.handle(assignment, self.weights_TK, both_NV.dtype)
        return Arrived(PackedTokens(rows_RD, assignment.counts_e), handle)


@dataclass(frozen=True)
class Returned:
    """A combine of a small step, whose outputs are here."""

    output_pD: Tensor
    pairs_p: Tensor
    handle: SmallHandle
    pairs: PairKernels

    def wait(self) -> Tensor:
        return self.pairs.weighted_sum(self.output_pD, self.pairs_p, self.handle.weights_TK, self.handle.dtype)


class AllGatherDispatcher:
    """All ranks' tokens come to every rank, which picks those of its experts. See `Dispatcher` for the contract.

    Every token's row travels to each other rank once. In large steps every pair's output travels back once; in small
    ones each rank sends a row for every pair.
    """

    def __init__(self, group: GroupCoordinator, placement: Placement, device: torch.device) -> None:
        self.group = group
        self.exchange = Exchange(group, placement, device)
        self.expert_copies = self.exchange.expert_copies

    def is_small(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> bool:
        """Whether a step has few tokens: a question that all ranks answer alike. Padded ones always count as such."""
        bytes_per_token = routing.experts_TK.shape[1] * hidden_TD.shape[1] * hidden_TD.element_size()
        return step.padding is not None or sum(step.tokens_per_rank) * bytes_per_token <= MAX_SMALL_BYTES

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Gathering:
        own_TK = self.exchange.choose(routing, step)
        # Each row brings its routing as so many values more, which are but bits: one collective instead of two.
        both_TV = self.exchange.pairs.join(own_TK, hidden_TD)
        # collective: all ep ranks
        pending_NV = self.group.begin_all_gather(both_TV, step.tokens_per_rank)
        is_small = self.is_small(hidden_TD, routing, step)
        return Gathering(pending_NV, own_TK, routing.weights_TK, is_small, self.exchange, step)

    def combine(self, output: Tensor, handle: ExchangeHandle | SmallHandle) -> ReturningOutput | Returned:
        if isinstance(handle, ExchangeHandle):
            return self.exchange.send_back(output, handle)
        pairs = self.exchange.pairs
        output_PD = pairs.scatter(output, handle.pair_of_row_P[: len(output)], sum(handle.pairs_per_rank))
        # collective: all ep ranks; a pair's output and the other ranks' zeros
        output_pD = self.group.reduce_scatter(output_PD, handle.pairs_per_rank)
        return Returned(output_pD, _all_pairs(len(output_pD), output_pD.device), handle, pairs)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return sum(tokens_per_rank) * bytes_per_token <= MAX_CAPTURED_BYTES


@functools.cache
def _all_pairs(num_pairs: int, device: torch.device) -> Tensor:
    """Each pair in its own place. It is never given up: graphs and graphs know it by its address."""
    return torch.arange(num_pairs, device=device)
