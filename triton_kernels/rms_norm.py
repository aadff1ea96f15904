"""RMSNorm on a GPU: one program per row, the row in registers, one read and one write."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# T rows, D width of a row

MAX_WIDTH = 65536  # one program holds a whole row


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scales each row to unit mean square and multiplies it by the weight.

    In float32: x / sqrt(mean(x²) + eps); rounded to the dtype of x_TD; then times the weight, as transformers' Mixtral
    does. The sum over a row runs in an order fixed by D alone.

    Memory moved: (2 * T * D + D) * element size, which is what bounds the time for many rows.

    Args:
        x_TD: [..., D], float32, bfloat16 or float16; D at most 65536. Leading dimensions may be strided.
        weight_D: [D], same dtype and device.
        eps: added to the mean square.

    Returns:
        A new contiguous tensor of the shape and dtype of x_TD.
    """
    width = x_TD.shape[-1]
    assert weight_D.shape == (width,), f"{tuple(weight_D.shape)} weights for rows of {width}"
    assert weight_D.dtype == x_TD.dtype, f"weights in {weight_D.dtype}, rows in {x_TD.dtype}"
    assert width <= MAX_WIDTH, f"a row of {width} does not fit one program"

    rows_TD = x_TD.reshape(-1, width)
    if rows_TD.stride(-1) != 1:
        rows_TD = rows_TD.contiguous()
    output_TD = torch.empty(rows_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if output_TD.numel() == 0:  # a grid of no programs cannot be launched
        return output_TD.view(x_TD.shape)

    block_size = triton.next_power_of_2(width)
    rms_norm_kernel[(rows_TD.shape[0],)](
        rows_TD,
        weight_D.contiguous(),
        output_TD,
        rows_TD.stride(0),
        width,
        eps,
        BLOCK_D=block_size,
        **compile_options(block_size),
    )
    return output_TD.view(x_TD.shape)


def compile_options(block_size: int) -> dict[str, Any]:
    """How the kernel is compiled for rows of up to `block_size` values."""
    return {
        "num_warps": min(max(block_size // 512, 1), 16),  # up to 8192 values, 16 for each thread
        "enable_fp_fusion": False,  # squares are rounded before they are added, as torch does; the default varies
    }


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, D], rows row_stride elements apart
    weight_ptr,  # [D]
    output_ptr,  # [T, D], contiguous
    row_stride,
    width,
    eps,
    BLOCK_D: tl.constexpr,  # power of two, at least D
):
    row = tl.program_id(0).to(tl.int64)  # row * stride can pass 2**31
    columns = tl.arange(0, BLOCK_D)
    in_row = columns < width
    x = tl.load(x_ptr + row * row_stride + columns, mask=in_row, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0)

    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    normed = (x * scale).to(weight.dtype)
    tl.store(output_ptr + row * width + columns, normed * weight, mask=in_row)
