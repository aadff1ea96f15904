"""Dispatch between ranks of one host, which read each other's rows in place, in memory that all ranks map.

Only the routing is sent. From the routing, each rank computes the place of every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moeserve.distributed.coordinator import GroupCoordinator, PendingTensor
from moeserve.layers.moe.dispatch.base import Dispatched, PackedTokens
from moeserve.layers.moe.dispatch.exchange import Exchange
from moeserve.layers.moe.router import Routing
from moeserve.ops.pairs.interface import PairKernels
from moeserve.ops.products.interface import RowGroups
from moeserve.step_inputs import StepInputs

# N tokens of all ranks, P pairs of all ranks that are not padding, R pairs that this rank computes, E slots of all
# ranks, e slots of this rank


@dataclass
class SharedRows:
    """Rows in memory that all ranks of a group map.

    Layers use the same rows one after another. The two halves of a step use different rows.
    """

    hidden_ND: Tensor  # hidden states of all ranks' tokens, rank by rank
    output_PD: Tensor  # outputs of all ranks' pairs, rank by rank, sorted by slot and then by pair

    @property
    def row_bytes(self) -> int:
        return self.hidden_ND.shape[1] * self.hidden_ND.element_size()

    def share_again(self, group: GroupCoordinator) -> None:
        """Use new memory of the same size, after the group was connected again. Collective: all ep ranks."""
        num_hidden, hidden_size = self.hidden_ND.shape
        self.hidden_ND, self.output_PD = _shared(
            group, num_hidden, len(self.output_PD), hidden_size, self.hidden_ND.dtype
        )

    def of_half(self, step: StepInputs, top_k: int) -> SharedRows:
        """Return the rows that begin with the first token of this half of a step."""
        return SharedRows(self.hidden_ND[step.rows_before :], self.output_PD[step.rows_before * top_k :])


def share_rows(
    group: GroupCoordinator, max_tokens: int, top_k: int, hidden_size: int, dtype: torch.dtype
) -> SharedRows:
    """Return memory for steps of up to `max_tokens` tokens of all ranks. Collective: all ep ranks.

    Raises:
        TransportUnavailable: the ranks cannot share memory, for example because they are on several hosts.
    """
    return SharedRows(*_shared(group, max_tokens, max_tokens * top_k, hidden_size, dtype))


def _shared(
    group: GroupCoordinator, num_hidden: int, num_outputs: int, hidden_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    memory = group.share_memory((num_hidden + num_outputs) * hidden_size * dtype.itemsize)
    rows = memory.view(dtype).view(-1, hidden_size)
    return rows[:num_hidden], rows[num_hidden:]


@dataclass(frozen=True)
class SharedOutputs:
    """The outputs of all ranks' pairs, and the indices of the outputs that belong to this rank's tokens."""

    weights_TK: Tensor
    pair_of_row_P: Tensor  # the own pair (t * K + k) of each output of all ranks; -1 for pairs of other ranks' tokens
    output_PD: Tensor  # outputs of all ranks' pairs, in shared memory


@dataclass(frozen=True)
class PendingSharedRows:
    """A dispatch in progress."""

    pending_NK: PendingTensor  # physical experts
    weights_TK: Tensor
    dispatcher: SharedRowsDispatcher
    step: StepInputs

    def wait(self) -> Dispatched:
        experts_NK, exchange = self.pending_NK.wait(), self.dispatcher.exchange
        rows = self.dispatcher.rows.of_half(self.step, experts_NK.shape[1])
        pairs_P, counts_E = exchange.pairs.sort(experts_NK, exchange.all_keys)
        first_slot, num_slots = exchange.own_keys.first, exchange.own_keys.num_counted
        counts_e = counts_E[first_slot : first_slot + num_slots]
        first_row, num_rows = int(counts_E[:first_slot].sum()), int(counts_e.sum())
        pairs_R = pairs_P[first_row : first_row + num_rows]
        rows_RD = exchange.pairs.gather(rows.hidden_ND[: len(experts_NK)], pairs_R, experts_NK.shape[1])
        first_token = sum(self.step.tokens_per_rank[: self.dispatcher.group.rank_in_group])
        own_P = pairs_P - first_token * experts_NK.shape[1]
        own_P.masked_fill_((own_P < 0) | (own_P >= self.weights_TK.numel()), -1)
        is_own_P = own_P >= 0
        num_own, num_here = int(is_own_P.sum()), int(is_own_P[first_row : first_row + num_rows].sum())
        self.dispatcher.group.num_bytes_sent += (num_rows + num_own - 2 * num_here) * rows.row_bytes
        outputs = SharedOutputs(self.weights_TK, own_P, rows.output_PD[: len(own_P)])
        out_RD = rows.output_PD[first_row : first_row + num_rows]
        tokens = PackedTokens(rows_RD, RowGroups(counts_e), out_RD=out_RD)
        return Dispatched(tokens, partial(self.dispatcher.combine, outputs))


@dataclass(frozen=True)
class PendingSharedOutput:
    """A combine in progress."""

    pending: PendingTensor  # complete when all ranks have written their outputs
    outputs: SharedOutputs
    pairs: PairKernels

    def wait(self) -> Tensor:
        self.pending.wait()
        outputs = self.outputs
        output_PD = outputs.output_PD
        return self.pairs.weighted_sum(output_PD, outputs.pair_of_row_P, outputs.weights_TK, output_PD.dtype)


class SharedRowsDispatcher:
    """Writes hidden states and outputs into shared memory, where all ranks read them. See `Dispatcher`.

    A row is written once and read in place; `all_to_all` copies each row three times more. Experts write their outputs
    to `PackedTokens.out_RD`, which is in shared memory.

    Each layer has two small all-gathers. The first carries the routing, after hidden states are written; the second is
    a barrier, after outputs are written. No rank overwrites rows that another rank still reads. A rank writes hidden
    states after the second all-gather of the previous layer, which all ranks join once they have read the hidden states
    of that layer. A rank writes outputs after the first all-gather, which all ranks join once they have read the
    outputs of the previous layer. The two halves of a step have different rows, and the same holds for each half.
    """

    takes_float8 = False

    def __init__(self, exchange: Exchange, rows: SharedRows) -> None:
        self.group = exchange.group
        self.rows = rows
        self.exchange = exchange
        self.expert_copies = exchange.expert_copies

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> PendingSharedRows:
        own_TK = self.exchange.choose(routing, step)
        first_token = step.rows_before + sum(step.tokens_per_rank[: self.group.rank_in_group])
        self.rows.hidden_ND[first_token : first_token + len(hidden_TD)] = hidden_TD
        # collective: all ep ranks
        pending_NK = self.group.begin_all_gather(own_TK, step.tokens_per_rank)
        return PendingSharedRows(pending_NK, routing.weights_TK, self, step)

    def combine(self, outputs: SharedOutputs, output: Tensor) -> PendingSharedOutput:
        """Begin the barrier after which all ranks may read the outputs of this rank's experts."""
        shared = self.rows.output_PD.untyped_storage()
        assert output.untyped_storage().data_ptr() == shared.data_ptr(), "outputs of experts are not in `out_RD`"
        # collective: all ep ranks
        pending = self.group.begin_all_gather(torch.empty(0, 1), [0] * self.group.world_size)
        return PendingSharedOutput(pending, outputs, self.exchange.pairs)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return False  # the host reads sizes
