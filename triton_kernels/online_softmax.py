"""The inner loop of the attention kernels: some positions of a paged cache, added to an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.triton_kernels.float8_rows import decode_float8

# M pairs of row and head, V size of a value, E elements of a key beyond its value, C positions

LOG2_E = tl.constexpr(1.4426950408889634)  # the hardware computes powers of 2


@triton.jit
def first_visible(positions, WINDOW: tl.constexpr):
    """Return the first position that a row attends to: of a window, or of a chunk of -WINDOW positions if negative."""
    at_least_0 = tl.maximum(positions, 0)  # rows of padding are before position 0
    return at_least_0 - at_least_0 % -WINDOW if WINDOW < 0 else tl.maximum(positions - WINDOW + 1, 0)


@triton.jit
def chunk_of_tile(
    starts_ptr,
    num_chunks,
    tile,
    GROUP: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    PARTIAL_TILES: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Return the last chunk whose tiles start at this tile or before it.

    The tiles of chunk s start at starts[s] * GROUP // TILE_SIZE + s * PARTIAL_TILES: 1 leaves room for partial last
    tiles, 2 also for partial first ones.
    """
    num_begun = 0
    for first_chunk in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first_chunk + tl.arange(0, CHUNKS_AT_ONCE)
        starts = tl.load(starts_ptr + chunks, mask=chunks < num_chunks, other=0)
        first_tiles = starts * GROUP // TILE_SIZE + chunks * PARTIAL_TILES
        num_begun += tl.sum(((chunks < num_chunks) & (first_tiles <= tile)).to(tl.int32))
    return num_begun - 1


@triton.jit
def softmax_weights(scores, weighted, maximum, total, IS_MASKED: tl.constexpr):
    """Add the scores [M, C] of some positions to an online softmax, which is relative to the largest score so far.

    Returns:
        Weights [M, C] of the positions, and the sums [M, V], maximum [M] and total [M], relative to the new maximum.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    shift = new_maximum
    if IS_MASKED:  # a pair without any position yet: -inf - -inf would be NaN
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - shift[:, None])
    share = tl.exp2(maximum - shift)
    return weights, weighted * share[:, None], new_maximum, total * share + tl.sum(weights, axis=1)


@triton.jit
def load_blocks(table_ptr, columns, first, end, CACHE_BLOCK: tl.constexpr):
    """Load the cache block of each position, one iteration ahead so that keys and values need not wait for it."""
    return tl.load(table_ptr + columns // CACHE_BLOCK, mask=(columns >= first) & (columns < end), other=0)


@triton.jit
def attend_positions(
    query,  # [M, V]: the values of this part
    query_other,  # [M, V]: those of the other part, or anything
    query_extra,  # [M, E]
    weighted,  # [M, V] float32
    maximum,  # [M]
    total,  # [M]
    part,
    key_ptr,  # block 0 of the key-value head
    value_ptr,  # the same; if keys are larger than values, the whole cache, which is contiguous
    key_scales_ptr,
    value_scales_ptr,
    kv_head,
    blocks,  # [C]: cache blocks of these positions
    cache_block_stride,
    cache_position_stride,
    columns,  # [C]: positions to attend to
    positions,  # [M]: positions of the pairs
    first,
    end,
    scale,
    IS_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    EXTRA_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SHARES_VALUE: tl.constexpr,
):
    """Add BLOCK_C positions to an online softmax, which is relative to the largest score so far.

    With two parts, BLOCK_V values from part * BLOCK_V on are summed, while scores are those of whole keys. The keys of
    this part come first in a score, so the scores of the two parts may differ in their last bits.

    Positions outside first to end - 1 are loaded as zeros: a weight of 0 times an uninitialised NaN would be NaN.
    """
    ALL_VALUES: tl.constexpr = NUM_PARTS * BLOCK_V
    values = part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = (values < VALUE_SIZE)[None, :]
    is_read = (columns >= first) & (columns < end)
    offsets = blocks.to(tl.int64) * cache_block_stride + columns % CACHE_BLOCK * cache_position_stride
    key = load_tile(
        key_ptr + offsets[:, None] + values[None, :], is_read[:, None], is_value, IS_MASKED, VALUE_SIZE, ALL_VALUES
    )
    # Rows of contiguous caches, which those with scales are.
    KEY_SIZE: tl.constexpr = VALUE_SIZE + EXTRA_SIZE
    rows = blocks.to(tl.int64) * (cache_block_stride // KEY_SIZE) + kv_head * CACHE_BLOCK + columns % CACHE_BLOCK
    key_scales = rows
    if key_scales_ptr is not None:
        key_scales = tl.load(key_scales_ptr + rows, mask=is_read, other=0.0)
        key = decode_float8(key, key_scales, query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if NUM_PARTS > 1:
        others = (1 - part) * BLOCK_V + tl.arange(0, BLOCK_V)
        key_other = load_tile(
            key_ptr + offsets[:, None] + others[None, :],
            is_read[:, None],
            (others < VALUE_SIZE)[None, :],
            IS_MASKED,
            VALUE_SIZE,
            ALL_VALUES,
        )
        scores = tl.dot(query_other, tl.trans(key_other), scores, input_precision="ieee")
    if EXTRA_SIZE > 0:
        extras = tl.arange(0, BLOCK_E)
        key_extra = load_tile(
            key_ptr + VALUE_SIZE + offsets[:, None] + extras[None, :],
            is_read[:, None],
            (extras < EXTRA_SIZE)[None, :],
            IS_MASKED,
            EXTRA_SIZE,
            BLOCK_E,
        )
        if key_scales_ptr is not None:
            key_extra = decode_float8(key_extra, key_scales, query.dtype)
        scores = tl.dot(query_extra, tl.trans(key_extra), scores, input_precision="ieee")
    scores *= scale * LOG2_E
    if IS_MASKED:
        is_visible = columns[None, :] <= positions[:, None]
        if WINDOW is not None:
            is_visible &= columns[None, :] >= first_visible(positions, WINDOW)[:, None]
        scores = tl.where(is_visible, scores, float("-inf"))

    weights, weighted, maximum, total = softmax_weights(scores, weighted, maximum, total, IS_MASKED)
    if SHARES_VALUE:
        value = key
    else:
        if EXTRA_SIZE > 0:
            offsets = rows * VALUE_SIZE
        value = load_tile(
            value_ptr + offsets[:, None] + values[None, :], is_read[:, None], is_value, IS_MASKED, VALUE_SIZE, BLOCK_V
        )
        if value_scales_ptr is not None:
            value = decode_float8(value, tl.load(value_scales_ptr + rows, mask=is_read, other=0.0), query.dtype)
    weighted = tl.dot(weights.to(value.dtype), value, weighted, input_precision="ieee")
    return weighted, maximum, total


@triton.jit
def load_tile(
    pointers, is_row, is_column, MASKS_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_LOADED: tl.constexpr
):
    """Load a tile with only the necessary masks; masked elements are zeros."""
    if MASKS_ROWS:
        if NUM_COLUMNS == NUM_LOADED:
            return tl.load(pointers, mask=is_row, other=0)
        else:
            return tl.load(pointers, mask=is_row & is_column, other=0)
    else:
        if NUM_COLUMNS == NUM_LOADED:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=is_column, other=0)


@triton.jit
def with_sink(maximum, total, sink):
    """Return the factor of the weighted sums and the total after a sink has been added to the softmax."""
    new_maximum = tl.maximum(maximum, sink)
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    share = tl.exp2(maximum - shift)
    return share, total * share + tl.exp2(sink - shift)
