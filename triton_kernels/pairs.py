"""Pairs of a token and one of its experts, on a GPU: sort them, move their rows, and sum their outputs.

Pair p = t * K + k is token t and its k-th expert. All shapes are known on the host, so that CUDA graphs can hold the
launches; unused places hold -1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T tokens, K experts per token, P pairs = T * K, R rows, S rows of a source, D model width, X counted keys plus one for
# all other pairs, B blocks of pairs

MAX_RANKED_PAIRS = 4096  # up to this many pairs are compared with one another, in one launch
# With up to this many rows, each program searches all rows for those of its token, which saves two launches. The kernel
# is compiled for each of these sizes.
SEARCHED_ROWS = (32, 256, 1024)
MAX_BLOCK_WIDTH = 1024  # columns that one program adds up, and half of the columns that one program moves
MAX_WEIGHING_PROGRAMS = 256  # for each block of columns; a program weighs every 256th row

# Block sizes and compile options of each kernel. With few pairs, the number of sequential steps bounds the time.
RANK_BLOCKS: dict[str, Any] = {"BLOCK_P": 32, "BLOCK_Q": 256, "num_warps": 8}
PLACE_BLOCKS: dict[str, Any] = {"BLOCK_P": 256, "BLOCK_X": 32, "num_warps": 8}
START_BLOCKS: dict[str, Any] = {"BLOCK_B": 1024, "num_warps": 4}
INVERT_BLOCKS: dict[str, Any] = {"BLOCK_R": 1024, "num_warps": 4}


def order_pairs(keys_TK: Tensor, first: int, num_counted: int, load: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sort pairs by key, then by number, and count the pairs of each key.

    Memory moved: 2 * 8 bytes for each pair. Up to 4096 pairs take one launch with P * P comparisons. More pairs take
    three launches with P * X comparisons twice and P * 256 once, and 3 * 4 bytes for each of X * P / 256 block counts.

    Args:
        keys_TK: int64 or int32, [T, K] or [P], any strides.
        first: the first counted key.
        num_counted: number of counted keys. Pairs with other keys are left out.
        load: [num_counted] int64, to which the counts are added.

    Returns:
        Pairs [P] int64, followed by -1; and the number of pairs of each counted key, [num_counted] int64.
    """
    num_pairs = keys_TK.numel()
    pairs_P = torch.empty(num_pairs, dtype=torch.int64, device=keys_TK.device)
    if num_pairs == 0:
        return pairs_P, torch.zeros(num_counted, dtype=torch.int64, device=keys_TK.device)
    counts = torch.empty(num_counted, dtype=torch.int64, device=keys_TK.device)
    assert num_pairs * (num_counted + 1) < 2**31, f"{num_pairs} pairs of {num_counted} keys"
    keys_TK = keys_TK if keys_TK.dim() == 2 else keys_TK[:, None]
    keys = (keys_TK, *keys_TK.stride(), keys_TK.shape[1], num_pairs, first, num_counted)

    if num_pairs <= MAX_RANKED_PAIRS:
        block = RANK_BLOCKS["BLOCK_P"]
        num_programs = ceil_div(num_pairs, block) + ceil_div(num_counted, block)
        rank_pairs_kernel[(num_programs,)](*keys, pairs_P, counts, load, **RANK_BLOCKS)
        return pairs_P, counts

    num_blocks = ceil_div(num_pairs, PLACE_BLOCKS["BLOCK_P"])
    starts_XB = torch.empty(num_counted + 1, num_blocks, dtype=torch.int32, device=keys_TK.device)
    totals_X = torch.empty(num_counted + 1, dtype=torch.int32, device=keys_TK.device)
    count_keys_kernel[(num_blocks,)](*keys, starts_XB, num_blocks, **PLACE_BLOCKS)
    start_blocks_kernel[(num_counted + 1,)](starts_XB, totals_X, counts, load, num_blocks, num_counted, **START_BLOCKS)
    place_pairs_kernel[(num_blocks,)](*keys, starts_XB, totals_X, pairs_P, num_blocks, **PLACE_BLOCKS)
    return pairs_P, counts


