"""Pairs of a token and one of its experts as three operations: sorting, gathering rows, and adding outputs up.

Pair p = t * K + k is token t and its k-th expert. Knows no dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops import backend
from moeserve.ops.native import NATIVE_DTYPES, require_native

# T tokens, D model width, K experts per token, P pairs = T * K, R pairs that are not padding, S rows of a source


@dataclass(frozen=True)
class Keys:
    """By which pairs are sorted: some neighbours of all keys, which begin with 0. Key -1 is padding."""

    num_counted: int
    first: int = 0
    num_known: int | None = None  # in all; None: these end with the counted ones

    @property
    def num_all(self) -> int:
        return self.first + self.num_counted if self.num_known is None else self.num_known


class PairKernels(Protocol):
    def sort(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Pairs [R] in the order of their keys, those of one key ascending; and how many each key has. Both int64.

        Args:
            keys_TK: int64 or int32, [T, K] or [P].
            keys: which of them count. Pairs with other keys are left out.
        """
        ...

    def order(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """`sort` in a shape that does not depend on the keys: after the pairs that count come -1, T * K in all."""
        ...

    def count(self, counts: Tensor, totals: Tensor) -> None:
        """Adds to each total the count of a key, as `sort` gives it."""
        ...

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        """[R, D]: row r is row indices_R[r] // divisor of the source. With K as divisor, indices may be pairs.

        A row whose index is -1 may hold anything.
        """
        ...

    def scatter(self, rows_RD: Tensor, indices_R: Tensor, num_rows: int) -> Tensor:
        """[num_rows, D]: row indices_R[r] is row r, but for indices of -1; all others are zeros."""
        ...

    def join(self, first_TX: Tensor, second_TD: Tensor) -> Tensor:
        """Rows of both, side by side, as so many values of the second's dtype: [T, V]."""
        ...

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Each token's outputs times their weights, added in float32 and in the order of k: [T, D] of a dtype.

        A pair without a row adds nothing.

        Args:
            weights_TK: float32.
        """
        ...

    def weigh(self, rows_RD: Tensor, weights_R: Tensor, num_counted: Tensor) -> Tensor:
        """[R, D]: each row times its weight in float32, rounded once, in the dtype of the rows.

        Args:
            weights_R: float32.
            num_counted: [1] int32 or int64: how many of the rows count; those after them may come to be anything.
        """
        ...


def choose_pairs(device: str) -> PairKernels:
    """The implementation for a device type."""
    match backend.of(device):
        case "native":
            return CpuPairs(require_native())
        case "triton":
            from moeserve.ops.gpu import GpuPairs

            return GpuPairs()
        case "torch":
            return TorchPairs()


class TorchPairs:
    """The reference, on any device."""

    def sort(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        own_P = keys_TK.flatten() - keys.first
        pairs_R = ((own_P >= 0) & (own_P < keys.num_counted)).nonzero().flatten()
        own_R = own_P[pairs_R]
        return pairs_R[own_R.argsort(stable=True)], own_R.bincount(minlength=keys.num_counted)

    def order(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        pairs_R, counts = self.sort(keys_TK, keys)
        return torch.cat([pairs_R, pairs_R.new_full((keys_TK.numel() - len(pairs_R),), -1)]), counts

    def count(self, counts: Tensor, totals: Tensor) -> None:
        totals += counts

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        return source_SD[indices_R // divisor]

    def scatter(self, rows_RD: Tensor, indices_R: Tensor, num_rows: int) -> Tensor:
        out_PD = rows_RD.new_zeros(num_rows, rows_RD.shape[1])
        counts_R = indices_R >= 0
        out_PD[indices_R[counts_R]] = rows_RD[counts_R]
        return out_PD

    def join(self, first_TX: Tensor, second_TD: Tensor) -> Tensor:
        return torch.cat([first_TX.contiguous().view(second_TD.dtype), second_TD], dim=1)

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        num_tokens, top_k = weights_TK.shape
        pairs_PD = output_RD.new_zeros(num_tokens * top_k, output_RD.shape[1])
        pairs_PD[pair_of_row_R] = output_RD
        pairs_TKD = pairs_PD.view(num_tokens, top_k, output_RD.shape[1])
        total_TD = pairs_TKD[:, 0].float() * weights_TK[:, :1]
        for k in range(1, top_k):
            total_TD += pairs_TKD[:, k].float() * weights_TK[:, k : k + 1]
        return total_TD.to(dtype)

    def weigh(self, rows_RD: Tensor, weights_R: Tensor, num_counted: Tensor) -> Tensor:
        return torch.mul(rows_RD, weights_R[:, None], out=torch.empty_like(rows_RD))


class CpuPairs:
    """C++ kernels; the reference for sums in float16, or from one dtype to another."""

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels
        self.reference = TorchPairs()
        self.weigh = self.reference.weigh

    def sort(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        order_P = torch.empty(keys_TK.numel(), dtype=torch.int64)
        counts = torch.empty(keys.num_counted, dtype=torch.int64)
        num_kept = self.kernels.sort_pairs(keys_TK, keys.first, keys.num_all, order_P, counts)
        return order_P if num_kept == order_P.shape[0] else order_P[:num_kept], counts

    def order(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        order_P = torch.empty(keys_TK.numel(), dtype=torch.int64)
        counts = torch.empty(keys.num_counted, dtype=torch.int64)
        self.kernels.order_pairs(keys_TK, keys.first, keys.num_all, order_P, counts)
        return order_P, counts

    def count(self, counts: Tensor, totals: Tensor) -> None:
        self.kernels.add_counts(counts, totals)

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        rows_RD = new_empty(source_SD, indices_R.shape[0], source_SD.shape[1])
        self.kernels.gather_rows(source_SD, indices_R, divisor, rows_RD)
        return rows_RD

    def scatter(self, rows_RD: Tensor, indices_R: Tensor, num_rows: int) -> Tensor:
        out_PD = new_empty(rows_RD, num_rows, rows_RD.shape[1])
        self.kernels.scatter_rows(rows_RD, indices_R, out_PD)
        return out_PD

    def join(self, first_TX: Tensor, second_TD: Tensor) -> Tensor:
        num_first = first_TX.shape[1] * first_TX.element_size() // second_TD.element_size()
        out_TV = second_TD.new_empty(len(second_TD), num_first + second_TD.shape[1])
        self.kernels.join_rows(first_TX, second_TD, out_TV)
        return out_TV

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype not in NATIVE_DTYPES or output_RD.dtype != dtype:
            return self.reference.weighted_sum(output_RD, pair_of_row_R, weights_TK, dtype)
        total_TD = output_RD.new_empty(weights_TK.shape[0], output_RD.shape[1])
        self.kernels.weighted_sum(output_RD, pair_of_row_R, weights_TK, total_TD)
        return total_TD
