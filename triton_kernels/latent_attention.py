"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) over a paged cache of latent vectors.

All heads share the vectors: a vector is the key, and its first L elements are the value. The projections between latent
vectors and the keys and values of heads are part of the queries and of the results, so no weights are needed here.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.paged_launch import AttentionSpec, Splits, launch_attention
from moeserve.triton_kernels.sizes import next_power_of_2

# T tokens, N query heads, L latent size, P size of a vector (latent and rotary part), S chunks


WRITE_WARPS = 4
MAX_PROGRAMS = 512  # for splits: about four for each multiprocessor


def write_latents(latent_TP: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Store each token's vector at its slot, block * block_size + offset. A slot of -1 stores nothing.

    Memory moved: 2 * T * P * element size, and the slots.

    Args:
        latent_TP: [T, P]; may be strided.
        cache: [num_blocks, block_size, P], same dtype.
        slots_T: [T] int64, contiguous.
    """
    num_tokens, vector_size = latent_TP.shape
    if num_tokens == 0:  # an empty grid cannot be launched
        return
    write_latents_kernel[(num_tokens,)](
        latent_TP,
        cache,
        slots_T,
        *latent_TP.stride(),
        *cache.stride()[:2],
        vector_size,
        CACHE_BLOCK=cache.shape[1],
        BLOCK_P=next_power_of_2(vector_size),
        num_warps=WRITE_WARPS,
    )


def latent_attention(
    query_TNP: Tensor,
    cache: Tensor,
    block_table: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    latent_size: int,
    max_rows_per_chunk: int,
    min_rows_per_chunk: int = 0,
    max_context: int,
    max_rows: int | None = None,
    rows_have_positions: bool = False,
    splits_contexts: bool = True,
) -> Tensor:
    """Attend from row i of a chunk, at position context_len - num_rows + i, to the positions up to it.

    Scores, softmax and sums are float32. Weights are rounded to the dtype of the vectors before they are multiplied
    with them. With splits, the last bits of the results of chunks of one row depend on the other chunks and on
    `max_context`, because many chunks have longer splits and other tiles. Without, the result of a row does not depend
    on its chunk or on others.

    Memory moved: for a chunk of one row, P * element size for each position, which bounds the time up to about 32
    heads; and 4 * L + 8 bytes, written and read, for each head and split. Operations: 2 * N * (P + L) for each row and
    position it attends to, which bound the time otherwise. With `few_config`, scores are computed twice.

    Args:
        query_TNP: [T, N, P] float32, bfloat16 or float16; may be strided.
        cache: [num_blocks, block_size, P], same dtype, any block_size.
        block_table: [S, max_blocks] int32; entries beyond a chunk's context are not read.
        row_starts: [S + 1] int32, from 0: chunk s has the rows row_starts[s] to row_starts[s + 1] - 1, possibly none.
        context_lens: [S] int32.
        scale: factor of the products of queries and vectors.
        latent_size: L, the number of a vector's elements that are its value.
        max_rows_per_chunk: upper bound of the rows of a chunk, except those with more than `max_rows`. With 1, only the
            kernels for one row are launched.
        min_rows_per_chunk: lower bound. With 2, the kernels for one row are not launched.
        max_context: upper bound of the context lengths, such as max_blocks * block_size.
        max_rows: chunks of more rows get zeros; None: there are none.
        rows_have_positions: True if every row is in a chunk, and no chunk has more rows than positions.
        splits_contexts: see `launch_attention`.

    Returns:
        [T, N, L], contiguous, in the dtype of the queries; zeros for rows without a chunk or before position 0.
    """
    num_heads, element_size = query_TNP.shape[1], query_TNP.element_size()
    return launch_attention(
        query_TNP,
        cache[:, None],
        None,
        block_table,
        row_starts,
        context_lens,
        scale=scale,
        window=None,
        sinks_N=None,
        value_size=latent_size,
        max_rows_per_chunk=max_rows_per_chunk,
        min_rows_per_chunk=min_rows_per_chunk,
        max_context=max_context,
        max_attended_rows=max_rows,
        rows_have_positions=rows_have_positions,
        tile_config=tile_config(latent_size, element_size),
        split_config=split_config(num_heads, latent_size, element_size),
        few_config=few_config(num_heads, element_size),
        splits=None if not splits_contexts else choose_splits(num_heads),
    )


@functools.cache
def tile_config(latent_size: int, element_size: int) -> AttentionSpec:
    """Return the tiles for chunks of many rows: the sums of 64 pairs x 512 elements take half of 8 warps' registers."""
    if element_size == 4:  # without tensor cores, limited by registers and shared memory
        return AttentionSpec(block_pairs=16, block_positions=16, num_warps=8, num_stages=1)
    return AttentionSpec(block_pairs=64, block_positions=32, num_warps=8, num_stages=3)


@functools.cache
def split_config(num_heads: int, latent_size: int, element_size: int) -> AttentionSpec:
    """Return the tiles for chunks of one row: two warp groups have up to 64 heads."""
    block_pairs = min(max(next_power_of_2(num_heads), 16), 64)
    if element_size == 4:
        return tile_config(latent_size, element_size)
    num_stages = 4 if block_pairs == 16 else 3
    return AttentionSpec(block_pairs, 32, num_warps=8, num_stages=num_stages)


@functools.cache
def few_config(num_heads: int, element_size: int) -> AttentionSpec | None:
    """Return the tiles for few chunks of one row, if they differ: two programs share the values of 64 heads.

    Both compute the scores, which costs nothing while multiprocessors would be idle.
    """
    if num_heads <= 32 or element_size == 4:
        return None
    return AttentionSpec(block_pairs=64, block_positions=32, num_warps=4, num_stages=3, num_parts=2)


@functools.cache
def choose_splits(num_heads: int) -> Splits:
    """Return the splits of a context: one of 32k positions has 128 programs.

    Partial sums of more heads take more memory, so there are fewer, of longer pieces.
    """
    num_padded = next_power_of_2(num_heads)
    longest = 256 if num_heads <= 32 else 512  # more heads have two programs for each split
    return Splits(
        piece_size=min(max(16 * num_padded, 128), longest),
        max_splits=min(max(4096 // num_padded, 32), 128),
        max_programs=MAX_PROGRAMS,
    )


@triton.jit
def write_latents_kernel(
    latent_ptr,  # [T, P]
    cache_ptr,  # [num_blocks, CACHE_BLOCK, P]
    slots_ptr,  # [T] int64
    token_stride,
    element_stride,
    cache_block_stride,
    cache_position_stride,
    vector_size,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,  # power of two, at least P
):
    token = tl.program_id(0).to(tl.int64)  # token * stride can exceed 2**31
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    elements = tl.arange(0, BLOCK_P)
    is_inside = elements < vector_size
    vector = tl.load(latent_ptr + token * token_stride + elements * element_stride, mask=is_inside)
    position = (slot // CACHE_BLOCK) * cache_block_stride + (slot % CACHE_BLOCK) * cache_position_stride
    tl.store(cache_ptr + position + elements, vector, mask=is_inside)
