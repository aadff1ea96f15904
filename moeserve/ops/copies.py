"""The choice among copies of experts as one operation. Knows tables, not where copies are."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops import backend
from moeserve.ops.native import require_native

# T tokens, K experts per token, E experts, W turns at most


class ChooseCopies(Protocol):
    """(experts_TK, copies_EW, num_turns_E, first_token) -> the copy of each choice [T, K]. All int64.

    Token t gets of expert e the copy in turn (first_token + t) % num_turns_E[e]; of expert -1 it gets -1.
    """

    def __call__(self, experts_TK: Tensor, copies_EW: Tensor, num_turns_E: Tensor, first_token: int, /) -> Tensor: ...


def choose_copies(device: str) -> ChooseCopies:
    """The implementation for a device type."""
    if backend.of(device) == "native":
        return functools.partial(_native_choose, require_native())
    return torch_choose


def torch_choose(experts_TK: Tensor, copies_EW: Tensor, num_turns_E: Tensor, first_token: int) -> Tensor:
    """The reference, on any device."""
    tokens_T1 = torch.arange(first_token, first_token + len(experts_TK), device=experts_TK.device)[:, None]
    known_TK = experts_TK.clamp(min=0)
    return copies_EW[known_TK, tokens_T1 % num_turns_E[known_TK]].where(experts_TK >= 0, -1)


def _native_choose(
    kernels: ModuleType, experts_TK: Tensor, copies_EW: Tensor, num_turns_E: Tensor, first_token: int
) -> Tensor:
    chosen_TK = torch.empty(experts_TK.shape, dtype=torch.int64)
    kernels.choose_copies(experts_TK, copies_EW, num_turns_E, first_token, chosen_TK)
    return chosen_TK
