"""The largest number of each row as one operation, which greedy sampling is."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops import backend
from moeserve.ops.native import NATIVE_DTYPES, require_native

# R rows, V width of a row


class RowMaximumKernel(Protocol):
    """rows_RV -> the largest number of each row, and its index [R] int64; of equal numbers the first.

    NaN is larger than any number. The largest numbers are of a type that holds them exactly.
    """

    def __call__(self, rows_RV: Tensor, /) -> tuple[Tensor, Tensor]: ...


@functools.cache
def choose_row_maximum(device: str) -> RowMaximumKernel:
    """The implementation for a device type."""
    match backend.of(device):
        case "native":
            return functools.partial(_native_row_maximum, require_native())
        case "triton":
            from moeserve.triton_kernels.sampling import row_maximum

            return row_maximum
        case "torch":
            return torch_row_maximum


def torch_row_maximum(rows_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The reference."""
    largest_R, indices_R = rows_RV.max(dim=-1)
    return largest_R, indices_R


def _native_row_maximum(kernels: ModuleType, rows_RV: Tensor) -> tuple[Tensor, Tensor]:
    if rows_RV.dtype not in NATIVE_DTYPES or rows_RV.stride(1) != 1:
        return torch_row_maximum(rows_RV)
    largest_R = torch.empty(len(rows_RV), dtype=torch.float32)
    indices_R = torch.empty(len(rows_RV), dtype=torch.int64)
    kernels.row_maximum(rows_RV, largest_R, indices_R)
    return largest_R, indices_R
