"""Rows as 8-bit floats (E4M3), with one scale for each block of 128 numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.activation import ACTIVATIONS, UNGATED, Activation, gated, num_parts_of, squared_relu
from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T tokens, D width of a row, C columns of a result: D, or D / 2 with a gated activation, B blocks of C, e experts

BLOCK = 128  # numbers of a row that share a scale
LARGEST_CODE = tl.constexpr(448.0)  # of E4M3
# The largest number of a block is raised to this, so that the inverse of its scale is finite. Zeros stay zeros.
SMALLEST_RANGE = tl.constexpr(1e-30)
BLOCKS_AT_ONCE = 16  # blocks of one program, all in one row
NUM_WARPS = 4
MAX_PROGRAMS = 2048  # where only the GPU knows the number of rows


def quantize_blocks(
    x_TD: Tensor,
    *,
    counts_e: Tensor | None = None,
    num_slots: int | None = None,
    activation: Activation | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    out_scale_TB: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise each block of 128 numbers; its scale is the largest absolute number of the block over 448.

    A code is x * (448 / largest) in float32, rounded to the nearest E4M3, ties to even. A block of zeros has codes of
    zero and a tiny positive scale. NaN becomes a NaN code; a block with infinity holds NaN codes only.

    Memory moved: T * (D * element size + C + 4 * B) bytes, which bounds the time; about 5 * T * C operations.

    Args:
        x_TD: [T, D] float32, bfloat16 or float16, rows contiguous. C need not be a multiple of 128.
        counts_e: int64 or int32, contiguous; only as many leading rows as all counts together are read and written.
            None: all rows.
        num_slots: with counts: rows are slots, as many for each expert; its first counts_e[i] ones count.
        activation: rows hold gates and ups side by side, or ups alone, and their activation is quantised, rounded to
            the dtype of x_TD as `activate` rounds it.
        out_scale_TB: memory for the scales, [T, B], contiguous.

    Returns:
        Codes [T, C] float8_e4m3fn, and scales [T, B] float32, B = ceil(C / 128): x is about code * scale.
    """
    num_rows, width = x_TD.shape
    num_columns = width // num_parts_of(activation)
    num_blocks = ceil_div(num_columns, BLOCK)
    codes_TC = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scales_TB = out_scale_TB
    if scales_TB is None:
        scales_TB = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=x_TD.device)
    if codes_TC.numel() == 0 or (counts_e is not None and len(counts_e) == 0):  # an empty grid cannot be launched
        return codes_TC, scales_TB
    num_programs = num_rows if counts_e is None else min(num_rows, MAX_PROGRAMS)
    quantize_blocks_kernel[(num_programs, ceil_div(num_blocks, BLOCKS_AT_ONCE))](
        x_TD,
        counts_e,
        codes_TC,
        scales_TB,
        x_TD.stride(0),
        num_rows,
        num_columns,
        num_blocks,
        0 if counts_e is None else len(counts_e),
        num_slots or 0,
        alpha,
        limit,
        ACTIVATION=ACTIVATIONS[activation],
        HAS_SLOTS=num_slots is not None,
        BLOCK=BLOCK,
        BLOCKS_AT_ONCE=BLOCKS_AT_ONCE,
        BLOCK_E=1 if counts_e is None else next_power_of_2(len(counts_e)),
        num_warps=NUM_WARPS,
    )
    return codes_TC, scales_TB


@triton.jit
def scale_blocks(x, AXIS: tl.constexpr):
    """Return numbers within the range of codes, to be rounded to them, and the scale of each block along an axis.

    `x` is float32 in two dimensions, with the 128 numbers of a block along `AXIS`.
    """
    largest = tl.maximum(tl.max(tl.abs(x), axis=AXIS), SMALLEST_RANGE)
    # One exact division for each block: codes and scales have the same bits with every compiler.
    largest_code = tl.full(largest.shape, LARGEST_CODE, tl.float32)
    scales = tl.div_rn(largest, largest_code)
    scaled = x * tl.expand_dims(tl.div_rn(largest_code, largest), AXIS)
    # Clamp numbers that were rounded up beyond the largest code: some conversions turn them into NaN.
    scaled = tl.minimum(scaled, LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.maximum(scaled, -LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    return scaled, scales


@triton.jit(do_not_specialize=["num_rows", "num_experts", "num_slots"])
def quantize_blocks_kernel(
    x_ptr,  # [T, D], rows row_stride elements apart
    counts_ptr,  # [e] int64 or int32, or None: all rows count
    codes_ptr,  # [T, C], contiguous
    scales_ptr,  # [T, B], contiguous
    row_stride,
    num_rows,  # T
    num_columns,
    num_blocks,
    num_experts,
    num_slots,  # slots of each expert; only if HAS_SLOTS
    alpha,
    limit,
    ACTIVATION: tl.constexpr,  # a value of ACTIVATIONS
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two, at least e
):
    num_counted = num_rows.to(tl.int64)
    if counts_ptr is not None:
        experts = tl.arange(0, BLOCK_E)
        counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0).to(tl.int64)
        ends = tl.cumsum(counts, 0)
        num_counted = tl.sum(counts, 0)
    blocks = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_inside = columns < num_columns
    for place in tl.range(tl.program_id(0), num_counted, tl.num_programs(0)):
        row = tl.full([], 0, tl.int64) + place  # row * stride can exceed 2**31
        if HAS_SLOTS:
            is_before = ends <= place
            row += tl.sum(tl.where(is_before, num_slots - counts, 0), 0)
        pointers = x_ptr + row * row_stride + columns
        x = tl.load(pointers, mask=is_inside, other=0.0)
        if ACTIVATION >= UNGATED:
            x = squared_relu(x)
        elif ACTIVATION:
            up = tl.load(pointers + num_columns, mask=is_inside, other=0.0)
            x = gated(x, up, alpha, limit, ACTIVATION)
        scaled, scales = scale_blocks(x.to(tl.float32), 1)
        tl.store(codes_ptr + row * num_columns + columns, scaled.to(codes_ptr.dtype.element_ty), mask=is_inside)
        tl.store(scales_ptr + row * num_blocks + blocks, scales, mask=blocks < num_blocks)
