"""Attention of chunks of one row over a paged cache: their contexts are divided among programs, and merged.

Piece i of a context, counted from the first piece that the row attends to, belongs to split i % number of splits. There
are two forms. Either all contexts have up to Z splits, and those of chunk s are s * Z to s * Z + Z - 1. Or splits are
balanced: all have about as many pieces, and those of all chunks are numbered one after another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.triton_kernels.online_softmax import LOG2_E, attend_positions, first_visible, load_blocks, with_sink

# T tokens, N query heads, S chunks, Z splits of a chunk at most, Y splits of all chunks


@triton.jit(do_not_specialize=["table_stride", "num_chunks", "num_splits", "num_balanced"])
def attend_split_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_table_ptr,
    row_starts_ptr,
    context_lens_ptr,
    partial_ptr,  # [Y, N, VALUE_SIZE] float32: sums of values times weights, relative to the maximum
    maximum_ptr,  # [Y, NUM_PARTS, N] float32: largest score, in base-2 logarithms
    total_ptr,  # [Y, NUM_PARTS, N] float32: sums of the weights
    balanced_ptr,  # [S, 2] int32: each chunk's first split, and the number of its splits; None: they are not balanced
    query_row_stride,
    query_head_stride,
    cache_block_stride,
    cache_head_stride,
    cache_position_stride,
    table_stride,
    num_chunks,
    num_splits,  # Z
    num_balanced,  # splits that all chunks share evenly, besides one for each chunk
    num_heads,
    num_tiles,  # tiles of BLOCK_M heads in a group
    scale,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    EXTRA_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SHARES_VALUE: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Attend from the chunks of one row to the splits of their contexts; see `attend_tile_kernel` for the arguments.

    A program computes one tile of BLOCK_M heads, one part of the values and one split. Programs without
    pieces return at once. Neighbouring programs read the same positions.
    """
    num_programs_each = num_heads // GROUP * num_tiles * NUM_PARTS
    tile = tl.program_id(0) % num_programs_each
    slot = tl.program_id(0) // num_programs_each
    if balanced_ptr is None:
        chunk = slot // num_splits
        split = slot % num_splits
    else:
        chunk, split, pieces_each = find_split(
            row_starts_ptr, context_lens_ptr, num_chunks, num_splits, num_balanced, slot,
            WINDOW, PIECE_SIZE, CHUNKS_AT_ONCE,
        )  # fmt: skip
        if chunk >= num_chunks:
            return
    chunk = chunk.to(tl.int64)
    context_len = tl.load(context_lens_ptr + chunk)
    first, first_piece, num_pieces = pieces_of(context_len, WINDOW, PIECE_SIZE)
    row = tl.load(row_starts_ptr + chunk).to(tl.int64)
    num_rows = tl.load(row_starts_ptr + chunk + 1) - row
    if (num_rows != 1) | (split >= num_pieces):
        return
    if balanced_ptr is not None:
        num_splits = tl.minimum(tl.cdiv(num_pieces, pieces_each), num_splits)
        if (split == 0) & (tile == 0):
            tl.store(balanced_ptr + 2 * chunk, slot)
            tl.store(balanced_ptr + 2 * chunk + 1, num_splits)
    part = 0
    if NUM_PARTS > 1:
        part = tile % NUM_PARTS
        tile = tile // NUM_PARTS
    kv_head = tile // num_tiles
    members = (tile % num_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = members < GROUP
    heads = kv_head * GROUP + members
    query_offsets = row * query_row_stride + heads * query_head_stride
    values = part * BLOCK_V + tl.arange(0, BLOCK_V)
    extras = VALUE_SIZE + tl.arange(0, BLOCK_E)
    query = tl.load(
        query_ptr + query_offsets[:, None] + values[None, :],
        mask=is_head[:, None] & (values < VALUE_SIZE)[None, :],
        other=0.0,
    )
    query_other = query
    if NUM_PARTS > 1:
        others = (1 - part) * BLOCK_V + tl.arange(0, BLOCK_V)
        query_other = tl.load(
            query_ptr + query_offsets[:, None] + others[None, :],
            mask=is_head[:, None] & (others < VALUE_SIZE)[None, :],
            other=0.0,
        )
    query_extra = query
    if EXTRA_SIZE > 0:
        query_extra = tl.load(
            query_ptr + query_offsets[:, None] + extras[None, :],
            mask=is_head[:, None] & (extras < VALUE_SIZE + EXTRA_SIZE)[None, :],
            other=0.0,
        )

    # One loop covers the tiles of all pieces of the program. Only the last piece of a context may be shorter.
    TILES_PER_PIECE: tl.constexpr = PIECE_SIZE // BLOCK_C
    num_own = (num_pieces - 1 - split) // num_splits + 1
    last_begin = (first_piece + split + (num_own - 1) * num_splits) * PIECE_SIZE
    last_tiles = tl.minimum(tl.cdiv(context_len - last_begin, BLOCK_C), TILES_PER_PIECE)
    head_offset = kv_head.to(tl.int64) * cache_head_stride
    positions = tl.full([BLOCK_M], 0, tl.int32) + (context_len - 1)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    table_ptr = block_table_ptr + chunk * table_stride
    columns = (first_piece + split) * PIECE_SIZE + tl.arange(0, BLOCK_C)
    blocks = load_blocks(table_ptr, columns, first, context_len, CACHE_BLOCK)
    for number in range(1, (num_own - 1) * TILES_PER_PIECE + last_tiles + 1):
        next_piece = first_piece + split + number // TILES_PER_PIECE * num_splits
        next_columns = next_piece * PIECE_SIZE + number % TILES_PER_PIECE * BLOCK_C + tl.arange(0, BLOCK_C)
        next_blocks = load_blocks(table_ptr, next_columns, first, context_len, CACHE_BLOCK)
        weighted, maximum, total = attend_positions(
            query,
            query_other,
            query_extra,
            weighted,
            maximum,
            total,
            part,
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
            context_len,
            scale,
            True,
            WINDOW,
            CACHE_BLOCK,
            VALUE_SIZE,
            EXTRA_SIZE,
            NUM_PARTS,
            BLOCK_V,
            BLOCK_E,
            SHARES_VALUE,
        )
        columns, blocks = next_columns, next_blocks

    places = slot.to(tl.int64) * num_heads + heads
    places_of_part = (slot.to(tl.int64) * NUM_PARTS + part) * num_heads + heads
    tl.store(maximum_ptr + places_of_part, maximum, mask=is_head)
    tl.store(total_ptr + places_of_part, total, mask=is_head)
    tl.store(
        partial_ptr + places[:, None] * VALUE_SIZE + values[None, :],
        weighted,
        mask=is_head[:, None] & (values < VALUE_SIZE)[None, :],
    )


@triton.jit(do_not_specialize=["num_chunks", "num_splits"])
def merge_splits_kernel(
    partial_ptr,
    maximum_ptr,
    total_ptr,
    balanced_ptr,
    row_starts_ptr,
    context_lens_ptr,
    sinks_ptr,
    output_ptr,
    num_chunks,
    num_heads,
    num_splits,
    WINDOW: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART_SIZE: tl.constexpr,  # a multiple of BLOCK_V
    BLOCK_V: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
):
    """Merge BLOCK_V values of the splits of one head of one chunk.

    Programs beyond the chunks write zeros to rows without a chunk.
    """
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    values = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = values < VALUE_SIZE
    if chunk >= num_chunks:
        row = chunk - num_chunks
        if row >= tl.load(row_starts_ptr + num_chunks):
            zeros = tl.zeros([BLOCK_V], output_ptr.dtype.element_ty)
            tl.store(output_ptr + (row * num_heads + head) * VALUE_SIZE + values, zeros, mask=is_value)
        return
    row = tl.load(row_starts_ptr + chunk).to(tl.int64)
    if tl.load(row_starts_ptr + chunk + 1) - row != 1:
        return

    _, _, num_pieces = pieces_of(tl.load(context_lens_ptr + chunk), WINDOW, PIECE_SIZE)
    part = 0
    if NUM_PARTS > 1:
        part = tl.program_id(2) * BLOCK_V // PART_SIZE
    first_split = chunk * num_splits
    if balanced_ptr is not None:
        first_split = tl.load(balanced_ptr + 2 * chunk).to(tl.int64)
        num_splits = tl.load(balanced_ptr + 2 * chunk + 1)
    num_used = tl.minimum(num_pieces, num_splits)
    first_state = (first_split * NUM_PARTS + part) * num_heads + head
    partial_ptr += (first_split * num_heads + head) * VALUE_SIZE
    # Always MAX_SPLITS, whatever the step has, so that the order of additions is the same in all steps.
    splits = tl.arange(0, MAX_SPLITS)
    states = first_state + splits * NUM_PARTS * num_heads
    maximum_Z = tl.load(maximum_ptr + states, mask=splits < num_used, other=float("-inf"))
    total_Z = tl.load(total_ptr + states, mask=splits < num_used, other=0.0)
    maximum = tl.max(maximum_Z, axis=0)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(total_Z * tl.exp2(maximum_Z - shift), axis=0)
    weighted = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, num_used, SPLITS_AT_ONCE):
        some = first + tl.arange(0, SPLITS_AT_ONCE)
        is_used = some < num_used
        places = first_state + some * NUM_PARTS * num_heads
        share_z = tl.exp2(tl.load(maximum_ptr + places, mask=is_used, other=float("-inf")) - shift)
        partial_zV = tl.load(
            partial_ptr + some[:, None] * num_heads * VALUE_SIZE + values[None, :],
            mask=is_used[:, None] & is_value[None, :],
            other=0.0,
        )
        weighted += tl.sum(partial_zV * share_z[:, None], axis=0)
    share = 1.0
    if sinks_ptr is not None:
        share, total = with_sink(maximum, total, tl.load(sinks_ptr + head) * LOG2_E)
    result = weighted * (share / tl.where(total == 0.0, 1.0, total))
    tl.store(
        output_ptr + (row * num_heads + head) * VALUE_SIZE + values,
        result.to(output_ptr.dtype.element_ty),
        mask=is_value,
    )


