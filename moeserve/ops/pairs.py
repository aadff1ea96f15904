"""Pairs of a token and one of its experts as three operations: sorting, gathering rows, and adding outputs up.

Pair p = t * K + k is token t and its k-th expert. Knows no dispatcher.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops.native import NATIVE_DTYPES, native_kernels

# T tokens, D model width, K experts per token, P pairs = T * K, R pairs that are not padding, S rows of a source


class PairKernels(Protocol):
    def sort(self, keys_P: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
        """Pairs [R] in the order of their keys, those of one key ascending; and how many each key has. Both int64.

        Args:
            keys_P: int64, from 0 to num_keys - 1, or -1 for a pair that is left out.
            num_keys: how many keys there are.
        """
        ...

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        """[R, D]: row r is row indices_R[r] // divisor of the source. With K as divisor, indices may be pairs."""
        ...

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Each token's outputs times their weights, added in float32 and in the order of k: [T, D] of a dtype.

        A pair without a row adds nothing.

        Args:
            weights_TK: float32.
        """
        ...


def choose_pairs(device: str) -> PairKernels:
    """The implementation for a device type."""
    match device:
        case "cpu" if kernels := native_kernels():
            return CpuPairs(kernels)
        case "cpu" | "cuda" | "meta":
            return TorchPairs()
        case _:
            raise AssertionError(f"no operations on pairs for device {device!r}")


class TorchPairs:
    """The reference, on any device."""

    def sort(self, keys_P: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
        counts = (keys_P + 1).bincount(minlength=num_keys + 1)
        return keys_P.argsort(stable=True)[int(counts[0]) :], counts[1:]

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        return source_SD[indices_R // divisor]

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        num_tokens, top_k = weights_TK.shape
        pairs_PD = output_RD.new_zeros(num_tokens * top_k, output_RD.shape[1])
        pairs_PD[pair_of_row_R] = output_RD
        pairs_TKD = pairs_PD.view(num_tokens, top_k, output_RD.shape[1])
        total_TD = pairs_TKD[:, 0].float() * weights_TK[:, :1]
        for k in range(1, top_k):
            total_TD += pairs_TKD[:, k].float() * weights_TK[:, k : k + 1]
        return total_TD.to(dtype)


class CpuPairs:
    """C++ kernels; the reference for sums in float16, or from one dtype to another."""

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels
        self.reference = TorchPairs()

    def sort(self, keys_P: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
        order_P, counts = torch.empty_like(keys_P), torch.empty(num_keys, dtype=torch.int64)
        num_kept = self.kernels.sort_pairs(keys_P, order_P, counts)
        return order_P if num_kept == order_P.shape[0] else order_P[:num_kept], counts

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        rows_RD = source_SD.new_empty(indices_R.shape[0], source_SD.shape[1])
        self.kernels.gather_rows(source_SD, indices_R, divisor, rows_RD)
        return rows_RD

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype not in NATIVE_DTYPES or output_RD.dtype != dtype:
            return self.reference.weighted_sum(output_RD, pair_of_row_R, weights_TK, dtype)
        total_TD = output_RD.new_empty(weights_TK.shape[0], output_RD.shape[1])
        self.kernels.weighted_sum(output_RD, pair_of_row_R, weights_TK, total_TD)
        return total_TD
