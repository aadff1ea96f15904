"""Attention of chunks of many rows over a paged cache: a program computes a tile of pairs of row and head.

Pairs are the rows of a matrix product: pair i of a chunk is row i // group and head i % group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.triton_kernels.online_softmax import (
    LOG2_E,
    attend_positions,
    chunk_of_tile,
    first_visible,
    load_blocks,
    with_sink,
)

# T tokens, N query heads, G key-value heads, P size of a key, S chunks


@triton.jit(do_not_specialize=["table_stride", "num_chunks", "max_attended_rows"])
def attend_tile_kernel(
    query_ptr,  # [T, N, P]: P is VALUE_SIZE + EXTRA_SIZE
    key_cache_ptr,  # [num_blocks, G, CACHE_BLOCK, P]
    value_cache_ptr,  # [num_blocks, G, CACHE_BLOCK, VALUE_SIZE], or None; if P is larger, both caches are contiguous
    key_scales_ptr,  # [num_blocks, G, CACHE_BLOCK] bfloat16 of caches of 8-bit floats, or None
    value_scales_ptr,
    block_table_ptr,  # [S, max_blocks] int32
    row_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    sinks_ptr,  # [N] float32, or None
    output_ptr,  # [T, N, VALUE_SIZE], contiguous
    query_row_stride,
    query_head_stride,
    cache_block_stride,
    cache_head_stride,
    cache_position_stride,
    table_stride,
    num_chunks,
    num_heads,
    num_kv_heads,
    max_attended_rows,
    scale,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,  # or None
    CACHE_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    EXTRA_SIZE: tl.constexpr,  # elements of a key beyond those of a value
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SHARES_VALUE: tl.constexpr,
    LEAST_ROWS: tl.constexpr,  # chunks of fewer rows are left out
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Attend from BLOCK_M pairs of one chunk and key-value head to all their positions."""
    # The last tiles of a chunk attend to the most positions, so they start first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = program % num_kv_heads
    slot = program // num_kv_heads

    chunk = chunk_of_tile(row_starts_ptr, num_chunks, slot, GROUP, BLOCK_M, 1, CHUNKS_AT_ONCE)
    first_row = tl.load(row_starts_ptr + chunk)
    num_rows = tl.load(row_starts_ptr + chunk + 1) - first_row
    first_pair = (slot - (first_row * GROUP // BLOCK_M + chunk)) * BLOCK_M
    context_len = tl.load(context_lens_ptr + chunk)
    is_too_long = tl.minimum(num_rows, context_len) > max_attended_rows
    if (num_rows < LEAST_ROWS) | is_too_long | (first_pair >= num_rows * GROUP):
        return
    first_position = context_len - num_rows  # of the chunk; negative if it has more rows than positions
    lowest = first_position + first_pair // GROUP
    highest = first_position + (tl.minimum(first_pair + BLOCK_M, num_rows * GROUP) - 1) // GROUP
    if highest < 0:
        return

    pairs = first_pair + tl.arange(0, BLOCK_M)
    is_pair = pairs < num_rows * GROUP
    rows = first_row + pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    positions = first_position + pairs // GROUP
    query_offsets = rows.to(tl.int64) * query_row_stride + heads * query_head_stride
    values = tl.arange(0, BLOCK_V)
    extras = VALUE_SIZE + tl.arange(0, BLOCK_E)
    query = tl.load(
        query_ptr + query_offsets[:, None] + values[None, :],
        mask=is_pair[:, None] & (values < VALUE_SIZE)[None, :],
        other=0.0,
    )
    query_extra = query
    if EXTRA_SIZE > 0:
        query_extra = tl.load(
            query_ptr + query_offsets[:, None] + extras[None, :],
            mask=is_pair[:, None] & (extras < VALUE_SIZE + EXTRA_SIZE)[None, :],
            other=0.0,
        )

    # All pairs attend to the positions from all_from to all_to - 1. Positions before first or from end on are not read.
    end = highest + 1
    first = 0
    all_from = 0
    if WINDOW is not None:
        first = first_visible(lowest, WINDOW)
        all_from = tl.minimum(tl.cdiv(first_visible(highest, WINDOW), BLOCK_C) * BLOCK_C, end)
    all_to = tl.maximum((lowest + 1) // BLOCK_C * BLOCK_C, all_from)  # lowest may be negative

    head_offset = kv_head.to(tl.int64) * cache_head_stride
    table_ptr = block_table_ptr + chunk.to(tl.int64) * table_stride
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # Large heads fill all registers, so they have no separate loop without masks.
    IS_LARGE: tl.constexpr = BLOCK_V >= 256
    if IS_LARGE:
        all_from = end
    for phase in tl.static_range(0 if IS_LARGE or WINDOW is not None else 1, 1 if IS_LARGE else 3):
        if phase == 0:
            begin = first // BLOCK_C * BLOCK_C
            until = all_from
        elif phase == 1:
            begin = all_from
            until = all_to
        else:
            begin = all_to
            until = end
        columns = begin + tl.arange(0, BLOCK_C)
        blocks = load_blocks(table_ptr, columns, first, end, CACHE_BLOCK)
        for place in range(begin, until, BLOCK_C):
            columns = place + tl.arange(0, BLOCK_C)
            next_blocks = load_blocks(table_ptr, columns + BLOCK_C, first, end, CACHE_BLOCK)
            weighted, maximum, total = attend_positions(
                query,
                query,
                query_extra,
                weighted,
                maximum,
                total,
                0,
                key_cache_ptr + head_offset,
                value_cache_ptr if SHARES_VALUE or EXTRA_SIZE > 0 else value_cache_ptr + head_offset,
                key_scales_ptr,
                value_scales_ptr,
                kv_head,
                blocks,
                cache_block_stride,
                cache_position_stride,
                columns,
                positions,
                first,
                end,
                scale,
                phase != 1,
                WINDOW,
                CACHE_BLOCK,
                VALUE_SIZE,
                EXTRA_SIZE,
                1,
                BLOCK_V,
                BLOCK_E,
                SHARES_VALUE,
            )
            blocks = next_blocks

    share = tl.full([BLOCK_M], 1.0, tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=is_pair, other=0.0) * LOG2_E
        share, total = with_sink(maximum, total, sinks)
    # The total of a row before position 0 is 0.
    result = weighted * (share / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(
        output_ptr + (rows.to(tl.int64) * num_heads + heads)[:, None] * VALUE_SIZE + values[None, :],
        result.to(output_ptr.dtype.element_ty),
        mask=is_pair[:, None] & (values < VALUE_SIZE)[None, :],
    )