@triton.jit
def find_split(
    row_starts_ptr,
    context_lens_ptr,
    num_chunks,
    num_splits,
    num_balanced,
    slot,
    WINDOW: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Return the chunk of a balanced split, its number in the chunk, and the pieces of a split.

    The chunk is `num_chunks` if there are fewer splits.
    """
    total = 0
    for first_chunk in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first_chunk + tl.arange(0, CHUNKS_AT_ONCE)
        total += tl.sum(count_pieces(row_starts_ptr, context_lens_ptr, chunks, num_chunks, WINDOW, PIECE_SIZE), axis=0)
    pieces_each = tl.maximum(tl.cdiv(total, num_balanced), 1)
    chunk = 0
    first_slot = 0
    num_slots = 0
    for first_chunk in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first_chunk + tl.arange(0, CHUNKS_AT_ONCE)
        num_pieces = count_pieces(row_starts_ptr, context_lens_ptr, chunks, num_chunks, WINDOW, PIECE_SIZE)
        counts = tl.minimum(tl.cdiv(num_pieces, pieces_each), num_splits)
        is_before = (chunks < num_chunks) & (num_slots + tl.cumsum(counts, axis=0) <= slot)
        chunk += tl.sum(is_before.to(tl.int32), axis=0)
        first_slot += tl.sum(tl.where(is_before, counts, 0), axis=0)
        num_slots += tl.sum(counts, axis=0)
    return chunk, slot - first_slot, pieces_each


@triton.jit
def count_pieces(row_starts_ptr, context_lens_ptr, chunks, num_chunks, WINDOW: tl.constexpr, PIECE_SIZE: tl.constexpr):
    """Return the number of pieces of each chunk of one row; 0 for other chunks."""
    is_chunk = chunks < num_chunks
    starts = tl.load(row_starts_ptr + chunks, mask=is_chunk, other=0)
    ends = tl.load(row_starts_ptr + chunks + 1, mask=is_chunk, other=0)
    context_lens = tl.load(context_lens_ptr + chunks, mask=is_chunk, other=0)
    _, _, num_pieces = pieces_of(context_lens, WINDOW, PIECE_SIZE)
    return tl.where(ends - starts == 1, num_pieces, 0)


@triton.jit
def pieces_of(context_len, WINDOW: tl.constexpr, PIECE_SIZE: tl.constexpr):
    """Return the first position that the last row attends to, the piece of that position, and the number of pieces."""
    first = context_len * 0
    if WINDOW is not None:
        first = first_visible(context_len - 1, WINDOW)
    first_piece = first // PIECE_SIZE
    return first, first_piece, tl.cdiv(context_len, PIECE_SIZE) - first_piece
