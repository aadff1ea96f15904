"""Pairs of a token and one of its experts in Triton: sorting, moving rows, and summing outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.ops.pairs.interface import Keys
from moeserve.ops.pairs.reference import TorchPairs
from moeserve.triton_kernels.pairs import gather_rows, order_pairs, scatter_rows, weigh_rows, weighted_sum

# S rows of a source


class TritonPairs:
    """`PairKernels` in Triton. Only `sort` waits for the GPU, because it needs the number of pairs."""

    def __init__(self) -> None:
        reference = TorchPairs()
        self.count, self.join = reference.count, reference.join

    def sort(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        pairs_P, counts = self.order(keys_TK, keys)
        return pairs_P[: int(counts.sum())], counts

    def order(self, keys_TK: Tensor, keys: Keys, load: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return order_pairs(keys_TK, keys.first, keys.num_counted, load)

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        return gather_rows(source_SD, indices_R, divisor)

    def scatter(self, rows_RD: Tensor, indices_R: Tensor, num_rows: int) -> Tensor:
        return scatter_rows(rows_RD, indices_R, num_rows)

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        return weighted_sum(output_RD, pair_of_row_R, weights_TK, dtype)

    def weigh(self, rows_RD: Tensor, weights_R: Tensor, num_counted: Tensor) -> Tensor:
        return weigh_rows(rows_RD, weights_R, num_counted)
