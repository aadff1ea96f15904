"""Pairs of a token and one of its experts in plain torch: sorting, moving rows, and summing outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.ops.pairs.interface import Keys

# S rows of a source


class TorchPairs:
    """`PairKernels` in plain torch."""

    def sort(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        own_P = keys_TK.flatten() - keys.first
        pairs_R = ((own_P >= 0) & (own_P < keys.num_counted)).nonzero().flatten()
        own_R = own_P[pairs_R]
        return pairs_R[own_R.argsort(stable=True)], own_R.bincount(minlength=keys.num_counted)

    def order(self, keys_TK: Tensor, keys: Keys, load: Tensor | None = None) -> tuple[Tensor, Tensor]:
        pairs_R, counts = self.sort(keys_TK, keys)
        if load is not None:
            self.count(counts, load)
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

    def join(self, *parts_TX: Tensor) -> Tensor:
        return torch.cat([_in_dtype(part, parts_TX[-1].dtype) for part in parts_TX], dim=1)

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        num_tokens, top_k = weights_TK.shape
        pairs_PD = output_RD.new_zeros(num_tokens * top_k, output_RD.shape[1])
        counts_R = pair_of_row_R >= 0
        pairs_PD[pair_of_row_R[counts_R]] = output_RD[: len(counts_R)][counts_R]
        pairs_TKD = pairs_PD.view(num_tokens, top_k, output_RD.shape[1])
        total_TD = pairs_TKD[:, 0].float() * weights_TK[:, :1]
        for k in range(1, top_k):
            total_TD += pairs_TKD[:, k].float() * weights_TK[:, k : k + 1]
        return total_TD.to(dtype)

    def weigh(self, rows_RD: Tensor, weights_R: Tensor, num_counted: Tensor) -> Tensor:
        return torch.mul(rows_RD, weights_R[:, None], out=torch.empty_like(rows_RD))


def _in_dtype(part_TX: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of each row reinterpreted in another dtype."""
    if part_TX.dtype == dtype:
        return part_TX
    return part_TX.flatten().view(dtype).view(len(part_TX), part_TX.shape[1] * part_TX.element_size() // dtype.itemsize)
