"""8-bit floats (E4M3) with a scale for each block: 128 of a row of activations, or DeepSeek's squares of weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, D width of a row, B blocks of a row; O and I: rows and columns of a weight

BLOCK = 128  # numbers of a row that share a scale
LARGEST_CODE = tl.constexpr(448.0)  # of E4M3
# A block whose largest number is below this is scaled as if it were this: the inverse of a scale stays finite, and
# zeros stay zeros.
SMALLEST_RANGE = tl.constexpr(1e-30)
BLOCKS_AT_ONCE = 16  # of a row, in one program of `quantize_blocks`
ROWS_AT_ONCE = 32  # of one block of columns, in one program that dequantises
NUM_WARPS = 4


def quantize_blocks(x_TD: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Codes, and the scale of each block of a row: the largest absolute number of the block over 448.

    A code is x * (448 / largest) in float32, rounded to the nearest E4M3, to even between two. Blocks of zeros have
    codes of zero and a scale that is tiny, not zero. NaN keeps a NaN code; a block with infinity stands for NaN alone.

    Memory moved: T * D * (element size + 1) + 4 * T * B, which bounds the time; about 5 * T * D operations.

    Args:
        x_TD: [T, D], rows contiguous; float32, bfloat16 or float16. D need not be a multiple of the block.

    Returns:
        Codes [T, D] float8_e4m3fn, and scales [T, B] float32, B = ceil(D / block): x is about code * scale.
    """
    num_rows, width = x_TD.shape
    assert x_TD.stride(1) == 1, f"strides {x_TD.stride()}"
    assert block == triton.next_power_of_2(block), f"a block of {block} is not a power of two"
    num_blocks = triton.cdiv(width, block)
    codes_TD = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scales_TB = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=x_TD.device)
    if codes_TD.numel() == 0:  # a grid of no programs cannot be launched
        return codes_TD, scales_TB
    quantize_blocks_kernel[(num_rows, triton.cdiv(num_blocks, BLOCKS_AT_ONCE))](
        x_TD,
        codes_TD,
        scales_TB,
        x_TD.stride(0),
        width,
        num_blocks,
        BLOCK=block,
        BLOCKS_AT_ONCE=BLOCKS_AT_ONCE,
        num_warps=NUM_WARPS,
    )
    return codes_TD, scales_TB


def dequantize_blocks(
    codes_TD: Tensor, scales_TB: Tensor, dtype: torch.dtype = torch.bfloat16, block: int = BLOCK
) -> Tensor:
    """The numbers that codes and scales of `quantize_blocks` stand for: code * scale, rounded to the dtype.

    Memory moved: T * D * (1 + element size) + 4 * T * B.

    Returns:
        [T, D], new and contiguous.
    """
    num_rows, width = codes_TD.shape
    assert scales_TB.shape == (num_rows, triton.cdiv(width, block)), f"scales {tuple(scales_TB.shape)}"
    return _dequantize(codes_TD, scales_TB, dtype, rows_per_scale=1, columns_per_scale=block)


def dequantize_weight_blocks(weight_OI: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight that a checkpoint of DeepSeek-V3 (arXiv 2412.19437) holds as codes and `weight_scale_inv`.

    Memory moved: O * I * (1 + element size) and 4 bytes for each 128 x 128.

    Args:
        weight_OI: [O, I] float8_e4m3fn, rows contiguous.
        scale: [ceil(O / 128), ceil(I / 128)] float32: what the codes of a square are multiplied with.

    Returns:
        [O, I], new and contiguous.
    """
    num_rows, width = weight_OI.shape
    assert scale.shape == (triton.cdiv(num_rows, BLOCK), triton.cdiv(width, BLOCK)), f"scales {tuple(scale.shape)}"
    return _dequantize(weight_OI, scale, dtype, rows_per_scale=BLOCK, columns_per_scale=BLOCK)


def _dequantize(
    codes_OI: Tensor, scales: Tensor, dtype: torch.dtype, *, rows_per_scale: int, columns_per_scale: int
) -> Tensor:
    assert codes_OI.dtype == torch.float8_e4m3fn, f"codes in {codes_OI.dtype}"
    assert scales.dtype == torch.float32, f"scales in {scales.dtype}"
    assert codes_OI.stride(1) == 1, f"strides {codes_OI.stride()}"
    num_rows, width = codes_OI.shape
    output_OI = torch.empty(num_rows, width, dtype=dtype, device=codes_OI.device)
    if output_OI.numel() == 0:
        return output_OI
    # Rows come first: the other dimensions of a grid end at 65535.
    dequantize_kernel[(triton.cdiv(num_rows, ROWS_AT_ONCE), triton.cdiv(width, columns_per_scale))](
        codes_OI,
        scales.contiguous(),
        output_OI,
        codes_OI.stride(0),
        scales.shape[1],
        num_rows,
        width,
        ROWS_PER_SCALE=rows_per_scale,
        BLOCK_O=ROWS_AT_ONCE,
        BLOCK_I=columns_per_scale,
        num_warps=NUM_WARPS,
    )
    return output_OI


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
    row = tl.program_id(0).to(tl.int64)  # row * stride can pass 2**31
    blocks = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_inside = columns < width
    x = tl.load(x_ptr + row * row_stride + columns, mask=is_inside, other=0.0).to(tl.float32)

    largest = tl.maximum(tl.max(tl.abs(x), axis=1), SMALLEST_RANGE)
    # One exact division for each block: whatever compiles this, codes and scales have the same bits.
    largest_code = tl.full([BLOCKS_AT_ONCE], LARGEST_CODE, tl.float32)
    scales = tl.div_rn(largest, largest_code)
    scaled = x * tl.div_rn(largest_code, largest)[:, None]
    # What rounding brought above the largest code must not be NaN, which conversions make of it in places.
    scaled = tl.minimum(scaled, LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.maximum(scaled, -LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    tl.store(codes_ptr + row * width + columns, scaled.to(codes_ptr.dtype.element_ty), mask=is_inside)
    tl.store(scales_ptr + row * num_blocks + blocks, scales, mask=blocks < num_blocks)


@triton.jit
def dequantize_kernel(
    codes_ptr,  # [O, I], rows row_stride elements apart
    scales_ptr,  # [ceil(O / ROWS_PER_SCALE), ceil(I / BLOCK_I)], contiguous
    output_ptr,  # [O, I], contiguous
    row_stride,
    scales_per_row,
    num_rows,
    width,
    ROWS_PER_SCALE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,  # columns that share a scale
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)  # row * stride can pass 2**31
    block = tl.program_id(1)
    columns = block * BLOCK_I + tl.arange(0, BLOCK_I)
    is_row = rows < num_rows
    is_inside = is_row[:, None] & (columns < width)[None, :]
    scales = tl.load(scales_ptr + (rows // ROWS_PER_SCALE) * scales_per_row + block, mask=is_row, other=0.0)
    codes = tl.load(codes_ptr + rows[:, None] * row_stride + columns[None, :], mask=is_inside, other=0.0)
    numbers = codes.to(tl.float32) * scales[:, None]
    output = numbers.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + rows[:, None] * width + columns[None, :], output, mask=is_inside)
