"""Dispatch by all-gather: every rank receives every token, in one collective for dispatch and one for combine.

A small step has shapes that do not depend on the routing: every rank has a row for each pair of all tokens, computes
its own, and reduce-scatters them with zeros in the other rows. So the host never waits between the collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.distributed.coordinator import GroupCoordinator, PendingTensor
from moeserve.expert_placement.placement import Placement
from moeserve.layers.context import ModelContext
from moeserve.moe.dispatch.base import Dispatched, PackedTokens
from moeserve.moe.dispatch.exchange import Exchange, ExchangeHandle, PendingExchange
from moeserve.moe.router import Routing
from moeserve.ops.interfaces import PairKernels
from moeserve.step_inputs import StepInputs

# T tokens of this rank, N tokens of all ranks, D model width, K experts per token, X values with the bits of K int64,
# V = X + D, P = N * K pairs of all ranks, p = T * K pairs of this rank, R pairs that this rank computes

MAX_SMALL_BYTES = 2**19  # the rows of all pairs of a small step
# The same for a step that is padded for a graph. Sending more takes longer than a graph saves: 0.2 ms at 300 GB/s, in
# which Python launches a layer.
MAX_CAPTURED_BYTES = 2**26


@dataclass(frozen=True)
class SmallHandle:
    weights_TK: Tensor
    pair_of_row_P: Tensor  # the pair of each row that this rank computes; -1 for the others
    pairs_per_rank: list[int]
    dtype: torch.dtype


@dataclass(frozen=True)
class PendingAllGather:
    """A dispatch in progress."""

    pending_NV: PendingTensor  # each token's routing, as X values, and its row
    own_TK: Tensor  # physical experts
    weights_TK: Tensor
    is_small: bool
    exchange: Exchange
    step: StepInputs

    def wait(self) -> Dispatched[ExchangeHandle | SmallHandle]:
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
            return Dispatched(tokens, small_handle)
        assignment = exchange.assign(self.own_TK, experts_NK, self.step)
        rows_RD = exchange.pairs.gather(hidden_ND, assignment.packed_pairs_R, top_k)
        handle = exchange.handle(assignment, self.weights_TK, both_NV.dtype)
        return Dispatched(PackedTokens(rows_RD, assignment.counts_e), handle)


@dataclass(frozen=True)
class SmallOutput:
    """A combine of a small step, whose outputs have arrived."""

    output_pD: Tensor
    pairs_p: Tensor
    handle: SmallHandle
    pairs: PairKernels

    def wait(self) -> Tensor:
        return self.pairs.weighted_sum(self.output_pD, self.pairs_p, self.handle.weights_TK, self.handle.dtype)


class AllGatherDispatcher:
    """Sends all tokens to every rank, which selects those of its experts. See `Dispatcher` for the contract.

    Each token's row is sent to every other rank once. In large steps each pair's output is sent back once; in small
    steps each rank sends a row for every pair.
    """

    def __init__(self, group: GroupCoordinator, placement: Placement, context: ModelContext) -> None:
        self.group = group
        self.exchange = Exchange(group, placement, context)
        self.expert_copies = self.exchange.expert_copies

    def is_small(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> bool:
        """True if a step has few tokens or is padded. The answer is the same on all ranks."""
        bytes_per_token = routing.experts_TK.shape[1] * hidden_TD.shape[1] * hidden_TD.element_size()
        return step.padding is not None or sum(step.tokens_per_rank) * bytes_per_token <= MAX_SMALL_BYTES

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> PendingAllGather:
        own_TK = self.exchange.choose(routing, step)
        # The routing is sent as additional values of each row: one collective instead of two.
        both_TV = self.exchange.pairs.join(own_TK, hidden_TD)
        # collective: all ep ranks
        pending_NV = self.group.begin_all_gather(both_TV, step.tokens_per_rank)
        is_small = self.is_small(hidden_TD, routing, step)
        return PendingAllGather(pending_NV, own_TK, routing.weights_TK, is_small, self.exchange, step)

    def combine(self, output: Tensor, handle: ExchangeHandle | SmallHandle) -> PendingExchange | SmallOutput:
        if isinstance(handle, ExchangeHandle):
            return self.exchange.send_back(output, handle)
        pairs = self.exchange.pairs
        output_PD = pairs.scatter(output, handle.pair_of_row_P[: len(output)], sum(handle.pairs_per_rank))
        # collective: all ep ranks; adds zeros of the other ranks to each pair's output
        output_pD = self.group.reduce_scatter(output_PD, handle.pairs_per_rank)
        return SmallOutput(output_pD, _all_pairs(len(output_pD), output_pD.device), handle, pairs)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return sum(tokens_per_rank) * bytes_per_token <= MAX_CAPTURED_BYTES


@functools.cache
def _all_pairs(num_pairs: int, device: torch.device) -> Tensor:
    """Return [p] indices. Never freed, because captured graphs read them at their address."""
    return torch.arange(num_pairs, device=device)
