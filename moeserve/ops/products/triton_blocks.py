"""Products of rows with weights in 8-bit blocks, computed by Triton kernels.

Rows are quantised first, unless they are quantised already, with a scale for each 128 numbers of a row. Results are
quantised too if only another product of 8-bit blocks reads them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeserve.ops.products.interface import Gather, OpenWeights, RowGroups
from moeserve.ops.products.triton import checked_options
from moeserve.ops.rows.interface import Float8Rows, Rows
from moeserve.ops.rows.triton import quantize_rows
from moeserve.triton_kernels.grouped_matmul import NUM_ARRIVALS, grouped_matmul, grouped_matmul_slots
from moeserve.triton_kernels.tuning import FP8_BLOCK

# C columns, F scales of a row of results


class TritonBlockProduct:
    """A `Product` in Triton. Calls must not overlap: the kernel's programs count arrivals in memory of this object."""

    def __init__(self, weights: OpenWeights) -> None:
        self._weight_eOI = weights.weight_eOI
        self._num_out_blocks = _num_out_blocks(weights)
        self._arrivals = weights.weight_eOI.new_zeros(NUM_ARRIVALS, dtype=torch.int32)
        self._options = checked_options(weights)

    def multiply(self, input_TI: Rows) -> Any:
        rows = quantize_rows(input_TI)
        scale_TF = _new_scales(rows.codes, len(rows), self._num_out_blocks)
        output_TC = grouped_matmul(
            rows.codes,
            self._weight_eOI,
            None,
            row_scale_SB=rows.scales,
            out_dtype=rows.dtype,
            out_scale_RF=scale_TF,
            arrivals=self._arrivals,
            **self._options,
        )
        return output_TC if scale_TF is None else Float8Rows(output_TC, scale_TF, rows.dtype)


class TritonBlockGroupedProduct:
    """A `GroupedProduct` in Triton."""

    def __init__(self, weights: OpenWeights) -> None:
        self._weight_eOI = weights.weight_eOI
        self._num_out_blocks = _num_out_blocks(weights)
        self._options = checked_options(weights)

    def multiply(
        self, rows_RI: Rows, groups: RowGroups, gather: Gather | None = None, out_RC: Tensor | None = None
    ) -> Any:
        assert out_RC is None, "these kernels allocate their results"
        rows = quantize_rows(rows_RI, groups.counts_e if groups.has_spare_rows and gather is None else None)
        num_rows = len(rows) if gather is None else len(gather.indices_R)
        scale_RF = _new_scales(rows.codes, num_rows, self._num_out_blocks)
        output_RC = grouped_matmul(
            rows.codes,
            self._weight_eOI,
            groups.counts_e,
            row_scale_SB=rows.scales,
            indices_R=None if gather is None else gather.indices_R,
            divisor=1 if gather is None else gather.divisor,
            out_dtype=rows.dtype,
            out_scale_RF=scale_RF,
            expected_rows=groups.expected_rows,
            **self._options,
        )
        return output_RC if scale_RF is None else Float8Rows(output_RC, scale_RF, rows.dtype)

    def multiply_slots(self, slots_eSI: Rows, groups: RowGroups) -> Any:
        slots = quantize_rows(slots_eSI, groups.counts_e)
        scale_eSF = _new_scales(slots.codes, *slots.codes.shape[:2], self._num_out_blocks)
        output_eSC = grouped_matmul_slots(
            slots.codes,
            self._weight_eOI,
            groups.counts_e,
            slot_scale_eSB=slots.scales,
            out_dtype=slots.dtype,
            out_scale_eSF=scale_eSF,
            expected_rows=groups.expected_rows,
            **self._options,
        )
        return output_eSC if scale_eSF is None else Float8Rows(output_eSC, scale_eSF, slots.dtype)


def _num_out_blocks(weights: OpenWeights) -> int:
    """Return the number of scales of a row of results; 0: results are not quantised."""
    return -(-weights.num_columns // FP8_BLOCK) if weights.feeds_blocks else 0


def _new_scales(codes: Tensor, *sizes: int) -> Tensor | None:
    """Return memory for the scales of results; None if results are not quantised."""
    return codes.new_empty(*sizes, dtype=torch.float32) if sizes[-1] else None
