"""Gated activations on a GPU, from rows that hold gates and ups side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, C width of each half of a row

BLOCK_C = 1024  # columns of one program
NUM_WARPS = 4  # 8 numbers for each thread, which are 16 bytes in bfloat16


def silu_multiply(gate_up_TC2: Tensor) -> Tensor:
    """Compute silu(gate) * up, where the first half of each row is the gate.

    Operations are float32. As in torch, results are rounded after silu and after the product.

    Memory moved: 3 * T * C * element size, which bounds the time; about 6 * T * C operations.

    Args:
        gate_up_TC2: [..., 2 * C] float32, bfloat16 or float16, rows contiguous.

    Returns:
        [..., C], new and contiguous.
    """
    return _launch(gate_up_TC2, is_clamped=False, alpha=1.0, limit=0.0)


def clamped_silu_multiply(gate_up_TC2: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Compute gate * sigmoid(alpha * gate) * (up + 1), the activation of gpt-oss.

    The gate is clamped to at most `limit`, up to ± `limit`; NaN stays NaN. Otherwise like `silu_multiply`.
    """
    return _launch(gate_up_TC2, is_clamped=True, alpha=alpha, limit=limit)


def _launch(gate_up_TC2: Tensor, *, is_clamped: bool, alpha: float, limit: float) -> Tensor:
    assert gate_up_TC2.shape[-1] % 2 == 0, f"rows of {gate_up_TC2.shape[-1]} have no halves"
    width = gate_up_TC2.shape[-1] // 2
    output = torch.empty(*gate_up_TC2.shape[:-1], width, dtype=gate_up_TC2.dtype, device=gate_up_TC2.device)
    if output.numel() == 0:  # an empty grid cannot be launched
        return output
    rows_TC2 = gate_up_TC2.reshape(-1, 2 * width)
    assert rows_TC2.stride(1) == 1, f"strides {rows_TC2.stride()}"
    gated_activation_kernel[(rows_TC2.shape[0], triton.cdiv(width, BLOCK_C))](
        rows_TC2,
        output,
        rows_TC2.stride(0),
        width,
        alpha,
        limit,
        IS_CLAMPED=is_clamped,
        BLOCK_C=BLOCK_C,
        num_warps=NUM_WARPS,
    )
    return output


@triton.jit
def gated_activation_kernel(
    gate_up_ptr,  # [T, 2 * C], rows row_stride elements apart
    output_ptr,  # [T, C], contiguous
    row_stride,
    width,
    alpha,
    limit,
    IS_CLAMPED: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row * stride can exceed 2**31
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_inside = columns < width
    dtype = output_ptr.dtype.element_ty
    pointers = gate_up_ptr + row * row_stride + columns
    gate = tl.load(pointers, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(pointers + width, mask=is_inside, other=0.0).to(tl.float32)
    if IS_CLAMPED:
        # Round after each operation, as torch does.
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL).to(dtype).to(tl.float32)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL).to(dtype).to(tl.float32)
        share = tl.sigmoid((gate * alpha).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        up = (up + 1.0).to(dtype).to(tl.float32)
        gated = gate * share
    else:
        gated = gate / (1.0 + tl.exp(-gate))
    tl.store(output_ptr + row * width + columns, (gated.to(dtype).to(tl.float32) * up).to(dtype), mask=is_inside)
