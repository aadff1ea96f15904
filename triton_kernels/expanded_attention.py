"""Latent attention over expanded keys and values: all chunks of many rows and all heads at once.

The contexts of the chunks are concatenated, each rounded up to whole tiles, and divided into pieces whose expanded keys
and values fit into a limited amount of memory. A piece may end inside a context: the state of the online softmax is
then stored in float32, and the next piece continues from it. Pieces consist of whole tiles, so their borders do not
change the result.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.online_softmax import LOG2_E, chunk_of_tile, load_tile, softmax_weights
from moeserve.triton_kernels.paged_launch import CHUNKS_AT_ONCE, AttentionSpec
from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T tokens, N query heads, K unrotated values of a head's key, E rotated ones, V values of a head, L latent size,
# P = L + E, S chunks, C positions of a piece

MAX_EXPANDED_BYTES = 2**29  # keys and values of a piece
GATHERED_POSITIONS = 16  # positions that one program gathers
GATHER_WARPS = 8


def expanded_attention(
    query_TNK: Tensor,
    query_TNE: Tensor,
    cache: Tensor,
    block_table: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    lengths: Sequence[int],
    expand: Callable[[Tensor], tuple[Tensor, Tensor]],
    out_TNV: Tensor,
    *,
    scale: float,
) -> None:
    """Attend from row i of a chunk, at position p = context_len - num_rows + i, to the positions up to p.

    Scores, softmax and sums are float32. Weights are rounded to the dtype of the values before they are multiplied with
    them. Launches: one copy in each step, and for each piece one gather, the products of `expand`, and one attention.

    Operations: 2 * N * (K + E + V) for each row and position it attends to, which bound the time.
    Memory moved, beside queries and results: (K + V) * N * element size, written and read, for each position; and
    8 * V * N bytes for each row and piece border inside its context.

    Args:
        query_TNK, query_TNE: unrotated and rotated parts, float32, bfloat16 or float16; may be strided.
        cache: [num_blocks, block_size, P], same dtype, any block_size.
        block_table: [S, max_blocks] int32; entries beyond a chunk's context are not read.
        row_starts: [S + 1] int32, from 0: chunk s has the rows row_starts[s] to row_starts[s + 1] - 1, possibly none.
        context_lens: [S] int32.
        lengths: context_lens on the host, with 0 for chunks that are left out.
        expand: returns keys [N, C, K] and values [N, C, V], contiguous, of latent vectors [C, L].
        out_TNV: contiguous; written only in rows that have a position and whose chunk is not left out.
    """
    num_tokens, num_heads, key_size = query_TNK.shape
    extra_size, value_size = query_TNE.shape[2], out_TNV.shape[2]
    vector_size = cache.shape[2]
    num_chunks = len(lengths)
    config = tile_config(query_TNK.element_size())
    tile = config.block_positions
    starts, end = _starts(tuple(lengths), tile, cache.device)
    bytes_per_position = num_heads * (key_size + value_size) * query_TNK.element_size()
    piece_size = max(MAX_EXPANDED_BYTES // bytes_per_position // tile, 1) * tile
    has_one_piece = end <= piece_size
    state_TNV, maximum_TN, total_TN = (
        query_TNK.new_empty(0 if has_one_piece else (num_tokens, num_heads, *size), dtype=torch.float32)
        for size in ((value_size,), (), ())
    )
    num_tiles = num_tokens // config.block_pairs + num_chunks

    for first in range(0, end, piece_size):
        num_positions = min(piece_size, end - first)
        vectors_CP = cache.new_empty(num_positions, vector_size)
        gather_vectors_kernel[(num_positions // GATHERED_POSITIONS,)](
            cache,
            block_table,
            starts,
            context_lens,
            vectors_CP,
            *cache.stride()[:2],
            block_table.stride(0),
            num_chunks,
            first,
            VECTOR_SIZE=vector_size,
            CACHE_BLOCK=cache.shape[1],
            BLOCK_P=next_power_of_2(vector_size),
            BLOCK_C=GATHERED_POSITIONS,
            CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
            num_warps=GATHER_WARPS,
        )
        key_NCK, value_NCV = expand(vectors_CP[:, : vector_size - extra_size])
        attend_expanded_kernel[(num_tiles * num_heads,)](
            query_TNK,
            query_TNE,
            key_NCK,
            vectors_CP,
            value_NCV,
            starts,
            row_starts,
            context_lens,
            state_TNV,
            maximum_TN,
            total_TN,
            out_TNV,
            *query_TNK.stride()[:2],
            *query_TNE.stride()[:2],
            num_chunks,
            num_heads,
            num_tiles,
            first,
            num_positions,
            scale,
            **kernel_sizes(key_size, extra_size, value_size, vector_size),
            BLOCK_M=config.block_pairs,
            BLOCK_C=tile,
            CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
            **config.compile_options,
        )
        del vectors_CP, key_NCK, value_NCV  # before those of the next piece are allocated


@functools.lru_cache(maxsize=2)  # the layers of a step, or of its halves, share them
def _starts(lengths: tuple[int, ...], tile: int, device: torch.device) -> tuple[Tensor, int]:
    """Return where each context begins if all are rounded up to whole tiles, [S + 1] int32, and the end of the last."""
    ends = list(itertools.accumulate(ceil_div(length, tile) * tile for length in lengths))
    # A copy of this size from memory that is not pinned returns before the device has finished it.
    return torch.tensor([0, *ends], dtype=torch.int32).to(device, non_blocking=True), ends[-1]


@functools.cache
def tile_config(element_size: int) -> AttentionSpec:
    """Return the tiles: two warp groups with 64 rows each, whose sums stay in registers."""
    if element_size == 4:  # without tensor cores, limited by registers and shared memory
        return AttentionSpec(block_pairs=16, block_positions=16, num_warps=8, num_stages=1)
    return AttentionSpec(block_pairs=128, block_positions=64, num_warps=8, num_stages=3)


@functools.cache
def kernel_sizes(key_size: int, extra_size: int, value_size: int, vector_size: int) -> dict[str, Any]:
    """Return the compile-time sizes of the attention kernel."""
    return {
        "KEY_SIZE": key_size,
        "EXTRA_SIZE": extra_size,
        "VALUE_SIZE": value_size,
        "VECTOR_SIZE": vector_size,
        "BLOCK_K": max(next_power_of_2(key_size), 16),
        "BLOCK_E": max(next_power_of_2(extra_size), 16),
        "BLOCK_V": max(next_power_of_2(value_size), 16),
    }


@triton.jit(do_not_specialize=["table_stride", "num_chunks", "first"])
def gather_vectors_kernel(
    cache_ptr,  # [num_blocks, CACHE_BLOCK, VECTOR_SIZE]
    block_table_ptr,  # [S, max_blocks] int32
    starts_ptr,  # [S + 1] int32: where each context begins among all contexts
    context_lens_ptr,  # [S] int32
    output_ptr,  # [C, VECTOR_SIZE], contiguous
    cache_block_stride,
    cache_position_stride,
    table_stride,
    num_chunks,
    first,  # place of the piece among all contexts
    VECTOR_SIZE: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,  # power of two, at least VECTOR_SIZE
    BLOCK_C: tl.constexpr,  # positions of one program; divides every context's places
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Copy BLOCK_C vectors of one context. Positions behind the end of the context get zeros."""
    row = tl.program_id(0) * BLOCK_C
    chunk = chunk_of_tile(starts_ptr, num_chunks, (first + row) // BLOCK_C, 1, BLOCK_C, 0, CHUNKS_AT_ONCE)
    positions = first + row - tl.load(starts_ptr + chunk) + tl.arange(0, BLOCK_C)
    is_inside = positions < tl.load(context_lens_ptr + chunk)
    table_ptr = block_table_ptr + chunk.to(tl.int64) * table_stride
    blocks = tl.load(table_ptr + positions // CACHE_BLOCK, mask=is_inside, other=0)
    offsets = blocks.to(tl.int64) * cache_block_stride + positions % CACHE_BLOCK * cache_position_stride
    elements = tl.arange(0, BLOCK_P)
    is_element = (elements < VECTOR_SIZE)[None, :]
    vectors = tl.load(cache_ptr + offsets[:, None] + elements[None, :], mask=is_inside[:, None] & is_element, other=0.0)
    rows = row.to(tl.int64) + tl.arange(0, BLOCK_C)
    tl.store(output_ptr + rows[:, None] * VECTOR_SIZE + elements[None, :], vectors, mask=is_element)


@triton.jit(do_not_specialize=["num_chunks", "num_tiles", "first", "num_positions"])
def attend_expanded_kernel(
    query_ptr,  # [T, N, KEY_SIZE]
    query_extra_ptr,  # [T, N, EXTRA_SIZE]
    key_ptr,  # [N, C, KEY_SIZE], contiguous
    vectors_ptr,  # [C, VECTOR_SIZE], contiguous: the last EXTRA_SIZE elements belong to the keys of all heads
    value_ptr,  # [N, C, VALUE_SIZE], contiguous
    starts_ptr,  # [S + 1] int32: where each context begins among all contexts
    row_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    state_ptr,  # [T, N, VALUE_SIZE] float32: sums of values times weights, relative to the maximum
    maximum_ptr,  # [T, N] float32: largest score, in base-2 logarithms
    total_ptr,  # [T, N] float32: sums of the weights
    output_ptr,  # [T, N, VALUE_SIZE], contiguous
    query_row_stride,
    query_head_stride,
    extra_row_stride,
    extra_head_stride,
    num_chunks,
    num_heads,
    num_tiles,
    first,  # place of the piece among all contexts
    num_positions,  # C
    scale,
    KEY_SIZE: tl.constexpr,
    EXTRA_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VECTOR_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Attend from BLOCK_M rows of one chunk and head to the positions of a piece."""
    head = tl.program_id(0) // num_tiles  # neighbours read the same keys and values
    slot = num_tiles - 1 - tl.program_id(0) % num_tiles
    chunk = chunk_of_tile(row_starts_ptr, num_chunks, slot, 1, BLOCK_M, 1, CHUNKS_AT_ONCE)
    first_row = tl.load(row_starts_ptr + chunk)
    num_rows = tl.load(row_starts_ptr + chunk + 1) - first_row
    first_pair = (slot - (first_row // BLOCK_M + chunk)) * BLOCK_M
    start = tl.load(starts_ptr + chunk)
    if (tl.load(starts_ptr + chunk + 1) == start) | (first_pair >= num_rows):
        return
    first_position = tl.load(context_lens_ptr + chunk) - num_rows  # negative if there are more rows than positions
    lowest = first_position + first_pair
    end = first_position + tl.minimum(first_pair + BLOCK_M, num_rows)
    begin = tl.maximum(first - start, 0)
    until = tl.minimum(first - start + num_positions, end)
    if begin >= until:
        return

    pairs = first_pair + tl.arange(0, BLOCK_M)
    is_row = pairs < num_rows
    positions = first_position + pairs
    rows = (first_row + pairs).to(tl.int64)
    keys = tl.arange(0, BLOCK_K)
    extras = tl.arange(0, BLOCK_E)
    values = tl.arange(0, BLOCK_V)
    query = tl.load(
        query_ptr + (rows * query_row_stride + head * query_head_stride)[:, None] + keys[None, :],
        mask=is_row[:, None] & (keys < KEY_SIZE)[None, :],
        other=0.0,
    )
    query_extra = tl.load(
        query_extra_ptr + (rows * extra_row_stride + head * extra_head_stride)[:, None] + extras[None, :],
        mask=is_row[:, None] & (extras < EXTRA_SIZE)[None, :],
        other=0.0,
    )
    places = rows * num_heads + head
    result_offsets = places[:, None] * VALUE_SIZE + values[None, :]
    is_result = is_row[:, None] & (values < VALUE_SIZE)[None, :]
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if begin > 0:
        maximum = tl.load(maximum_ptr + places, mask=is_row, other=0.0)
        total = tl.load(total_ptr + places, mask=is_row, other=0.0)
        weighted = tl.load(state_ptr + result_offsets, mask=is_result, other=0.0)

    # All rows attend to the positions before all_to; lowest may be negative.
    all_to = tl.minimum(tl.maximum((lowest + 1) // BLOCK_C * BLOCK_C, begin), until)
    # The first position of the context, in the piece; negative if the piece begins inside it.
    base = head.to(tl.int64) * num_positions + start - first
    for phase in tl.static_range(2):
        for place in range(begin if phase == 0 else all_to, all_to if phase == 0 else until, BLOCK_C):
            columns = place + tl.arange(0, BLOCK_C)
            key = load_tile(
                key_ptr + (base + columns)[:, None] * KEY_SIZE + keys[None, :],
                None,
                (keys < KEY_SIZE)[None, :],
                False,
                KEY_SIZE,
                BLOCK_K,
            )
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            key_extra = load_tile(
                vectors_ptr
                + (start - first + columns).to(tl.int64)[:, None] * VECTOR_SIZE
                + (VECTOR_SIZE - EXTRA_SIZE + extras)[None, :],
                None,
                (extras < EXTRA_SIZE)[None, :],
                False,
                EXTRA_SIZE,
                BLOCK_E,
            )
            scores = tl.dot(query_extra, tl.trans(key_extra), scores, input_precision="ieee")
            scores *= scale * LOG2_E
            if phase == 1:
                scores = tl.where(columns[None, :] <= positions[:, None], scores, float("-inf"))
            weights, weighted, maximum, total = softmax_weights(scores, weighted, maximum, total, phase == 1)
            value = load_tile(
                value_ptr + (base + columns)[:, None] * VALUE_SIZE + values[None, :],
                None,
                (values < VALUE_SIZE)[None, :],
                False,
                VALUE_SIZE,
                BLOCK_V,
            )
            weighted = tl.dot(weights.to(value.dtype), value, weighted, input_precision="ieee")

    if until < end:
        tl.store(maximum_ptr + places, maximum, mask=is_row)
        tl.store(total_ptr + places, total, mask=is_row)
        tl.store(state_ptr + result_offsets, weighted, mask=is_result)
    else:
        # The total of a row before position 0 is 0.
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(output_ptr + result_offsets, result.to(output_ptr.dtype.element_ty), mask=is_result)
