"""Mixing of rows and heads with C++ kernels."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.mixing.interface import UNCHANGED, Affine


class CpuMixing:
    """`Mixing` with C++ kernels. The bytes of a row are the same in any batch."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native

    def add(self, a_TD: Tensor, of_a: Affine, b_TD: Tensor | None = None, of_b: Affine = UNCHANGED) -> Tensor:
        out_TD = new_empty(a_TD, *a_TD.shape)
        self._native.add_weighted(a_TD, *of_a, b_TD, *of_b, out_TD)
        return out_TD

    def gelu(self, x_TD: Tensor) -> Tensor:
        out_TD = new_empty(x_TD, *x_TD.shape)
        self._native.gelu(x_TD, out_TD)
        return out_TD

    def mix_heads(self, projected_TX: Tensor, convolved_TeH: Tensor, temperatures_G: Tensor) -> Tensor:
        out_TeH = new_empty(convolved_TeH, *convolved_TeH.shape)
        self._native.mix_heads(projected_TX, convolved_TeH, temperatures_G, out_TeH)
        return out_TeH

    def limit_lengths(self, heads_TNH: Tensor, limit: float, scale_NH: Tensor | None = None) -> Tensor:
        out_TNH = new_empty(heads_TNH, *heads_TNH.shape)
        self._native.limit_lengths(heads_TNH, scale_NH, limit, out_TNH)
        return out_TNH

    def attend_sums(
        self, sums_TSD: Tensor, num_sums: int, update_TD: Tensor | None, *, begins: bool, queries_QD: Tensor | None
    ) -> Tensor | None:
        out_TQD = None
        if queries_QD is not None:
            out_TQD = new_empty(sums_TSD, len(sums_TSD), *queries_QD.shape)
        self._native.attend_sums(sums_TSD, update_TD, queries_QD, out_TQD, num_sums=num_sums, begins=begins)
        return out_TQD
