"""Activations on a GPU of rows that hold gates followed by ups, or only ups."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.sizes import ceil_div

# T tokens, C width of a result, O of a row: C, or 2 * C with gates

Activation = Literal["swiglu", "clamped_swiglu", "limited_swiglu", "cut_swiglu", "squared_relu"]
ACTIVATIONS = {None: 0, "swiglu": 1, "clamped_swiglu": 2, "limited_swiglu": 3, "cut_swiglu": 4, "squared_relu": 5}
UNGATED = tl.constexpr(5)  # values of ACTIVATIONS from here on have no gates
BLOCK_C = 1024  # columns of one program
NUM_WARPS = 4  # 8 numbers for each thread, which are 16 bytes in bfloat16


def num_parts_of(activation: Activation | None) -> int:
    """Return the number of parts of a row that an activation combines: two (gates and ups), or one."""
    return 2 if 0 < ACTIVATIONS[activation] < UNGATED.value else 1


def activate(rows_TO: Tensor, activation: Activation, *, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Compute the activation of gates and ups, where the first half of each row is the gates, or of only ups.

    "swiglu" is silu(gate) * up; "clamped_swiglu" is gate * sigmoid(alpha * gate) * (up + 1), the activation of gpt-oss,
    with the gate clamped to at most `limit` and up to ± `limit`; "limited_swiglu" is min(silu(gate), limit) * up, with
    up clamped to ± `limit` (Step-3.7); "cut_swiglu" is silu(min(gate, limit)) * up, with up clamped to ± `limit`
    (DeepSeek-V4); "squared_relu" is max(up, 0) ** 2, without gates. NaN stays NaN. Operations are float32, and each
    result is rounded as torch does.

    Memory moved: T * (O + C) * element size, which bounds the time; about 6 * T * C operations.

    Args:
        rows_TO: [..., O] float32, bfloat16 or float16, rows contiguous.

    Returns:
        [..., C], new and contiguous.
    """
    num_parts = num_parts_of(activation)
    width = rows_TO.shape[-1] // num_parts
    output = torch.empty(*rows_TO.shape[:-1], width, dtype=rows_TO.dtype, device=rows_TO.device)
    if output.numel() == 0:  # an empty grid cannot be launched
        return output
    rows_TO = rows_TO.reshape(-1, num_parts * width)
    activation_kernel[(rows_TO.shape[0], ceil_div(width, BLOCK_C))](
        rows_TO,
        output,
        rows_TO.stride(0),
        width,
        alpha,
        limit,
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK_C=BLOCK_C,
        num_warps=NUM_WARPS,
    )
    return output


@triton.jit
def squared_relu(up):
    """Return max(up, 0) ** 2 in the dtype of the ups."""
    positive = tl.maximum(up.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
    return (positive * positive).to(up.dtype)


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
        if ACTIVATION == 4:
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL).to(dtype).to(tl.float32)
        gate = gate / (1.0 + tl.exp(-gate))
    if ACTIVATION == 3:
        gate = tl.minimum(gate.to(dtype).to(tl.float32), limit, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == 3 or ACTIVATION == 4:
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL).to(dtype).to(tl.float32)
    return (gate.to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def activation_kernel(
    rows_ptr,  # [T, O], rows row_stride elements apart
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
    pointers = rows_ptr + row * row_stride + columns
    first = tl.load(pointers, mask=is_inside, other=0.0)
    if ACTIVATION < UNGATED:
        up = tl.load(pointers + width, mask=is_inside, other=0.0)
        result = gated(first, up, alpha, limit, ACTIVATION)
    else:
        result = squared_relu(first)
    tl.store(output_ptr + row * width + columns, result, mask=is_inside)
