"""Dispatch on one rank: a sort by expert and its inverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.base import Dispatched, PackedTokens, ReadyOutput
from moeserve.layers.moe.dispatch.expert_copies import ExpertCopies
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.ops import pairs
from moeserve.ops.pairs.interface import Keys
from moeserve.ops.products.interface import Gather, RowGroups
from moeserve.ops.rows.interface import Rows, plain_rows
from moeserve.step_inputs import StepInputs

# R pairs that are not padding


@dataclass(frozen=True)
class ReadyDispatch:
    """A complete dispatch."""

    dispatched: Dispatched

    def wait(self) -> Dispatched:
        return self.dispatched


class LocalDispatcher:
    """The dispatcher of one rank. See `Dispatcher` for the contract."""

    def __init__(self, placement: Placement, context: BuildContext, load_e: Tensor | None = None) -> None:
        """
        Args:
            load_e: see `DispatcherFactory.make`.
        """
        assert placement.num_ranks == 1
        self.expert_copies = ExpertCopies(placement, 0, (0,), context)
        self.pairs = pairs.make(context.backend)
        # GPU kernels gather rows themselves, so no shape depends on the routing and the host need not wait for it.
        self.gathers_late = context.backend.products_gather_rows
        self.takes_float8 = self.gathers_late
        (num_experts,) = placement.num_slots
        self.keys = Keys(num_experts)
        self.load_e = load_e if self.gathers_late else None

    def dispatch(self, hidden_TD: Rows, routing: Routing, step: StepInputs) -> ReadyDispatch:
        experts_TK = self.expert_copies.choose(routing.experts_TK, first_token=0)
        top_k = experts_TK.shape[1]
        if self.gathers_late:
            pair_of_row_R, counts_e = self.pairs.order(experts_TK, self.keys, self.load_e)
            groups = RowGroups(counts_e, has_spare_rows=True)
            tokens = PackedTokens(hidden_TD, groups, Gather(pair_of_row_R, top_k))
        else:
            pair_of_row_R, counts_e = self.pairs.sort(experts_TK, self.keys)
            gather = Gather(pair_of_row_R, top_k)
            tokens = PackedTokens(plain_rows(hidden_TD), RowGroups(counts_e), gather)
        combine = partial(self._combine, pair_of_row_R, routing.weights_TK, hidden_TD.dtype)
        return ReadyDispatch(Dispatched(tokens, combine, is_counted=self.load_e is not None))

    def _combine(self, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype, output: Tensor) -> ReadyOutput:
        """
        Args:
            pair_of_row_R: row r is pair t * K + k, which is token t with its k-th expert.
        """
        return ReadyOutput(self.pairs.weighted_sum(output, pair_of_row_R, weights_TK, dtype))

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return True
