"""Operations on single rows by Triton kernels."""

from __future__ import annotations

from torch import Tensor

from moeserve.ops.rows.interface import Float8Rows, Rotation
from moeserve.triton_kernels import rms_norm as norms
from moeserve.triton_kernels.rotary import rotary

# T tokens, D model width, N heads, H head size


def apply_rope(heads_TNH: Tensor, rotation: Rotation, out_TNH: Tensor | None = None) -> Tensor:
    return rotary(heads_TNH, rotation.cosines, rotation.sines, rotation.is_interleaved, out_TNH)


def quantize_rms_norm(
    x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, epsilon: float, keeps_rows: bool
) -> tuple[Tensor, Float8Rows]:
    normed = norms.quantize_rms_norm(x_TD, update_TD, weight_D, epsilon, keeps_rows)
    return normed.sum_TD, Float8Rows(normed.codes_TD, normed.scales_TB, x_TD.dtype, normed.rows_TD)
