"""RMSNorm on a GPU, alone or after an addition, also quantised. Rows are in registers and read from memory once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.fp8 import BLOCK, scale_blocks
from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T rows (any number of leading dimensions), D width of a row, B blocks of a row; O outer and I inner dimension of the
# rows, T = O * I

MAX_WIDTH = 65536  # one program holds a whole row


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Scale each row to unit mean square and multiply it by the weight.

    x / sqrt(mean(x²) + epsilon) is computed in float32, rounded to the dtype of x_TD and then multiplied by the weight,
    as in the Mixtral of transformers. The order of the sum over a row depends on D alone.

    Memory moved: (2 * T * D + D) * element size, which bounds the time for many rows. About 4 * T * D operations.

    Args:
        x_TD: [..., D] float32, bfloat16 or float16; D at most 65536. Leading dimensions may be strided.
        weight_D: [D], contiguous, same dtype and device.
        epsilon: added to the mean square.

    Returns:
        [..., D], new and contiguous, same dtype.
    """
    output_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, None, weight_D, epsilon, output_TD)
    return output_TD


def rms_norm_in_place(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> None:
    """Write the result of `rms_norm` to x_TD.

    Args:
        x_TD: [T, D] or [T, heads, D], which may be a view of a fused projection; the last dimension is contiguous.
    """
    assert x_TD.ndim <= 3 or x_TD.is_contiguous(), f"strides {x_TD.stride()} of {x_TD.ndim} dimensions"
    assert x_TD.stride(-1) == 1, "the result would be written to a copy"
    _launch(x_TD, None, weight_D, epsilon, x_TD)


def add_rms_norm(x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Add, and normalise the rounded sum, as two separate operations would.

    Memory moved: (4 * T * D + D) * element size; two operations would move (5 * T * D + D).

    Args:
        x_TD, update_TD: [..., D], same shape and dtype. They are not modified.
        weight_D, epsilon: see `rms_norm`.

    Returns:
        x_TD + update_TD, and the `rms_norm` of that sum; both contiguous.
    """
    sum_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    output_TD = torch.empty_like(sum_TD)
    _launch(x_TD, update_TD, weight_D, epsilon, output_TD, sum_TD)
    return sum_TD, output_TD


@dataclass(frozen=True)
class QuantizedNorm:
    """Normalised rows in 8 bits, as `quantize_blocks` returns them."""

    sum_TD: Tensor  # what was normalised
    codes_TD: Tensor
    scales_TB: Tensor
    rows_TD: Tensor | None  # the normalised rows themselves, if they are kept


def quantize_rms_norm(
    x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, epsilon: float, keeps_rows: bool
) -> QuantizedNorm:
    """Compute `add_rms_norm`, or `rms_norm` without an update, and quantise its result in the same launch.

    Memory moved: 2 * T * D * element size for the addition, as much again if it is written, T * D for the codes, and
    T * D * element size for rows that are kept.

    Args:
        x_TD: [T, D]; see `add_rms_norm`.
        keeps_rows: also return the rows that were quantised.
    """
    shape, dtype, device = x_TD.shape, x_TD.dtype, x_TD.device
    sum_TD = None if update_TD is None else torch.empty(shape, dtype=dtype, device=device)
    output_TD = torch.empty(shape, dtype=dtype, device=device) if keeps_rows else None
    codes_TD = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    scales_TB = torch.empty(shape[0], ceil_div(shape[1], BLOCK), dtype=torch.float32, device=device)
    _launch(x_TD, update_TD, weight_D, epsilon, output_TD, sum_TD, codes_TD, scales_TB)
    return QuantizedNorm(x_TD if sum_TD is None else sum_TD, codes_TD, scales_TB, output_TD)


def block_sizes(width: int) -> dict[str, int]:
    """Return the rows of one program and the power of two that holds one row.

    They depend on the width alone, and so does the order of the sum over a row.
    """
    block_width = max(next_power_of_2(width), BLOCK)
    return {"BLOCK_T": max(1024 // block_width, 1), "BLOCK_D": block_width}


def compile_options(block_width: int) -> dict[str, Any]:
    """Return the options that the kernel is compiled with, for rows of up to `block_width` values."""
    return {
        "num_warps": min(max(block_width // 512, 2), 16),  # 16 values for each thread, up to 8192 values
        "enable_fp_fusion": False,  # squares are rounded before they are added, as in torch; the default varies
    }


@functools.cache
def _options(width: int) -> dict[str, Any]:
    """Return all compile-time arguments and options for rows of this width."""
    assert width <= MAX_WIDTH, f"a row of {width} does not fit one program"
    sizes = block_sizes(width)
    return {**sizes, **compile_options(sizes["BLOCK_D"])}


def _as_rows(x_TD: Tensor) -> tuple[Tensor, int, int, int]:
    """Return the rows [O, I, D] as memory with contiguous rows, I, and the strides of O and I.

    With two strides, the heads of a fused projection need no copy.
    """
    if x_TD.stride(-1) != 1:
        x_TD = x_TD.contiguous()
    if x_TD.ndim == 2:
        stride = x_TD.stride(0)
        return x_TD, 1, stride, stride
    if x_TD.ndim != 3:
        x_TD = x_TD.reshape(-1, 1, x_TD.shape[-1])
    outer_stride, inner_stride, _ = x_TD.stride()
    return x_TD, x_TD.shape[1], outer_stride, inner_stride


def _launch(
    x_TD: Tensor,
    update_TD: Tensor | None,
    weight_D: Tensor,
    epsilon: float,
    output_TD: Tensor | None,
    sum_TD: Tensor | None = None,
    codes_TD: Tensor | None = None,
    scales_TB: Tensor | None = None,
) -> None:
    """Launch the kernel. Results are contiguous, except that the output may be the rows themselves."""
    num_numbers, width = x_TD.numel(), x_TD.shape[-1]
    if num_numbers == 0:  # an empty grid cannot be launched
        return
    rows, num_inner, outer_stride, inner_stride = _as_rows(x_TD)
    num_rows, options = num_numbers // width, _options(width)
    written_strides = (outer_stride, inner_stride) if output_TD is x_TD else (num_inner * width, width)
    update_outer_stride = update_inner_stride = 0
    if update_TD is not None:
        update_TD, _, update_outer_stride, update_inner_stride = _as_rows(update_TD)
    rms_norm_kernel[(ceil_div(num_rows, options["BLOCK_T"]),)](
        rows,
        update_TD,
        weight_D,
        sum_TD,
        output_TD,
        codes_TD,
        scales_TB,
        num_rows,
        num_inner,
        width,
        outer_stride,
        inner_stride,
        update_outer_stride,
        update_inner_stride,
        *written_strides,
        epsilon,
        **options,
    )


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,  # [O, I, D]
    update_ptr,  # [O, I, D], or None without an addition
    weight_ptr,  # [D]
    sum_ptr,  # [O, I, D] with the strides of the output, or None without an addition
    output_ptr,  # [O, I, D], may be x; None: only codes are written
    codes_ptr,  # [T, D] E4M3, contiguous, or None: rows are not quantised
    scales_ptr,  # [T, B] float32, contiguous, or None
    num_rows,  # O * I
    num_inner,
    width,
    x_outer_stride,
    x_inner_stride,
    update_outer_stride,
    update_inner_stride,
    output_outer_stride,
    output_inner_stride,
    epsilon,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two, at least D
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # row * stride can exceed 2**31
    outer, inner = rows // num_inner, rows % num_inner
    columns = tl.arange(0, BLOCK_D)
    is_column = columns < width
    is_inside = (rows < num_rows)[:, None] & is_column[None, :]

    x_offsets = (outer * x_outer_stride + inner * x_inner_stride)[:, None] + columns[None, :]
    output_offsets = (outer * output_outer_stride + inner * output_inner_stride)[:, None] + columns[None, :]
    x = tl.load(x_ptr + x_offsets, mask=is_inside, other=0.0).to(tl.float32)
    if update_ptr is not None:
        update_offsets = (outer * update_outer_stride + inner * update_inner_stride)[:, None] + columns[None, :]
        update = tl.load(update_ptr + update_offsets, mask=is_inside, other=0.0).to(tl.float32)
        rounded = (x + update).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + output_offsets, rounded, mask=is_inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)[None, :]

    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + epsilon)[:, None]
    normed = (x * scale).to(weight.dtype)
    normed = normed * weight
    if output_ptr is not None:
        tl.store(output_ptr + output_offsets, normed, mask=is_inside)
    if codes_ptr is not None:
        NUM_BLOCKS: tl.constexpr = BLOCK_D // 128
        in_blocks = tl.reshape(normed.to(tl.float32), (BLOCK_T * NUM_BLOCKS, 128))  # zeros beyond the width
        scaled, scales = scale_blocks(in_blocks, 1)
        codes = tl.reshape(scaled, (BLOCK_T, BLOCK_D)).to(codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + rows[:, None] * width + columns[None, :], codes, mask=is_inside)
        num_blocks = tl.cdiv(width, 128)
        blocks = tl.arange(0, NUM_BLOCKS)
        scale_ptrs = scales_ptr + rows[:, None] * num_blocks + blocks[None, :]
        is_block = (rows < num_rows)[:, None] & (blocks < num_blocks)[None, :]
        tl.store(scale_ptrs, tl.reshape(scales, (BLOCK_T, NUM_BLOCKS)), mask=is_block)
