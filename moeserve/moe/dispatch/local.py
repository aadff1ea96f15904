"""Dispatch where every expert lives on this rank: a sort by expert, and its inverse. Nothing travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.expert_placement.placement import Placement
from moeserve.moe.dispatch.base import Arrived, PackedTokens
from moeserve.moe.dispatch.expert_copies import ExpertCopies
from moeserve.moe.router import Routing
from moeserve.ops import backend
from moeserve.ops.pairs import Keys, choose_pairs
from moeserve.ops.products import Gather
from moeserve.step_inputs import StepInputs

# T tokens, D model width, K experts per token, R pairs that are not padding


@dataclass(frozen=True)
class LocalHandle:
    weights_TK: Tensor
    pair_of_row_R: Tensor  # row r computes pair t * K + k: token t, its k-th expert
    dtype: torch.dtype


@dataclass(frozen=True)
class Here:
    """A dispatch that has arrived already."""

    arrived: Arrived[LocalHandle]

    def wait(self) -> Arrived[LocalHandle]:
        return self.arrived


@dataclass(frozen=True)
class Done:
    """A combine that is complete already."""

    hidden_TD: Tensor

    def wait(self) -> Tensor:
        return self.hidden_TD


class LocalDispatcher:
    """The dispatcher of one rank. See `Dispatcher` for the contract."""

    def __init__(self, placement: Placement, device: torch.device) -> None:
        assert placement.num_ranks == 1
        self.expert_copies = ExpertCopies(placement, 0, (0,), device)
        self.pairs = choose_pairs(device.type)
        # On a GPU kernels fetch rows themselves, and no shape depends on the routing, so that nothing waits for it.
        self.fetches_late = backend.of(device.type) == "triton"
        (num_experts,) = placement.num_slots
        self.keys = Keys(num_experts)

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Here:
        experts_TK = self.expert_copies.choose(routing.experts_TK, first_token=0)
        top_k = experts_TK.shape[1]
        if self.fetches_late:
            pair_of_row_R, counts_e = self.pairs.order(experts_TK, self.keys)
            tokens = PackedTokens(hidden_TD, counts_e, has_spare_rows=True, gather=Gather(pair_of_row_R, top_k))
        else:
            pair_of_row_R, counts_e = self.pairs.sort(experts_TK, self.keys)
            tokens = PackedTokens(self.pairs.gather(hidden_TD, pair_of_row_R, top_k), counts_e)
        return Here(Arrived(tokens, LocalHandle(routing.weights_TK, pair_of_row_R, hidden_TD.dtype)))

    def combine(self, output: Tensor, handle: LocalHandle) -> Done:
        return Done(self.pairs.weighted_sum(output, handle.pair_of_row_R, handle.weights_TK, handle.dtype))

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return True
