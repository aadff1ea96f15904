"""Rows as 8-bit floats (E4M3), with one scale for each block of 128 numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, D width of a row, B blocks of a row

BLOCK = 128  # numbers of a row that share a scale
LARGEST_CODE = tl.constexpr(448.0)  # of E4M3
# The largest number of a block is raised to this, so that the inverse of its scale is finite. Zeros stay zeros.
SMALLEST_RANGE = tl.constexpr(1e-30)
BLOCKS_AT_ONCE = 16  # blocks of one program, all in one row
NUM_WARPS = 4


def quantize_blocks(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each block of 128 numbers; its scale is the largest absolute number of the block over 448.

    A code is x * (448 / largest) in float32, rounded to the nearest E4M3, ties to even. A block of zeros has codes of
    zero and a tiny positive scale. NaN becomes a NaN code; a block with infinity holds NaN codes only.

    Memory moved: T * D * (element size + 1) + 4 * T * B bytes, which bounds the time; about 5 * T * D operations.

    Args:
        x_TD: [T, D] float32, bfloat16 or float16, rows contiguous. D need not be a multiple of 128.

    Returns:
        Codes [T, D] float8_e4m3fn, and scales [T, B] float32, B = ceil(D / 128): x is about code * scale.
    """
    num_rows, width = x_TD.shape
    assert x_TD.stride(1) == 1, f"strides {x_TD.stride()}"
    num_blocks = triton.cdiv(width, BLOCK)
    codes_TD = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scales_TB = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=x_TD.device)
    if codes_TD.numel() == 0:  # an empty grid cannot be launched
        return codes_TD, scales_TB
    quantize_blocks_kernel[(num_rows, triton.cdiv(num_blocks, BLOCKS_AT_ONCE))](
        x_TD,
        codes_TD,
        scales_TB,
        x_TD.stride(0),
        width,
        num_blocks,
        BLOCK=BLOCK,
        BLOCKS_AT_ONCE=BLOCKS_AT_ONCE,
        num_warps=NUM_WARPS,
    )
    return codes_TD, scales_TB


@triton.jit
def quantize_blocks_kernel(
    x_ptr,  # [T, D], rows row_stride elements apart
    codes_ptr,  # [T, D], contiguous
    scales_ptr,  # [T, B], contiguous
    row_stride,
    width,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row * stride can exceed 2**31
    blocks = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_inside = columns < width
    x = tl.load(x_ptr + row * row_stride + columns, mask=is_inside, other=0.0).to(tl.float32)

    largest = tl.maximum(tl.max(tl.abs(x), axis=1), SMALLEST_RANGE)
    # One exact division for each block: codes and scales have the same bits with every compiler.
    largest_code = tl.full([BLOCKS_AT_ONCE], LARGEST_CODE, tl.float32)
    scales = tl.div_rn(largest, largest_code)
    scaled = x * tl.div_rn(largest_code, largest)[:, None]
    # Clamp numbers that were rounded up beyond the largest code: some conversions turn them into NaN.
    scaled = tl.minimum(scaled, LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.maximum(scaled, -LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    tl.store(codes_ptr + row * width + columns, scaled.to(codes_ptr.dtype.element_ty), mask=is_inside)
    tl.store(scales_ptr + row * num_blocks + blocks, scales, mask=blocks < num_blocks)
