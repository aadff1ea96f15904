"""Operations on pairs of a token and one of its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# S rows of a source, X width of a part


@dataclass(frozen=True)
class Keys:
    """The range of keys, such as expert numbers, by which pairs are sorted. Key -1 is padding."""

    num_counted: int  # number of consecutive keys from `first` on that count; pairs with other keys are left out
    first: int = 0
    num_known: int | None = None  # number of all keys, which start at 0; None: the counted keys are the last keys

    @property
    def num_all(self) -> int:
        return self.first + self.num_counted if self.num_known is None else self.num_known


class PairKernels(Protocol):
    """Operations that sort pairs of token and expert, move their rows, and sum outputs.

    Pair t * K + k is token t and its k-th expert.
    """

    def sort(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Return the pairs [R] ordered by key, then by pair, and the number of pairs of each key, both int64.

        Args:
            keys_TK: int64 or int32, [T, K] or [P].
            keys: the keys to count. Pairs with other keys are left out.
        """
        ...

    def order(self, keys_TK: Tensor, keys: Keys, load: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the results of `sort`, with the pairs padded by -1 to [P], so that no shape depends on the keys.

        Args:
            load: int64, to which the counts are added.
        """
        ...

    def count(self, counts: Tensor, totals: Tensor) -> None:
        """Add the counts of `sort` to the totals."""
        ...

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        """Return [R, D]: row r is row indices_R[r] // divisor of the source.

        Indices may be pairs, with K as the divisor. Rows with index -1 are undefined.
        """
        ...

    def scatter(self, rows_RD: Tensor, indices_R: Tensor, num_rows: int) -> Tensor:
        """Return [num_rows, D]: row r of the input is row indices_R[r] of the result. All other rows are zeros.

        Rows with index -1 are left out.
        """
        ...

    def join(self, *parts_TX: Tensor) -> Tensor:
        """Return the parts concatenated row by row as bytes, viewed in the dtype of the last part."""
        ...

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weighted sum of each token's outputs, [T, D] of `dtype`, added in float32 in the order of k.

        Pairs without a row and rows with pair -1 are skipped. `weights_TK` is float32.
        """
        ...

    def weigh(self, rows_RD: Tensor, weights_R: Tensor, num_counted: Tensor) -> Tensor:
        """Return [R, D]: each row times its weight, computed in float32 and rounded once to the dtype of the rows.

        Args:
            weights_R: float32.
            num_counted: [1] int32 or int64: number of leading rows that are used; results of later rows are undefined.
        """
        ...
