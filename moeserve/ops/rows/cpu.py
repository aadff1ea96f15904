"""Operations on single rows with C++ kernels."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.rows.interface import Rotation, RowOperations


class CpuRows:
    """The C++ kernels that process each row independently. `RowOperations` describes the operations."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native

    def add(self, a_TD: Tensor, b_TD: Tensor) -> Tensor:
        out_TD = new_empty(a_TD, *a_TD.shape)
        self._native.add(a_TD, b_TD, out_TD)
        return out_TD

    def add_scaled(self, a_TD: Tensor, b_TD: Tensor, factor_1: Tensor) -> Tensor:
        out_TD = new_empty(a_TD, *a_TD.shape)
        self._native.add(a_TD, b_TD, out_TD, factor_1)
        return out_TD

    def gate_rows(self, gates: Tensor, rows_TD: Tensor, *, is_softplus: bool = False) -> Tensor:
        out_TD = new_empty(rows_TD, *rows_TD.shape)
        self._native.gate_rows(gates, rows_TD, out_TD, is_softplus)
        return out_TD

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        """Normalise the last of two or three dimensions, which must be contiguous.

        The input may be a view of a fused projection.
        """
        out_TD = torch.empty_like(x_TD)
        self._native.rms_norm(x_TD, weight_D, epsilon, out_TD)
        return out_TD

    def rms_norm_in_place(self, x_TD: Tensor, weight_D: Tensor, epsilon: float) -> None:
        self._native.rms_norm(x_TD, weight_D, epsilon, x_TD)

    def layer_norm(self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float) -> Tensor:
        out_TD = torch.empty_like(x_TD)
        self._native.layer_norm(x_TD, weight_D, bias_D, epsilon, out_TD)
        return out_TD

    def layer_norm_in_place(self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float) -> None:
        self._native.layer_norm(x_TD, weight_D, bias_D, epsilon, x_TD)

    def add_rms_norm(self, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        sum_TD, out_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
        self._native.add_rms_norm(x_TD, update_TD, weight_D, epsilon, sum_TD, out_TD)
        return sum_TD, out_TD

    def apply_rope(self, heads_TNH: Tensor, rotation: Rotation, out_TNH: Tensor | None = None) -> Tensor:
        out_TNH = heads_TNH if out_TNH is None else out_TNH
        self._native.apply_rope(heads_TNH, rotation.cosines, rotation.sines, rotation.is_interleaved, out_TNH)
        return out_TNH

    def operations(self) -> RowOperations:
        return RowOperations(
            self.add,
            self.add_scaled,
            self.gate_rows,
            self.rms_norm,
            self.rms_norm_in_place,
            self.layer_norm,
            self.layer_norm_in_place,
            self.add_rms_norm,
            self.apply_rope,
        )
