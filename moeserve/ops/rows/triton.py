"""Operations on single rows with Triton kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moeserve.ops.rows import reference
from moeserve.ops.rows.interface import Float8Rows, Rotation, Rows
from moeserve.triton_kernels import rms_norm as norms
from moeserve.triton_kernels.fp8 import quantize_blocks
from moeserve.triton_kernels.rotary import rotary


def apply_rope(heads_TNH: Tensor, rotation: Rotation, out_TNH: Tensor | None = None) -> Tensor:
    return rotary(heads_TNH, rotation.cosines, rotation.sines, rotation.is_interleaved, out_TNH)


def quantize_rms_norm(
    x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, epsilon: float, keeps_rows: bool
) -> tuple[Tensor, Float8Rows]:
    normed = norms.quantize_rms_norm(x_TD, update_TD, weight_D, epsilon, keeps_rows)
    return normed.sum_TD, Float8Rows(normed.codes_TD, normed.scales_TB, x_TD.dtype, normed.rows_TD)


def quantize_rows(rows: Rows, counts_e: Tensor | None = None, **activation: Any) -> Float8Rows:
    """Quantise rows [R, I], or slots [e, S, I] with counts, to 8 bits, unless they are quantised already.

    Args:
        counts_e: number of rows, or of slots of each weight, that are read and quantised; None: all.
        activation: activation to apply to the rows before quantisation; see `kernel_arguments`.
    """
    if isinstance(rows, Float8Rows):
        return rows
    if rows.ndim == 2:
        codes, scales = quantize_blocks(rows, counts_e=counts_e, **activation)
        return Float8Rows(codes, scales, rows.dtype)
    num_slots = rows.shape[1]
    codes, scales = quantize_blocks(rows.flatten(0, 1), counts_e=counts_e, num_slots=num_slots, **activation)
    return Float8Rows(codes.unflatten(0, (-1, num_slots)), scales.unflatten(0, (-1, num_slots)), rows.dtype)


OPERATIONS = reference.OPERATIONS._replace(
    rms_norm=norms.rms_norm,
    rms_norm_in_place=norms.rms_norm_in_place,
    add_rms_norm=norms.add_rms_norm,
    apply_rope=apply_rope,
    quantize=quantize_rows,
    quantize_rms_norm=quantize_rms_norm,
)
