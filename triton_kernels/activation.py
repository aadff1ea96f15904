"""Gated activations on a GPU, from rows that hold gates and ups side by side."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, C width of each half of a row

Activation = Literal["swiglu", "clamped_swiglu", "limited_swiglu"]
ACTIVATIONS = {None: 0, "swiglu": 1, "clamped_swiglu": 2, "limited_swiglu": 3}
BLOCK_C = 1024  # columns of one program
NUM_WARPS = 4  # 8 numbers for each thread, which are 16 bytes in bfloat16


def gated_activation(
    gate_up_TC2: Tensor, activation: Activation, *, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    """Compute the activation of gates and ups, where the first half of each row is the gate.

    "swiglu" is silu(gate) * up; "clamped_swiglu" is gate * sigmoid(alpha * gate) * (up + 1), the activation of gpt-oss,
    with the gate clamped to at most `limit` and up to ± `limit`; "limited_swiglu" is min(silu(gate), limit) * up, with
    up clamped to ± `limit` (Step-3.7). NaN stays NaN. Operations are float32, and each result is rounded as torch does.

    Memory moved: 3 * T * C * element size, which bounds the time; about 6 * T * C operations.

    Args:
        gate_up_TC2: [..., 2 * C] float32, bfloat16 or float16, rows contiguous.

    Returns:
        [..., C], new and contiguous.
    """
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
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK_C=BLOCK_C,
        num_warps=NUM_WARPS,
    )
    return output


@triton.jit
def gated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """Return the activation in the dtype of the gates, rounded after each operation as torch does."""
    dtype = gate.dtype
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if ACTIVATION == 2:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL).to(dtype).to(tl.float32)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL).to(dtype).to(tl.float32)
        share = tl.sigmoid((gate * alpha).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        up = (up + 1.0).to(dtype).to(tl.float32)
        gate = gate * share
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    if ACTIVATION == 3:
        gate = tl.minimum(gate.to(dtype).to(tl.float32), limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL).to(dtype).to(tl.float32)
    return (gate.to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def gated_activation_kernel(
    gate_up_ptr,  # [T, 2 * C], rows row_stride elements apart
    output_ptr,  # [T, C], contiguous
    row_stride,
    width,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,  # a value of ACTIVATIONS
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row * stride can exceed 2**31
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_inside = columns < width
    pointers = gate_up_ptr + row * row_stride + columns
    gate = tl.load(pointers, mask=is_inside, other=0.0)
    up = tl.load(pointers + width, mask=is_inside, other=0.0)
    tl.store(output_ptr + row * width + columns, gated(gate, up, alpha, limit, ACTIVATION), mask=is_inside)
