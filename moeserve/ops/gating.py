"""Rows times the sigmoid of a gate of their own, as one operation."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Protocol

from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops import backend
from moeserve.ops.native import NATIVE_DTYPES, require_native


class Gating(Protocol):
    """(gates_T1, rows_TD) -> sigmoid(gate) * row [T, D]. Both are contiguous, and of one dtype."""

    def __call__(self, gates_T1: Tensor, rows_TD: Tensor, /) -> Tensor: ...


def choose_gating(device: str) -> Gating:
    """The implementation for a device type."""
    if backend.of(device) == "native":
        return functools.partial(_native_gating, require_native())
    return torch_gating


def torch_gating(gates_T1: Tensor, rows_TD: Tensor) -> Tensor:
    """The reference, on any device. On the CPU a sigmoid's last bit may depend on how many there are."""
    return gates_T1.sigmoid() * rows_TD


def _native_gating(kernels: ModuleType, gates_T1: Tensor, rows_TD: Tensor) -> Tensor:
    if rows_TD.dtype not in NATIVE_DTYPES:
        return torch_gating(gates_T1, rows_TD)
    out_TD = new_empty(rows_TD, *rows_TD.shape)
    kernels.gate_rows(gates_T1, rows_TD, out_TD)
    return out_TD