def gather_rows(source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
    """Return the source rows indices_R[r] // divisor, [R, D]. A row with index -1 is undefined.

    Memory moved: each row is read and written once, and 8 bytes for its index.

    Args:
        source_SD: [S, D] of any dtype; rows may be strided.
        indices_R: [R] int64; numbers of pairs if the divisor is K.
    """
    source_SD = source_SD if source_SD.stride(1) == 1 else source_SD.contiguous()
    rows_RD = torch.empty(len(indices_R), source_SD.shape[1], dtype=source_SD.dtype, device=source_SD.device)
    _move_rows(source_SD, indices_R, divisor, rows_RD, is_scatter=False)
    return rows_RD


def scatter_rows(rows_RD: Tensor, indices_R: Tensor, num_rows: int) -> Tensor:
    """Return [num_rows, D], in which row indices_R[r] is row r of the input and all other rows are zeros.

    Memory moved: num_rows * D zeros, then each row is read and written once.

    Args:
        rows_RD: [R, D] of any dtype; rows may be strided.
        indices_R: [R] int64, distinct, or -1 for a row that is left out.
    """
    rows_RD = rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()
    output_SD = torch.zeros(num_rows, rows_RD.shape[1], dtype=rows_RD.dtype, device=rows_RD.device)
    _move_rows(rows_RD, indices_R, 1, output_SD, is_scatter=True)
    return output_SD


def weighted_sum(output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum of each token's outputs, [T, D], added in float32 in the order of k.

    Rows without a pair are not read, and pairs without a row add nothing. Products and sums are not fused, so the
    results equal those of the torch reference bit for bit.

    Memory moved: each output that has a pair is read once, each result written once. With up to 1024 rows each program
    reads all of pair_of_row_R; otherwise it is inverted first, with 8 bytes for each row and 2 * 4 for each pair.

    Args:
        output_RD: [R, D] float32, bfloat16 or float16; rows may be strided.
        pair_of_row_R: [R] int64, each pair at most once; -1 for a row without a pair.
        weights_TK: [T, K] float32; rows may be strided.
        dtype: dtype of the result.
    """
    num_tokens, top_k = weights_TK.shape
    num_rows, width = output_RD.shape
    total_TD = torch.empty(num_tokens, width, dtype=dtype, device=output_RD.device)
    if total_TD.numel() == 0:
        return total_TD
    if num_rows == 0:
        return total_TD.zero_()
    output_RD = output_RD if output_RD.stride(1) == 1 else output_RD.contiguous()
    searched_rows = next((size for size in SEARCHED_ROWS if num_rows <= size), None)
    is_searched = searched_rows is not None
    weights_TK = weights_TK if weights_TK.stride(1) == 1 else weights_TK.contiguous()
    rows = pair_of_row_R.contiguous() if is_searched else _row_of_pair(pair_of_row_R, num_tokens * top_k)
    block_width = min(next_power_of_2(width), MAX_BLOCK_WIDTH)
    weighted_sum_kernel[(num_tokens, ceil_div(width, block_width))](
        output_RD,
        rows,
        weights_TK,
        total_TD,
        output_RD.stride(0),
        weights_TK.stride(0),
        width,
        num_rows,
        IS_SEARCHED=is_searched,
        TOP_K=top_k,
        BLOCK_R=searched_rows or 1,
        BLOCK_D=block_width,
        **sum_options(),
    )
    return total_TD


def weigh_rows(rows_RD: Tensor, weights_R: Tensor, num_counted: Tensor) -> Tensor:
    """Return each row times its weight, [R, D], multiplied in float32 and rounded once to the dtype of the rows.

    Memory moved: each used row is read and written once.

    Args:
        rows_RD: [R, D] float32, bfloat16 or float16; rows may be strided.
        weights_R: [R] float32.
        num_counted: [1] int32 or int64, the number of used rows. Later rows are neither read nor written.
    """
    num_rows, width = rows_RD.shape
    rows_RD = rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()
    output_RD = torch.empty(num_rows, width, dtype=rows_RD.dtype, device=rows_RD.device)
    if output_RD.numel() == 0:
        return output_RD
    block_width = min(next_power_of_2(width), MAX_BLOCK_WIDTH)
    weigh_rows_kernel[(min(num_rows, MAX_WEIGHING_PROGRAMS), ceil_div(width, block_width))](
        rows_RD,
        weights_R.contiguous(),
        num_counted,
        output_RD,
        rows_RD.stride(0),
        width,
        BLOCK_D=block_width,
        num_warps=4,
    )
    return output_RD


def sum_options() -> dict[str, Any]:
    """Return the options that `weighted_sum_kernel` is compiled with."""
    return {"num_warps": 4, "enable_fp_fusion": False}


def _row_of_pair(pair_of_row_R: Tensor, num_pairs: int) -> Tensor:
    """Return the row of each pair [P] int32, or -1 for a pair without a row."""
    row_of_pair_P = torch.full((num_pairs,), -1, dtype=torch.int32, device=pair_of_row_R.device)
    num_programs = ceil_div(len(pair_of_row_R), INVERT_BLOCKS["BLOCK_R"])
    invert_kernel[(num_programs,)](pair_of_row_R.contiguous(), row_of_pair_P, len(pair_of_row_R), **INVERT_BLOCKS)
    return row_of_pair_P


def _move_rows(from_XD: Tensor, indices_R: Tensor, divisor: int, to_YD: Tensor, *, is_scatter: bool) -> None:
    if to_YD.numel() == 0 or len(indices_R) == 0:
        return
    width = from_XD.shape[1]
    block_width = min(next_power_of_2(width), 2 * MAX_BLOCK_WIDTH)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[from_XD.element_size()]
    move_rows_kernel[(len(indices_R), ceil_div(width, block_width))](
        from_XD.view(bits),
        indices_R.contiguous(),
        to_YD.view(bits),
        from_XD.stride(0),
        width,
        divisor,
        IS_SCATTER=is_scatter,
        BLOCK_D=block_width,
        num_warps=4,
    )


@triton.jit
def load_keys(keys_ptr, stride_t, stride_k, top_k, num_pairs, first, num_counted, pairs):
    """Return counted keys from 0 on, num_counted for other pairs, and num_counted + 1 beyond the last pair."""
    token = (pairs // top_k).to(tl.int64)
    key = tl.load(keys_ptr + token * stride_t + pairs % top_k * stride_k, mask=pairs < num_pairs, other=0) - first
    key = tl.where((key >= 0) & (key < num_counted), key, num_counted).to(tl.int32)
    return tl.where(pairs < num_pairs, key, num_counted + 1)


@triton.jit(do_not_specialize=["num_pairs", "first", "num_counted"])
def rank_pairs_kernel(
    keys_ptr,  # [T, K]
    stride_t,
    stride_k,
    top_k,
    num_pairs,
    first,
    num_counted,
    pairs_ptr,  # [P] int64
    counts_ptr,  # [num_counted] int64
    load_ptr,  # [num_counted] int64, to which the counts are added, or None
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Sort pairs and count keys. The place of a pair is the number of pairs before it.

    Each of the first programs compares BLOCK_P pairs with all pairs; each of the last programs counts BLOCK_P keys.
    """
    num_blocks = tl.cdiv(num_pairs, BLOCK_P)
    block = tl.program_id(0)
    if block < num_blocks:
        pairs = block * BLOCK_P + tl.arange(0, BLOCK_P)
        keys = load_keys(keys_ptr, stride_t, stride_k, top_k, num_pairs, first, num_counted, pairs)
        rank_of_pair = keys * num_pairs + pairs  # distinct
        places = tl.zeros((BLOCK_P,), dtype=tl.int32)
        for start in range(0, num_pairs, BLOCK_Q):
            others = start + tl.arange(0, BLOCK_Q)
            other_keys = load_keys(keys_ptr, stride_t, stride_k, top_k, num_pairs, first, num_counted, others)
            is_before = (other_keys * num_pairs + others)[None, :] < rank_of_pair[:, None]
            places += tl.sum(is_before.to(tl.int32), 1)
        tl.store(pairs_ptr + places, tl.where(keys < num_counted, pairs, -1).to(tl.int64), mask=pairs < num_pairs)
    else:
        counted = (block - num_blocks) * BLOCK_P + tl.arange(0, BLOCK_P)
        counts = tl.zeros((BLOCK_P,), dtype=tl.int32)
        for start in range(0, num_pairs, BLOCK_Q):
            others = start + tl.arange(0, BLOCK_Q)
            other_keys = load_keys(keys_ptr, stride_t, stride_k, top_k, num_pairs, first, num_counted, others)
            counts += tl.sum((other_keys[None, :] == counted[:, None]).to(tl.int32), 1)
        tl.store(counts_ptr + counted, counts.to(tl.int64), mask=counted < num_counted)
        if load_ptr is not None:
            load = tl.load(load_ptr + counted, mask=counted < num_counted)
            tl.store(load_ptr + counted, load + counts, mask=counted < num_counted)


@triton.jit(do_not_specialize=["num_pairs", "first", "num_counted", "num_blocks"])
def count_keys_kernel(
    keys_ptr,  # [T, K]
    stride_t,
    stride_k,
    top_k,
    num_pairs,
    first,
    num_counted,
    counts_ptr,  # [X, B] int32
    num_blocks,
    BLOCK_P: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Count how often each key occurs in a block of pairs."""
    block = tl.program_id(0)
    pairs = block * BLOCK_P + tl.arange(0, BLOCK_P)
    keys = load_keys(keys_ptr, stride_t, stride_k, top_k, num_pairs, first, num_counted, pairs)
    for start in range(0, num_counted + 1, BLOCK_X):
        counted = start + tl.arange(0, BLOCK_X)
        counts = tl.sum((keys[None, :] == counted[:, None]).to(tl.int32), 1)
        tl.store(counts_ptr + counted * num_blocks + block, counts, mask=counted <= num_counted)


@triton.jit(do_not_specialize=["num_blocks", "num_counted"])
def start_blocks_kernel(
    counts_ptr,  # [X, B] int32 counts; overwritten with the sums over the blocks before each block
    totals_ptr,  # [X] int32
    output_ptr,  # [num_counted] int64, the totals of the counted keys
    load_ptr,  # [num_counted] int64, to which these totals are added, or None
    num_blocks,
    num_counted,
    BLOCK_B: tl.constexpr,
):
    key = tl.program_id(0)
    total = tl.zeros((), dtype=tl.int32)
    for start in range(0, num_blocks, BLOCK_B):
        blocks = start + tl.arange(0, BLOCK_B)
        count_ptrs = counts_ptr + key * num_blocks + blocks
        counts = tl.load(count_ptrs, mask=blocks < num_blocks, other=0)
        tl.store(count_ptrs, total + tl.cumsum(counts, 0) - counts, mask=blocks < num_blocks)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + key, total)
    tl.store(output_ptr + key, total.to(tl.int64), mask=key < num_counted)
    if load_ptr is not None:
        load = tl.load(load_ptr + key, mask=key < num_counted)
        tl.store(load_ptr + key, load + total, mask=key < num_counted)


@triton.jit(do_not_specialize=["num_pairs", "first", "num_counted", "num_blocks"])
def place_pairs_kernel(
    keys_ptr,  # [T, K]
    stride_t,
    stride_k,
    top_k,
    num_pairs,
    first,
    num_counted,
    starts_ptr,  # [X, B] int32
    totals_ptr,  # [X] int32
    pairs_ptr,  # [P] int64
    num_blocks,
    BLOCK_P: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Sort pairs: a pair follows all pairs of lower keys, and the earlier pairs of its own key."""
    block = tl.program_id(0)
    pairs = block * BLOCK_P + tl.arange(0, BLOCK_P)
    keys = load_keys(keys_ptr, stride_t, stride_k, top_k, num_pairs, first, num_counted, pairs)
    places = tl.load(starts_ptr + keys * num_blocks + block, mask=pairs < num_pairs, other=0)
    for start in range(0, num_counted + 1, BLOCK_X):
        lower = start + tl.arange(0, BLOCK_X)
        totals = tl.load(totals_ptr + lower, mask=lower <= num_counted, other=0)
        places += tl.sum(tl.where(lower[None, :] < keys[:, None], totals[None, :], 0), 1)
    for start in range(0, BLOCK_P, BLOCK_X):
        others = block * BLOCK_P + start + tl.arange(0, BLOCK_X)
        other_keys = load_keys(keys_ptr, stride_t, stride_k, top_k, num_pairs, first, num_counted, others)
        is_before = (other_keys[None, :] == keys[:, None]) & (others[None, :] < pairs[:, None])
        places += tl.sum(is_before.to(tl.int32), 1)
    tl.store(pairs_ptr + places, tl.where(keys < num_counted, pairs, -1).to(tl.int64), mask=pairs < num_pairs)


@triton.jit(do_not_specialize=["divisor"])
def move_rows_kernel(
    from_ptr,  # [R, D] if IS_SCATTER, else [S, D]; rows from_stride elements apart
    indices_ptr,  # [R] int64
    to_ptr,  # [S, D] if IS_SCATTER, else [R, D]; contiguous
    from_stride,
    width,
    divisor,
    IS_SCATTER: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(indices_ptr + row)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_moved = (columns < width) & (index >= 0)
    from_row = row if IS_SCATTER else index // divisor
    to_row = index if IS_SCATTER else row
    values = tl.load(from_ptr + from_row * from_stride + columns, mask=is_moved)
    tl.store(to_ptr + to_row * width + columns, values, mask=is_moved)


@triton.jit(do_not_specialize=["num_rows"])
def invert_kernel(
    pair_of_row_ptr,  # [R] int64
    row_of_pair_ptr,  # [P] int32, initially -1
    num_rows,
    BLOCK_R: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    pairs = tl.load(pair_of_row_ptr + rows, mask=rows < num_rows, other=-1)
    tl.store(row_of_pair_ptr + pairs, rows, mask=pairs >= 0)


@triton.jit
def weigh_rows_kernel(
    rows_ptr,  # [R, D], rows row_stride elements apart
    weights_ptr,  # [R] float32
    num_counted_ptr,  # [1] int32 or int64
    output_ptr,  # [R, D], contiguous
    row_stride,
    width,
    BLOCK_D: tl.constexpr,
):
    """Weigh the used rows. A program processes BLOCK_D columns of every n-th row, with n programs along the rows."""
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = columns < width
    num_counted = tl.load(num_counted_ptr).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)  # row * stride can exceed 2**31
    while row < num_counted:
        values = tl.load(rows_ptr + row * row_stride + columns, mask=in_row, other=0.0)
        product = values.to(tl.float32) * tl.load(weights_ptr + row)
        tl.store(output_ptr + row * width + columns, product.to(output_ptr.dtype.element_ty), mask=in_row)
        row += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_rows", "weights_stride"])
def weighted_sum_kernel(
    output_ptr,  # [R, D], rows output_stride elements apart
    rows_ptr,  # pair_of_row [R] int64 if IS_SEARCHED, else row_of_pair [P] int32
    weights_ptr,  # [T, K] float32, rows weights_stride elements apart
    total_ptr,  # [T, D]
    output_stride,
    weights_stride,
    width,
    num_rows,
    IS_SEARCHED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,  # power of two, at least R, if IS_SEARCHED
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = columns < width
    if IS_SEARCHED:
        rows = tl.arange(0, BLOCK_R)
        pair_of_row = tl.load(rows_ptr + rows, mask=rows < num_rows, other=-1)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        if IS_SEARCHED:
            row = tl.max(tl.where(pair_of_row == pair, rows, -1), 0).to(tl.int64)
        else:
            row = tl.load(rows_ptr + pair).to(tl.int64)
        weight = tl.load(weights_ptr + token * weights_stride + k)
        weight = tl.where(row >= 0, weight, 0.0)  # the weight of padding may be NaN
        values = tl.load(output_ptr + row * output_stride + columns, mask=in_row & (row >= 0), other=0.0)
        product = values.to(tl.float32) * weight
        total = product if k == 0 else total + product  # 0 + -0 would lose the sign of zero
    tl.store(total_ptr + token * width + columns, total.to(total_ptr.dtype.element_ty), mask=in_row)
