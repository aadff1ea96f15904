"""The sum of two tensors as one operation."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops import backend
from moeserve.ops.native import NATIVE_DTYPES, require_native


class Addition(Protocol):
    """(a_TD, b_TD) -> their sum [T, D]. Both are contiguous, and of one dtype."""

    def __call__(self, a_TD: Tensor, b_TD: Tensor, /) -> Tensor: ...


def choose_addition(device: str) -> Addition:
    """The implementation for a device type."""
    if backend.of(device) == "native":
        return functools.partial(_native_add, require_native())
    return torch.add


def _native_add(kernels: ModuleType, a_TD: Tensor, b_TD: Tensor) -> Tensor:
    if a_TD.dtype not in NATIVE_DTYPES:
        return torch.add(a_TD, b_TD)
    out_TD = new_empty(a_TD, *a_TD.shape)
    kernels.add(a_TD, b_TD, out_TD)
    return out_TD
