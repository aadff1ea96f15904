"""Any dispatch, with the tokens that arrive laid out in slots: shapes that do not depend on the routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from moeserve.moe.dispatch.base import Arrived, Dispatcher, Handle, PackedTokens, Pending, PendingOutput, SlottedTokens
from moeserve.moe.router import Routing
from moeserve.step_inputs import StepInputs

# T tokens, D model width, R rows, e local experts, S slots of each


@dataclass(frozen=True)
class SlottedHandle(Generic[Handle]):
    handle: Handle  # of the dispatcher within
    slot_of_row_R: Tensor  # expert * S + slot


@dataclass(frozen=True)
class IntoSlots(Generic[Handle]):
    """A dispatch under way."""

    pending: Pending[Handle]
    num_slots: int

    def wait(self) -> Arrived[SlottedHandle[Handle]]:
        arrived = self.pending.wait()
        assert isinstance(arrived.tokens, PackedTokens)
        slot_of_row_R = slots_of_rows(arrived.tokens.counts_e, self.num_slots)
        tokens = into_slots(arrived.tokens, slot_of_row_R, self.num_slots)
        return Arrived(tokens, SlottedHandle(arrived.handle, slot_of_row_R))


class SlottedDispatcher(Generic[Handle]):
    """Another dispatcher, with `SlottedTokens` where that has `PackedTokens`.

    Args:
        within: what carries the tokens.
        num_slots: of each local expert. No expert may get more rows than that; the tokens of all ranks are enough,
            since a token chooses an expert once.
    """

    def __init__(self, within: Dispatcher[Handle], num_slots: int) -> None:
        self.within = within
        self.replicas = within.replicas
        self.num_slots = num_slots

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> IntoSlots[Handle]:
        return IntoSlots(self.within.dispatch(hidden_TD, routing, step), self.num_slots)

    def combine(self, output: Tensor, handle: SlottedHandle[Any]) -> PendingOutput:
        return self.within.combine(output.flatten(0, 1)[handle.slot_of_row_R], handle.handle)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return False  # the host makes sure that there are slots enough


def slots_of_rows(counts_e: Tensor, num_slots: int) -> Tensor:
    """Of each packed row: expert * num_slots + its place among the expert's rows."""
    assert bool((counts_e <= num_slots).all()), f"{counts_e.tolist()} rows for {num_slots} slots of each expert"
    num_experts, device = len(counts_e), counts_e.device
    expert_of_row_R = torch.arange(num_experts, device=device).repeat_interleave(counts_e)
    first_row_e = counts_e.cumsum(0) - counts_e
    rows_R = torch.arange(len(expert_of_row_R), device=device)
    return rows_R + (torch.arange(num_experts, device=device) * num_slots - first_row_e)[expert_of_row_R]


def into_slots(tokens: PackedTokens, slot_of_row_R: Tensor, num_slots: int) -> SlottedTokens:
    """The same tokens in slots."""
    num_experts, width = len(tokens.counts_e), tokens.rows_RD.shape[1]
    slots_eSD = tokens.rows_RD.new_zeros(num_experts, num_slots, width)
    slots_eSD.view(-1, width)[slot_of_row_R] = tokens.rows_RD[: len(slot_of_row_R)]
    return SlottedTokens(slots_eSD, tokens.counts_e, expected_rows=len(slot_of_row_R))
