"""Products of rows with one weight on a GPU, with a fixed order of sums: chunks of inputs, added in a tree.

The order does not depend on the number of rows or on the number of ranks that divide the chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.sizes import ceil_div

# T rows, I inputs, O outputs

MAX_CHUNKS = 8
OPTIONS = {"num_warps": 8, "num_stages": 3}


def chunked_matmul(
    rows_TI: Tensor,
    weight_OI: Tensor,
    *,
    chunk_inputs: int | None = None,
    bias_O: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute row @ weight.T + bias. `InputChunks` describes the order of additions.

    Products and sums are float32, also of float32 inputs; results are rounded once.

    Memory moved: O * I values of the weight for every 64 rows; I values of each row for every 64 outputs, from the L2
    cache; T * O results. Operations: 2 * T * O * I.

    Args:
        rows_TI: [T, I] bfloat16, float16 or float32; rows may be strided.
        weight_OI: [O, I], same dtype, contiguous.
        chunk_inputs: inputs of each chunk but the last, at most 8 chunks; None: one chunk.
        bias_O: [O], added to the sum of the first chunk.
        out_dtype: dtype of the results; None: that of the rows.

    Returns:
        [T, O]
    """
    (num_rows, num_inputs), num_outputs = rows_TI.shape, len(weight_OI)
    chunk_inputs = chunk_inputs or max(num_inputs, 1)
    num_chunks = max(1, -(-num_inputs // chunk_inputs))
    assert weight_OI.shape == (num_outputs, num_inputs), f"rows of {num_inputs}, weights {tuple(weight_OI.shape)}"
    assert weight_OI.is_contiguous()
    assert weight_OI.dtype == rows_TI.dtype, f"weights in {weight_OI.dtype}, rows in {rows_TI.dtype}"
    assert num_chunks <= MAX_CHUNKS, f"{num_chunks} chunks"
    assert num_outputs * num_inputs < 2**31, f"a weight of {num_outputs} x {num_inputs}"  # its offsets are 32 bits
    output_TO = torch.empty(num_rows, num_outputs, dtype=out_dtype or rows_TI.dtype, device=rows_TI.device)
    if output_TO.numel() == 0:
        return output_TO
    rows_TI = rows_TI if rows_TI.stride(1) == 1 else rows_TI.contiguous()
    constants = kernel_constants(rows_TI.dtype)
    grid = ceil_div(num_outputs, constants["BLOCK_N"]), ceil_div(num_rows, constants["BLOCK_M"])
    chunked_matmul_kernel[grid](
        rows_TI,
        weight_OI,
        bias_O,
        output_TO,
        rows_TI.stride(0),
        num_rows,
        num_outputs,
        num_inputs,
        CHUNK=chunk_inputs,
        NUM_CHUNKS=num_chunks,
        **constants,
        **OPTIONS,
    )
    return output_TO


def kernel_constants(dtype: torch.dtype) -> dict[str, Any]:
    """Return the tile sizes of the kernel, which are the same for all numbers of rows."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "INPUT_PRECISION": "ieee"}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "INPUT_PRECISION": "tf32"}


@triton.jit(do_not_specialize=["num_rows"])
def chunked_matmul_kernel(
    rows_ptr,  # [T, I], rows row_stride elements apart
    weight_ptr,  # [O, I], contiguous
    bias_ptr,  # [O], or None
    output_ptr,  # [T, O], contiguous
    row_stride,
    num_rows,
    num_outputs,
    num_inputs,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    row_ptrs = rows_ptr + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * row_stride
    weight_ptrs = weight_ptr + tl.minimum(outputs, num_outputs - 1)[:, None] * num_inputs

    # Sums of 1, 2 and 4 chunks whose neighbours are not complete yet. `total` becomes the sum of all chunks.
    one = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    two = one
    four = one
    total = one
    for chunk in tl.static_range(NUM_CHUNKS):
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        last = tl.minimum((chunk + 1) * CHUNK, num_inputs)
        for k in range(chunk * CHUNK, last, BLOCK_K):
            is_input = (k + steps < last)[None, :]
            row_MK = tl.load(row_ptrs + (k + steps)[None, :], mask=is_input, other=0.0)
            weight_NK = tl.load(weight_ptrs + (k + steps)[None, :], mask=is_input, other=0.0)
            total = tl.dot(row_MK, tl.trans(weight_NK), total, input_precision=INPUT_PRECISION)
        if chunk == 0 and bias_ptr is not None:
            bias = tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
            total += bias[None, :]
        # The bits of the chunk's number determine which previous sums are complete.
        if chunk % 2 == 1:
            total = one + total
            if chunk % 4 == 3:
                total = two + total
                if chunk % 8 == 7:
                    total = four + total
                else:
                    four = total
            else:
                two = total
        else:
            one = total
    # The last chunks may have no neighbour: `total` is then the sum for the lowest bit of NUM_CHUNKS.
    if NUM_CHUNKS % 2 == 1:
        if NUM_CHUNKS & 2:
            total = two + total
        if NUM_CHUNKS & 4:
            total = four + total
    elif NUM_CHUNKS == 6:
        total = four + total

    tl.store(
        output_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :],
        total.to(output_ptr.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & (outputs < num_outputs)[None, :],
    )
