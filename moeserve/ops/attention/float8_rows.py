"""Rows of keys and values as 8-bit floats (E4M3) with a scale for each row: the format, and its reference in torch.

A scale is the largest absolute number of the row divided by 448, rounded up to 4 significant bits and stored as
bfloat16. Codes have 4 significant bits too, so code times scale is exact in bfloat16. Attention over such a cache
therefore equals attention over a bfloat16 cache of the dequantised numbers. A code is number / scale, rounded to the
nearest code, ties to even. Numbers below 2^-6 times the scale become zero, so there are no subnormal codes; numbers
beyond 57344 are clamped. If a row contains NaN or infinity, all its numbers become NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

# H numbers of a row; X any dimensions

LARGEST_CODE = 448.0
LEAST_NUMBER = 2.0**-6  # the smallest code above zero
LEAST_RANGE = 2.0**-100  # lower bound of a row's largest number when its scale is computed
LARGEST_RANGE = LARGEST_CODE * 2**7


def encode_rows(rows_XH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [X, H] as uint8, and the scales [X] bfloat16."""
    numbers_XH = rows_XH.float()
    range_X = numbers_XH.abs().amax(-1).clamp(LEAST_RANGE, LARGEST_RANGE) / LARGEST_CODE
    scale_X = ((range_X.view(torch.int32) + 0xFFFFF) & ~0xFFFFF).view(torch.float32)
    scaled_XH = (numbers_XH / scale_X[..., None]).clamp(-LARGEST_CODE, LARGEST_CODE)
    scaled_XH = torch.where(scaled_XH.abs() < LEAST_NUMBER, scaled_XH * 0, scaled_XH)
    code_XH = scaled_XH.to(torch.float8_e4m3fn).view(torch.uint8)
    is_finite_X = numbers_XH.isfinite().all(-1)
    code_XH = torch.where(is_finite_X[..., None], code_XH, 0)
    return code_XH, scale_X.bfloat16().masked_fill(~is_finite_X, torch.nan)


def decode_rows(code_XH: Tensor, scale_X: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantised rows [X, H] in `dtype`."""
    return (code_XH.view(torch.float8_e4m3fn).float() * scale_X[..., None].float()).to(dtype)
