"""Operations on single rows: rotary embedding, and the forms in which rows are passed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# F rotated pairs, I numbers of a row, B scales of a row


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of a step's rotary angles, shared by all layers with the same rotary embedding."""

    cosines: Tensor  # [T, F] float32
    sines: Tensor  # [T, F] float32
    is_interleaved: bool  # a pair is two neighbours (2f, 2f + 1); otherwise it is (f, f + F)


class ApplyRope(Protocol):
    """Apply a rotary embedding to the first 2 * F values of each head, in float32.

    Args:
        heads_TNH: may be overwritten; use only the result. May be a view of a projection.
        out_TNH: memory for the result, which may be the memory of the heads; None: the implementation chooses.

    Returns:
        [T, N, H] in the dtype of the heads.
    """

    def __call__(self, heads_TNH: Tensor, rotation: Rotation, out_TNH: Tensor | None = None, /) -> Tensor: ...


@dataclass(frozen=True)
class Float8Rows:
    """Rows quantised to 8-bit floats (E4M3), with a scale for each 128 numbers of a row: codes times scales."""

    codes: Tensor  # [..., I] float8_e4m3fn, rows contiguous
    scales: Tensor  # [..., B] float32, any strides
    dtype: torch.dtype  # dtype of the numbers before quantisation, and of the results of products
    rows: Tensor | None = None  # [..., I]: the numbers before quantisation, if another operation reads them

    def __len__(self) -> int:
        return len(self.codes)


Rows = Tensor | Float8Rows


FLOAT8_BLOCK = 128  # numbers of a row that share a scale


def plain_rows(rows: Rows) -> Tensor:
    """Return rows before quantisation if they were kept, otherwise dequantised rows."""
    if isinstance(rows, Tensor):
        return rows
    if rows.rows is not None:
        return rows.rows
    width = rows.codes.shape[-1]
    scales = rows.scales.repeat_interleave(FLOAT8_BLOCK, dim=-1)[..., :width]
    return (rows.codes.float() * scales).to(rows.dtype)


class GateRows(Protocol):
    """Return sigmoid(gate) * row, or softplus(gate) * row. `gates` is [T, 1] or [T, D]."""

    def __call__(self, gates: Tensor, rows_TD: Tensor, /, *, is_softplus: bool = False) -> Tensor: ...


class RowOperations(NamedTuple):
    """The operations on rows."""

    add: Callable[[Tensor, Tensor], Tensor]  # (a_TD, b_TD) -> their sum; both contiguous and of one dtype
    add_scaled: Callable[[Tensor, Tensor, Tensor], Tensor]  # (a_TD, b_TD, factor [1] float32) -> (a + b) * factor
    gate_rows: GateRows
    # (x_TD, weight_D, epsilon) -> [T, D] in the dtype of x; T may be several dimensions. `rms_norm_in_place`: into x.
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_in_place: Callable[[Tensor, Tensor, float], None]
    # (x_TD, weight_D, bias_D, epsilon) -> LayerNorm of x, [T, D]. `layer_norm_in_place` writes to x.
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    layer_norm_in_place: Callable[[Tensor, Tensor, Tensor, float], None]
    # (x_TD, update_TD, weight_D, epsilon) -> x + update, and this sum normalised. Inputs are not modified.
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    apply_rope: ApplyRope
    # Quantisation for products of weights in 8-bit blocks; None: such products are not supported. `quantize` returns
    # rows that are already in 8 bits unchanged. `quantize_rms_norm` takes (x_TD, update_TD or None, weight_D, epsilon,
    # True to keep the rows beside their codes), and returns x + update, and this sum normalised and quantised.
    quantize: Callable[[Rows], Float8Rows] | None = None
    quantize_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float, bool], tuple[Tensor, Float8Rows]] | None = None
