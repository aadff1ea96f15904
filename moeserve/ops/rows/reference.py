"""Operations on single rows in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.rows.interface import Rotation, RowOperations

# T any number of leading dimensions, F rotated pairs


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x²) + epsilon), computed in float32 and rounded to the dtype of x_TD, times the weight.

    The order of operations is the same as in transformers, so that float32 results are equal to the last bit.
    """
    wide_TD = x_TD.to(torch.float32)
    mean_square_T1 = wide_TD.pow(2).mean(-1, keepdim=True)
    return weight_D * (wide_TD * torch.rsqrt(mean_square_T1 + epsilon)).to(x_TD.dtype)


def rms_norm_in_place(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> None:
    x_TD.copy_(rms_norm(x_TD, weight_D, epsilon))


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float) -> Tensor:
    return functional.layer_norm(x_TD, x_TD.shape[-1:], weight_D, bias_D, epsilon)


def layer_norm_in_place(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float) -> None:
    x_TD.copy_(layer_norm(x_TD, weight_D, bias_D, epsilon))


def add_rms_norm(x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    sum_TD = x_TD + update_TD
    return sum_TD, rms_norm(sum_TD, weight_D, epsilon)


def apply_rope(heads_TNH: Tensor, rotation: Rotation, out_TNH: Tensor | None = None) -> Tensor:
    """Rotate heads as `ApplyRope` describes. The heads are not modified unless they are also `out_TNH`."""
    num_pairs = rotation.cosines.shape[-1]
    cosines_T1F, sines_T1F = rotation.cosines[:, None], rotation.sines[:, None]
    rotated, kept = heads_TNH.split([2 * num_pairs, heads_TNH.shape[-1] - 2 * num_pairs], dim=-1)
    pair_shape, axis = ((num_pairs, 2), -1) if rotation.is_interleaved else ((2, num_pairs), -2)
    first_TNF, second_TNF = rotated.float().unflatten(-1, pair_shape).unbind(axis)
    pairs = (
        first_TNF * cosines_T1F - second_TNF * sines_T1F,
        second_TNF * cosines_T1F + first_TNF * sines_T1F,
    )
    rotated_TNH = torch.stack(pairs, dim=axis).flatten(-2).to(heads_TNH.dtype)
    if kept.shape[-1]:
        rotated_TNH = torch.cat([rotated_TNH, kept], dim=-1)
    return rotated_TNH if out_TNH is None else out_TNH.copy_(rotated_TNH)


def add_scaled(a_TD: Tensor, b_TD: Tensor, factor_1: Tensor) -> Tensor:
    """Return (a + b) * factor, rounded after each operation."""
    return ((a_TD + b_TD).float() * factor_1).to(a_TD.dtype)


def gate_rows(gates: Tensor, rows_TD: Tensor, *, is_softplus: bool = False) -> Tensor:
    """Multiply rows by gates, see `GateRows`. On a CPU a sigmoid's last bit may depend on the number of rows."""
    return (functional.softplus(gates) if is_softplus else gates.sigmoid()) * rows_TD


OPERATIONS = RowOperations(
    torch.add,
    add_scaled,
    gate_rows,
    rms_norm,
    rms_norm_in_place,
    layer_norm,
    layer_norm_in_place,
    add_rms_norm,
    apply_rope,
)
