"""Grouped-query attention over a paged cache of keys and values, with windows and sinks, and its tile sizes."""

from __future__ import annotations

import functools

from torch import Tensor

from moeserve.triton_kernels.paged_launch import AttentionSpec, Splits, launch_attention
from moeserve.triton_kernels.sizes import next_power_of_2

# T tokens, N query heads, G key-value heads, H size of a key, V of a value, S chunks


def paged_attention(
    query_TNH: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    sinks_N: Tensor | None = None,
    max_rows_per_chunk: int,
    min_rows_per_chunk: int = 0,
    max_context: int,
    rows_have_positions: bool = False,
    splits_contexts: bool = True,
) -> Tensor:
    """Attend from row i of a chunk, at position p = context_len - num_rows + i, to the positions up to p.

    With a window, only positions after p - window are read. Query head n reads key-value head n // (N // G). Scores,
    softmax and sums are float32. Weights are rounded to the dtype of the values before they are multiplied with them.
    The result of a row depends on its chunk alone, bit for bit, not on the other chunks of the step; without splits it
    does not depend on its chunk either.

    Memory moved: for a chunk of one row, G * (H + V) * element size (G * (H + V + 4) of 8-bit floats) for each position
    it attends to, which bounds the time; and 4 * V + 8 bytes, written and read, for each head and split. Operations:
    2 * N * (H + V) for each row and position it attends to, which bound the time of chunks of many rows.

    Args:
        query_TNH: [T, N, H] float32, bfloat16 or float16; may be strided.
        key_cache, value_cache: [num_blocks, G, block_size, H] and [num_blocks, G, block_size, V], V at most H, same
            dtype, any block_size; with equal strides, or contiguous if V is smaller. With scales, they are uint8 codes
            of 8-bit floats (`float8_rows.py`), and contiguous.
        block_table: [S, max_blocks] int32; entries beyond a chunk's context are not read.
        row_starts: [S + 1] int32, from 0: chunk s has the rows row_starts[s] to row_starts[s + 1] - 1, possibly none.
        context_lens: [S] int32.
        key_scales, value_scales: [num_blocks, G, block_size] bfloat16.
        scale: factor of the products of queries and keys.
        window: number of positions that a row attends to, including its own; default: all. If negative, positions are
            divided into chunks of -window, and a row attends to those of its own chunk.
        sinks_N: [N] float32, an additional score of each head that has no value.
        max_rows_per_chunk: upper bound of the rows of a chunk. With 1, only the kernels for one row are launched.
        min_rows_per_chunk: lower bound. With 2, the kernels for one row are not launched.
        max_context: upper bound of the context lengths, such as max_blocks * block_size.
        rows_have_positions: True if every row is in a chunk, and no chunk has more rows than positions.
        splits_contexts: see `launch_attention`.

    Returns:
        [T, N, V], contiguous, in the dtype of the queries; zeros for rows without a chunk or before position 0.
    """
    num_heads, head_size = query_TNH.shape[1:]
    num_kv_heads = key_cache.shape[1]
    element_size, has_scales = query_TNH.element_size(), key_scales is not None
    return launch_attention(
        query_TNH,
        key_cache,
        value_cache,
        block_table,
        row_starts,
        context_lens,
        scale=scale,
        window=window,
        sinks_N=sinks_N,
        value_size=value_cache.shape[3],
        max_rows_per_chunk=max_rows_per_chunk,
        min_rows_per_chunk=min_rows_per_chunk,
        max_context=max_context,
        rows_have_positions=rows_have_positions,
        tile_config=tile_config(head_size, element_size, has_scales),
        split_config=split_config(num_heads // num_kv_heads, head_size, element_size, has_scales),
        splits=None if not splits_contexts else choose_splits(num_kv_heads),
        key_scales=key_scales,
        value_scales=value_scales,
    )


@functools.cache
def tile_config(head_size: int, element_size: int, has_float8_cache: bool = False) -> AttentionSpec:
    """Return the tiles for chunks of many rows: two warp groups with 64 pairs each, whose sums stay in registers.

    8-bit floats need more registers while they are converted.
    """
    if element_size == 4:  # without tensor cores, limited by registers and shared memory
        block = 32 if head_size <= 64 else 16
        return AttentionSpec(block_pairs=block, block_positions=block, num_warps=8, num_stages=1)
    if head_size <= 64:
        return AttentionSpec(block_pairs=128, block_positions=128, num_warps=8, num_stages=3)
    if head_size <= 128:
        return AttentionSpec(block_pairs=128, block_positions=64, num_warps=8, num_stages=3)
    if has_float8_cache:
        return AttentionSpec(block_pairs=64, block_positions=32, num_warps=4, num_stages=3)
    return AttentionSpec(block_pairs=128, block_positions=32, num_warps=8, num_stages=3)


@functools.cache
def split_config(group: int, head_size: int, element_size: int, has_float8_cache: bool = False) -> AttentionSpec:
    """Return the tiles for chunks of one row: few pairs, and enough positions in flight from memory."""
    block_pairs = min(max(next_power_of_2(group), 16), 64)
    if element_size == 4:
        return tile_config(head_size, element_size)
    if head_size <= 64:
        return AttentionSpec(block_pairs, block_positions=64, num_warps=4, num_stages=3 if has_float8_cache else 4)
    if head_size <= 128:
        return AttentionSpec(block_pairs, block_positions=64, num_warps=4, num_stages=3)
    if has_float8_cache:
        return AttentionSpec(block_pairs, block_positions=16, num_warps=4, num_stages=4)
    return AttentionSpec(block_pairs, block_positions=32, num_warps=4, num_stages=3)


@functools.cache
def choose_splits(num_kv_heads: int) -> Splits:
    """Return the splits of a context: enough that a single row with a long context fills a GPU."""
    return Splits(piece_size=256, max_splits=min(max(256 // next_power_of_2(num_kv_heads), 8), 32))
