"""Pairs of a token and one of its experts: sorting, moving rows, and summing outputs."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.pairs.interface import Keys
from moeserve.ops.pairs.reference import TorchPairs

# S rows of a source, V values of a joined row


class CpuPairs:
    """`PairKernels` in C++. A weighted sum runs in plain torch if its result and its inputs differ in dtype."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self._reference = TorchPairs()
        self.weigh = self._reference.weigh

    def sort(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        order_P = torch.empty(keys_TK.numel(), dtype=torch.int64)
        counts = torch.empty(keys.num_counted, dtype=torch.int64)
        num_kept = self._native.sort_pairs(keys_TK, keys.first, keys.num_all, order_P, counts)
        return order_P if num_kept == order_P.shape[0] else order_P[:num_kept], counts

    def order(self, keys_TK: Tensor, keys: Keys, load: Tensor | None = None) -> tuple[Tensor, Tensor]:
        order_P = torch.empty(keys_TK.numel(), dtype=torch.int64)
        counts = torch.empty(keys.num_counted, dtype=torch.int64)
        self._native.order_pairs(keys_TK, keys.first, keys.num_all, order_P, counts)
        if load is not None:
            self.count(counts, load)
        return order_P, counts

    def count(self, counts: Tensor, totals: Tensor) -> None:
        self._native.add_counts(counts, totals)

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        rows_RD = new_empty(source_SD, indices_R.shape[0], source_SD.shape[1])
        self._native.gather_rows(source_SD, indices_R, divisor, rows_RD)
        return rows_RD

    def scatter(self, rows_RD: Tensor, indices_R: Tensor, num_rows: int) -> Tensor:
        out_PD = new_empty(rows_RD, num_rows, rows_RD.shape[1])
        self._native.scatter_rows(rows_RD, indices_R, out_PD)
        return out_PD

    def join(self, *parts_TX: Tensor) -> Tensor:
        if len(parts_TX) > 2:
            return self._reference.join(*parts_TX)
        first_TX, second_TD = parts_TX
        num_first = first_TX.shape[1] * first_TX.element_size() // second_TD.element_size()
        out_TV = second_TD.new_empty(len(second_TD), num_first + second_TD.shape[1])
        self._native.join_rows(first_TX, second_TD, out_TV)
        return out_TV

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        if output_RD.dtype != dtype:
            return self._reference.weighted_sum(output_RD, pair_of_row_R, weights_TK, dtype)
        total_TD = output_RD.new_empty(weights_TK.shape[0], output_RD.shape[1])
        self._native.weighted_sum(output_RD, pair_of_row_R, weights_TK, total_TD)
        return total_TD
