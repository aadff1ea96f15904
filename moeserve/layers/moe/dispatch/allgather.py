"""Dispatch by all-gather: every rank receives every token, in one collective for dispatch and one for combine.

A small step has shapes that do not depend on the routing, so the host never waits between the collectives. The outputs
of a small step are combined in one of two forms:

- *Sums of ranks*: a rank adds the weighted outputs of its own experts for each token and rounds, and the ranks add
  these sums. The exchanged bytes depend on the number of tokens only.
- *Rows of pairs*, if results must have the same bytes in every layout: a rank sends a row for each pair of all tokens,
  with zeros for pairs that other ranks compute, and the token's rank adds the outputs in top-k order.

With tensor-parallel experts, all steps count as small, and every rank computes all pairs. Rows of pairs are
then partial sums in float32. The ranks add them in the tree of `InputChunks`, so that the results have the same bytes
as the outputs of whole experts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moeserve.distributed.coordinator import GroupCoordinator, PendingTensor
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.base import Dispatched, Dispatcher, PendingDispatch, ReadyOutput, StepLimits
from moeserve.layers.moe.dispatch.exchange import Exchange
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.ops.pairs.interface import PairKernels
from moeserve.step_inputs import StepInputs

# N tokens of all ranks, X values of a token's routing, V = X + D, P = N * K pairs of all ranks, p = T * K pairs of
# this rank, R pairs that this rank computes

ROW_ALIGNMENT = 32  # bytes: GPU kernels read aligned rows faster


# Limits of small steps in the two forms. A graph saves the 0.2 ms in which Python launches a layer. 64 MiB are sent in
# this time at 300 GB/s. Rows of pairs are all sent. Sums of ranks send one row for the 8 pairs of a token.
ROWS_OF_PAIRS = StepLimits(eager=2**19, captured=2**26)
SUMS_OF_RANKS = StepLimits(eager=2**26, captured=2**29)
ALL_STEPS = StepLimits(eager=sys.maxsize, captured=sys.maxsize)


@dataclass(frozen=True)
class PendingAllGather:
    """A dispatch in progress."""

    pending_NV: PendingTensor
    own_TK: Tensor  # physical experts
    weights_TK: Tensor
    is_small: bool
    dispatcher: AllGatherDispatcher
    step: StepInputs

    def wait(self) -> Dispatched:
        both_NV, exchange = self.pending_NV.wait(), self.dispatcher.exchange
        top_k, pairs = self.own_TK.shape[1], exchange.pairs
        experts_NK = _columns(both_NV, 0, top_k, torch.int64)
        hidden_ND = both_NV[:, self.dispatcher.routing_size(top_k, both_NV.dtype) :]
        if self.is_small:
            pair_of_row_P, counts_e = pairs.order(experts_NK, exchange.own_keys)
            weights_XK = self.weights_TK
            if self.dispatcher.sends_sums:
                weights_XK = _columns(both_NV, experts_NK.element_size() * top_k, top_k, torch.float32)
            combine = self.dispatcher.combine_sums if self.dispatcher.sends_sums else self.dispatcher.combine_pairs
            way = partial(combine, weights_XK, pair_of_row_P, self.step.tokens_per_rank, both_NV.dtype)
            expected_rows = exchange.expected_rows(self.step, top_k)
            packed = exchange.pack(hidden_ND, pair_of_row_P, top_k, counts_e, expected_rows=expected_rows)
            return Dispatched(packed, way)
        assignment = exchange.assign(self.own_TK, experts_NK, self.step)
        packed = exchange.pack(hidden_ND, assignment.packed_pairs_R, top_k, assignment.counts_e)
        returns = exchange.returns(assignment, self.weights_TK, both_NV.dtype)
        return Dispatched(packed, partial(exchange.send_back, returns))


@dataclass(frozen=True)
class SmallOutput:
    """A combine of a small step, whose outputs of pairs have arrived."""

    output_pD: Tensor
    pairs_p: Tensor
    weights_TK: Tensor
    dtype: torch.dtype
    pairs: PairKernels

    def wait(self) -> Tensor:
        return self.pairs.weighted_sum(self.output_pD, self.pairs_p, self.weights_TK, self.dtype)


class AllGatherDispatcher:
    """Sends all tokens to every rank, which selects the tokens of its experts. See `Dispatcher` for the contract.

    Each token's row is sent to every other rank once. In large steps, each pair's output is sent back once. For small
    steps, see the module's docstring.
    """

    takes_float8 = False

    def __init__(self, group: GroupCoordinator, placement: Placement, context: BuildContext) -> None:
        """
        Args:
            placement: the placement of whole experts, or of slices of experts.
        """
        self.group = group
        is_sliced = placement.num_slices > 1
        # With slices, every rank computes the same pairs as a single rank would, so there is no placement.
        held = Placement.even(placement.num_logical, 1) if is_sliced else placement
        self.exchange = Exchange(group, held, context)
        self.expert_copies = self.exchange.expert_copies
        self.sends_sums = not context.is_batch_invariant
        self.small_steps = SUMS_OF_RANKS if self.sends_sums else ROWS_OF_PAIRS
        if is_sliced:
            self.small_steps = ALL_STEPS

    def is_small(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> bool:
        """True if a step has few tokens or is padded. The result is the same on all ranks."""
        bytes_per_token = routing.experts_TK.shape[1] * hidden_TD.shape[1] * hidden_TD.element_size()
        return step.padding is not None or sum(step.tokens_per_rank) * bytes_per_token <= self.small_steps.eager

    def routing_size(self, top_k: int, dtype: torch.dtype) -> int:
        """Return the number of values of `dtype` before each row: experts, then weights for sums, then alignment."""
        if not self.sends_sums:
            return top_k * torch.int64.itemsize // dtype.itemsize
        num_bytes = top_k * (torch.int64.itemsize + torch.float32.itemsize)
        return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT // dtype.itemsize

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> PendingAllGather:
        own_TK = self.exchange.choose(routing, step)
        # The routing is sent as additional values of each row: one collective instead of two.
        parts = [own_TK, hidden_TD]
        if self.sends_sums:
            num_bytes = own_TK.shape[1] * (own_TK.element_size() + routing.weights_TK.element_size())
            num_unused = self.routing_size(own_TK.shape[1], hidden_TD.dtype) - num_bytes // hidden_TD.element_size()
            parts = [own_TK, routing.weights_TK, hidden_TD[:, :1].expand(-1, num_unused), hidden_TD]
        both_TV = self.exchange.pairs.join(*parts)
        # collective: all ep ranks
        pending_NV = self.group.begin_all_gather(both_TV, step.tokens_per_rank)
        is_small = self.is_small(hidden_TD, routing, step)
        return PendingAllGather(pending_NV, own_TK, routing.weights_TK, is_small, self, step)

    def combine_sums(
        self,
        weights_NK: Tensor,
        pair_of_row_P: Tensor,
        tokens_per_rank: Sequence[int],
        dtype: torch.dtype,
        output: Tensor,
    ) -> ReadyOutput:
        """Combine the outputs of a small step by sums of ranks, as the module's docstring describes.

        Args:
            pair_of_row_P: the pair of each row that this rank computes; -1 in spare rows.
        """
        sum_ND = self.exchange.pairs.weighted_sum(output, pair_of_row_P[: len(output)], weights_NK, dtype)
        # collective: all ep ranks; adds the sums of all ranks for each token
        return ReadyOutput(self.group.reduce_scatter(sum_ND, tokens_per_rank))

    def combine_pairs(
        self,
        weights_TK: Tensor,
        pair_of_row_P: Tensor,
        tokens_per_rank: Sequence[int],
        dtype: torch.dtype,
        output: Tensor,
    ) -> SmallOutput:
        """Combine the outputs of a small step by rows of pairs. See `combine_sums` for the arguments."""
        pairs = self.exchange.pairs
        pairs_per_rank = [num_tokens * weights_TK.shape[1] for num_tokens in tokens_per_rank]
        output_PD = pairs.scatter(output, pair_of_row_P[: len(output)], sum(pairs_per_rank))
        # collective: all ep ranks; adds the zeros or the partial sums of other ranks to each pair's output
        output_pD = self.group.reduce_scatter(output_PD, pairs_per_rank, None if output_PD.dtype == dtype else dtype)
        return SmallOutput(output_pD, _all_pairs(len(output_pD), output_pD.device), weights_TK, dtype, pairs)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return sum(tokens_per_rank) * bytes_per_token <= self.small_steps.captured


class DispatcherBySize:
    """Dispatches small steps by all-gather, and all other steps by a dispatcher that sends fewer rows."""

    takes_float8 = False

    def __init__(self, small: AllGatherDispatcher, large: Dispatcher) -> None:
        """
        Args:
            large: a dispatcher over the exchange of `small`.
        """
        assert small.expert_copies is large.expert_copies
        self.small, self.large = small, large
        self.expert_copies = small.expert_copies

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> PendingDispatch:
        chosen = self.small if self.small.is_small(hidden_TD, routing, step) else self.large
        return chosen.dispatch(hidden_TD, routing, step)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return self.small.is_capturable(tokens_per_rank, bytes_per_token)


def _columns(both_NV: Tensor, first_byte: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Return [N, num_columns] numbers of `dtype`, which begin at `first_byte` of each row."""
    start, end = (byte // both_NV.element_size() for byte in (first_byte, first_byte + num_columns * dtype.itemsize))
    values_NX = both_NV[:, start:end]
    is_aligned = all(number * both_NV.element_size() % dtype.itemsize == 0 for number in (start, both_NV.shape[1]))
    return values_NX.view(dtype) if is_aligned else values_NX.flatten().view(dtype).view(-1, num_columns)


@functools.cache
def _all_pairs(num_pairs: int, device: torch.device) -> Tensor:
    """Return the indices 0 to p - 1, [p] int64. The tensor is never freed, because graphs read it at its address."""
    return torch.arange(num_pairs, device=device)
