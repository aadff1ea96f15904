"""Attention kernels over a paged cache, shared by grouped-query and latent attention.

Latent attention has one key-value head, whose values are the first elements of its keys. One kernel serves chunks of
one row and splits their context among programs; another serves chunks of more rows. The number of rows of its chunk
alone determines which kernel serves a row, unless the second one serves all.

Queries that share keys and values are the rows of a matrix product. They are the pairs (row, head) of a chunk: pair i
is row i // group and head i % group.

Kernels are not specialised on sizes that change from step to step, because serving must not wait for a compiler.
The file is longer than others because the three kernels share their inner loop, masks and order of additions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.float8_rows import decode_float8

# T tokens, N query heads, G key-value heads, P size of a key, V size of a value, E elements of a key beyond its value,
# S chunks, Z splits, M pairs of a tile, C positions of a tile

LOG2_E = tl.constexpr(1.4426950408889634)  # the hardware computes powers of 2
CHUNKS_AT_ONCE = 256  # chunks that a program reads at a time to find its own
MAX_PARTIAL_BYTES = 2**30  # partial sums of splits; more chunks take several launches
PROGRAMS_PER_SM = 4  # for splits; as many as run at a time, or more
NUM_INTERPRETED_PROGRAMS = 3  # in Triton's interpreter, few enough that each computes several splits
MAX_MERGED = 2**14  # partial sums of one program that merges splits


@dataclass(frozen=True)
class AttentionConfig:
    """Compile-time sizes of an attention kernel."""

    block_pairs: int  # pairs of row and head of one program
    block_positions: int  # positions of the context in one iteration
    num_warps: int
    num_stages: int

    @property
    def compile_options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Splits:
    """Division of the context of one row. It depends on the model's shape only, as it fixes the order of additions.

    Piece i, counted from the first piece that the row attends to, belongs to split i % max_splits. So a result does not
    depend on the other chunks of the step, and the number of partial sums is bounded for long contexts.
    """

    piece_size: int  # positions, a multiple of AttentionConfig.block_positions
    max_splits: int  # of one context and key-value head, a power of two


def launch_attention(
    query_TNP: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    block_table: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    sinks_N: Tensor | None,
    value_size: int,
    max_rows_per_chunk: int,
    max_context: int,
    max_attended_rows: int,
    tile_config: AttentionConfig,
    split_config: AttentionConfig,
    splits: Splits | None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Launch the kernels of one attention call; see `paged_attention.paged_attention`.

    Args:
        value_cache: None if the values are the first `value_size` elements of the keys.
        max_attended_rows: chunks of more rows get zeros.
        splits: how the context of a chunk of one row is divided among programs. None: it is not, and all rows have one
            order of additions, whatever the sizes of chunks; slow for few requests with long contexts.
        key_scales, value_scales: of contiguous caches of 8-bit floats.

    Returns:
        [T, N, value_size]
    """
    num_tokens, num_heads, key_size = query_TNP.shape
    _, num_kv_heads, cache_block, _ = key_cache.shape
    num_chunks = context_lens.shape[0]
    if key_scales is None:
        assert query_TNP.dtype == key_cache.dtype
    else:
        assert key_cache.dtype == torch.uint8
        assert key_cache.is_contiguous()
        for scales in (key_scales, value_scales):
            assert scales is not None
            assert scales.is_contiguous()
            assert scales.shape == key_cache.shape[:3]
    assert key_cache.stride(3) == 1
    assert block_table.dtype == row_starts.dtype == context_lens.dtype == torch.int32
    assert row_starts.shape == (num_chunks + 1,)
    assert block_table.shape[0] == num_chunks
    assert row_starts.is_contiguous()
    assert context_lens.is_contiguous()
    assert block_table.stride(1) == 1
    assert max_rows_per_chunk >= 0
    if query_TNP.stride(2) != 1:
        query_TNP = query_TNP.contiguous()
    group = num_heads // num_kv_heads
    # If all chunks have one row, the merging kernel also writes the zeros.
    is_one_row_each = max_rows_per_chunk <= 1 and splits is not None
    new = query_TNP.new_empty if is_one_row_each and num_chunks > 0 else query_TNP.new_zeros
    output_TNV = new(num_tokens, num_heads, value_size)
    if output_TNV.numel() == 0 or num_chunks == 0:
        return output_TNV

    sizes = kernel_sizes(
        group=group,
        window=window,
        cache_block=cache_block,
        value_size=value_size,
        extra_size=key_size - value_size if value_cache is None else None,
    )
    caches = (key_cache, value_cache, key_scales, value_scales)
    tables = (block_table, row_starts, context_lens)
    strides = (*query_TNP.stride()[:2], *key_cache.stride()[:3], block_table.stride(0))
    if not is_one_row_each and max_attended_rows >= 1:
        num_tiles = num_tokens * group // tile_config.block_pairs + num_chunks
        attend_tile_kernel[(num_tiles * num_kv_heads,)](
            query_TNP,
            *caches,
            *tables,
            sinks_N,
            output_TNV,
            *strides,
            num_chunks,
            num_heads,
            num_kv_heads,
            max_attended_rows,
            scale,
            **sizes,
            LEAST_ROWS=1 if splits is None else 2,
            BLOCK_M=tile_config.block_pairs,
            BLOCK_C=tile_config.block_positions,
            CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
            **tile_config.compile_options,
        )
    if splits is None:
        return output_TNV
    if max_attended_rows < 1:
        return output_TNV.zero_() if is_one_row_each else output_TNV

    # A window may begin inside a piece.
    longest = max_context if window is None else min(max_context, window + splits.piece_size - 1)
    num_splits = max(min(triton.cdiv(longest, splits.piece_size), splits.max_splits), 1)
    bytes_per_chunk = num_splits * num_heads * (value_size + 2) * torch.float32.itemsize
    # Slices of tables at multiples of 4 keep the alignment that kernels are compiled for.
    chunks_at_once = min(num_chunks, max(MAX_PARTIAL_BYTES // bytes_per_chunk // 4 * 4, 4))
    partial_SZNV, maximum_SZN, total_SZN = (
        query_TNP.new_empty(chunks_at_once, num_splits, num_heads, *size, dtype=torch.float32)
        for size in ((value_size,), (), ())
    )
    num_tiles = triton.cdiv(group, split_config.block_pairs)
    shares_programs = value_cache is None and can_share_programs(split_config, value_size)
    block_merged = min(sizes["BLOCK_V"], MAX_MERGED // splits.max_splits)
    for first in range(0, num_chunks, chunks_at_once):
        num_own = min(chunks_at_once, num_chunks - first)
        is_last = first + num_own == num_chunks
        grid = (num_kv_heads * num_tiles, num_own, num_splits)
        if shares_programs:
            grid = (min(math.prod(grid), num_programs(query_TNP.device)), 1, 1)
        attend_split_kernel[grid](
            query_TNP,
            *caches,
            *(table[first:] for table in tables),
            partial_SZNV,
            maximum_SZN,
            total_SZN,
            *strides,
            num_own,
            num_splits,
            num_heads,
            num_tiles,
            scale,
            **sizes,
            PIECE_SIZE=splits.piece_size,
            MAX_SPLITS=splits.max_splits,
            BLOCK_M=split_config.block_pairs,
            BLOCK_C=split_config.block_positions,
            CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
            SHARES_PROGRAMS=shares_programs,
            **split_config.compile_options,
        )
        num_padding = num_tokens if is_one_row_each and is_last else 0
        merge_splits_kernel[(num_own + num_padding, num_heads, triton.cdiv(value_size, block_merged))](
            partial_SZNV,
            maximum_SZN,
            total_SZN,
            row_starts[first:],
            context_lens[first:],
            sinks_N,
            output_TNV,
            num_own,
            num_heads,
            num_splits,
            WINDOW=window,
            VALUE_SIZE=value_size,
            BLOCK_V=block_merged,
            PIECE_SIZE=splits.piece_size,
            MAX_SPLITS=splits.max_splits,
            num_warps=merge_warps(splits.max_splits, block_merged),
        )
    return output_TNV


def can_share_programs(config: AttentionConfig, value_size: int) -> bool:
    """Return True if programs of latent attention compute several splits.

    Not if the sums take so many registers that the loop over splits spills; neither in grouped-query attention.
    """
    return config.block_pairs * value_size < 2**15


@functools.cache
def num_programs(device: torch.device) -> int:
    """Return the number of programs that share the splits of all chunks."""
    if device.type != "cuda":
        return NUM_INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_SM


def kernel_sizes(
    *, group: int, window: int | None, cache_block: int, value_size: int, extra_size: int | None
) -> dict[str, Any]:
    """Return the compile-time sizes that both attention kernels share.

    Args:
        extra_size: elements of a key beyond its value, if they share memory; otherwise None.
    """
    return {
        "GROUP": group,
        "WINDOW": window,
        "CACHE_BLOCK": cache_block,
        "VALUE_SIZE": value_size,
        "EXTRA_SIZE": extra_size or 0,
        "BLOCK_V": max(triton.next_power_of_2(value_size), 16),
        "BLOCK_E": max(triton.next_power_of_2(extra_size or 0), 16),
        "SHARES_VALUE": extra_size is not None,
    }


def merge_warps(max_splits: int, block_values: int) -> int:
    """Return the number of warps with which a thread holds 32 or 64 partial sums."""
    return min(max(max_splits * block_values // 1024, 1), 8)


@triton.jit(do_not_specialize=["table_stride", "num_chunks", "max_attended_rows"])
def attend_tile_kernel(
    query_ptr,  # [T, N, P]: P is VALUE_SIZE + EXTRA_SIZE
    key_cache_ptr,  # [num_blocks, G, CACHE_BLOCK, P]
    value_cache_ptr,  # [num_blocks, G, CACHE_BLOCK, VALUE_SIZE], or None
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
    EXTRA_SIZE: tl.constexpr,  # elements of a key beyond its value, if they share memory
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

    chunk = chunk_of_tile(row_starts_ptr, num_chunks, slot, GROUP, BLOCK_M, True, CHUNKS_AT_ONCE)
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
        first = tl.maximum(lowest - WINDOW + 1, 0)
        all_from = tl.minimum(tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), BLOCK_C) * BLOCK_C, end)
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
                query_extra,
                weighted,
                maximum,
                total,
                key_cache_ptr + head_offset,
                value_cache_ptr if SHARES_VALUE else value_cache_ptr + head_offset,
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


@triton.jit(do_not_specialize=["table_stride", "num_chunks", "num_splits"])
def attend_split_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_table_ptr,
    row_starts_ptr,
    context_lens_ptr,
    partial_ptr,  # [S, Z, N, VALUE_SIZE] float32: sums of values times weights, relative to the maximum
    maximum_ptr,  # [S, Z, N] float32: largest score, in base-2 logarithms
    total_ptr,  # [S, Z, N] float32: sums of the weights
    query_row_stride,
    query_head_stride,
    cache_block_stride,
    cache_head_stride,
    cache_position_stride,
    table_stride,
    num_chunks,
    num_splits,  # Z
    num_heads,
    num_tiles,  # tiles of BLOCK_M heads in a group
    scale,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    EXTRA_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SHARES_VALUE: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
    SHARES_PROGRAMS: tl.constexpr,
):
    """Attend from the chunks of one row to the splits of their contexts; see `attend_tile_kernel` for the arguments.

    A program computes one tile of BLOCK_M heads and one split. With SHARES_PROGRAMS, it computes several, so that none
    starts for nothing however long the longest context may be. Neighbours read the same positions.
    """
    if SHARES_PROGRAMS:
        num_tiles_each = num_heads // GROUP * num_tiles
        _, _, num_slots = find_split(
            row_starts_ptr, context_lens_ptr, num_chunks, 0, WINDOW, PIECE_SIZE, MAX_SPLITS, CHUNKS_AT_ONCE
        )
        for item in range(tl.program_id(0), num_slots * num_tiles_each, tl.num_programs(0)):
            slot = item // num_tiles_each
            chunk, split, _ = find_split(
                row_starts_ptr, context_lens_ptr, num_chunks, slot, WINDOW, PIECE_SIZE, MAX_SPLITS, CHUNKS_AT_ONCE
            )
            attend_split(
                chunk.to(tl.int64),
                split,
                item % num_tiles_each,
                query_ptr,
                key_cache_ptr,
                value_cache_ptr,
                key_scales_ptr,
                value_scales_ptr,
                block_table_ptr,
                row_starts_ptr,
                context_lens_ptr,
                partial_ptr,
                maximum_ptr,
                total_ptr,
                query_row_stride,
                query_head_stride,
                cache_block_stride,
                cache_head_stride,
                cache_position_stride,
                table_stride,
                num_splits,
                num_heads,
                num_tiles,
                scale,
                GROUP,
                WINDOW,
                CACHE_BLOCK,
                VALUE_SIZE,
                EXTRA_SIZE,
                BLOCK_V,
                BLOCK_E,
                SHARES_VALUE,
                PIECE_SIZE,
                MAX_SPLITS,
                BLOCK_M,
                BLOCK_C,
            )
    else:
        chunk = tl.program_id(1).to(tl.int64)
        _, _, num_pieces = pieces_of(tl.load(context_lens_ptr + chunk), WINDOW, PIECE_SIZE)
        num_rows = tl.load(row_starts_ptr + chunk + 1) - tl.load(row_starts_ptr + chunk)
        if (num_rows != 1) | (tl.program_id(2) >= num_pieces):
            return
        attend_split(
            chunk,
            tl.program_id(2),
            tl.program_id(0),
            query_ptr,
            key_cache_ptr,
            value_cache_ptr,
            key_scales_ptr,
            value_scales_ptr,
            block_table_ptr,
            row_starts_ptr,
            context_lens_ptr,
            partial_ptr,
            maximum_ptr,
            total_ptr,
            query_row_stride,
            query_head_stride,
            cache_block_stride,
            cache_head_stride,
            cache_position_stride,
            table_stride,
            num_splits,
            num_heads,
            num_tiles,
            scale,
            GROUP,
            WINDOW,
            CACHE_BLOCK,
            VALUE_SIZE,
            EXTRA_SIZE,
            BLOCK_V,
            BLOCK_E,
            SHARES_VALUE,
            PIECE_SIZE,
            MAX_SPLITS,
            BLOCK_M,
            BLOCK_C,
        )


@triton.jit
def attend_split(
    chunk,
    split,
    tile,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_table_ptr,
    row_starts_ptr,
    context_lens_ptr,
    partial_ptr,
    maximum_ptr,
    total_ptr,
    query_row_stride,
    query_head_stride,
    cache_block_stride,
    cache_head_stride,
    cache_position_stride,
    table_stride,
    num_splits,
    num_heads,
    num_tiles,
    scale,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    EXTRA_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SHARES_VALUE: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Attend from one tile of heads to every MAX_SPLITS-th piece of the context of a chunk."""
    kv_head = tile // num_tiles
    row = tl.load(row_starts_ptr + chunk).to(tl.int64)
    context_len = tl.load(context_lens_ptr + chunk)
    first, first_piece, num_pieces = pieces_of(context_len, WINDOW, PIECE_SIZE)
    members = (tile % num_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = members < GROUP
    heads = kv_head * GROUP + members
    query_offsets = row * query_row_stride + heads * query_head_stride
    values = tl.arange(0, BLOCK_V)
    extras = VALUE_SIZE + tl.arange(0, BLOCK_E)
    query = tl.load(
        query_ptr + query_offsets[:, None] + values[None, :],
        mask=is_head[:, None] & (values < VALUE_SIZE)[None, :],
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
    num_own = (num_pieces - 1 - split) // MAX_SPLITS + 1
    last_begin = (first_piece + split + (num_own - 1) * MAX_SPLITS) * PIECE_SIZE
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
        next_piece = first_piece + split + number // TILES_PER_PIECE * MAX_SPLITS
        next_columns = next_piece * PIECE_SIZE + number % TILES_PER_PIECE * BLOCK_C + tl.arange(0, BLOCK_C)
        next_blocks = load_blocks(table_ptr, next_columns, first, context_len, CACHE_BLOCK)
        weighted, maximum, total = attend_positions(
            query,
            query_extra,
            weighted,
            maximum,
            total,
            key_cache_ptr + head_offset,
            value_cache_ptr if SHARES_VALUE else value_cache_ptr + head_offset,
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
            BLOCK_V,
            BLOCK_E,
            SHARES_VALUE,
        )
        columns, blocks = next_columns, next_blocks

    places = (chunk * num_splits + split) * num_heads + heads
    tl.store(maximum_ptr + places, maximum, mask=is_head)
    tl.store(total_ptr + places, total, mask=is_head)
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
    row_starts_ptr,
    context_lens_ptr,
    sinks_ptr,
    output_ptr,
    num_chunks,
    num_heads,
    num_splits,
    WINDOW: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
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
    # Always MAX_SPLITS, whatever the step has, so that the order of additions is the same in all steps.
    splits = tl.arange(0, MAX_SPLITS)
    is_used = splits < num_pieces
    places = (chunk * num_splits + splits) * num_heads + head
    maximum_Z = tl.load(maximum_ptr + places, mask=is_used, other=float("-inf"))
    total_Z = tl.load(total_ptr + places, mask=is_used, other=0.0)
    partial_ZV = tl.load(
        partial_ptr + places[:, None] * VALUE_SIZE + values[None, :],
        mask=is_used[:, None] & is_value[None, :],
        other=0.0,
    )
    maximum = tl.max(maximum_Z, axis=0)
    share_Z = tl.exp2(maximum_Z - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(total_Z * share_Z, axis=0)
    weighted = tl.sum(partial_ZV * share_Z[:, None], axis=0)
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
def chunk_of_tile(
    starts_ptr,
    num_chunks,
    tile,
    GROUP: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    HAS_PARTIAL_TILES: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Return the last chunk whose tiles start at this tile or before it.

    The tiles of chunk s start at starts[s] * GROUP // TILE_SIZE, + s if that must leave room for partial last tiles.
    """
    num_begun = 0
    for first_chunk in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first_chunk + tl.arange(0, CHUNKS_AT_ONCE)
        starts = tl.load(starts_ptr + chunks, mask=chunks < num_chunks, other=0)
        first_tiles = starts * GROUP // TILE_SIZE
        if HAS_PARTIAL_TILES:
            first_tiles += chunks
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
def find_split(
    row_starts_ptr,
    context_lens_ptr,
    num_chunks,
    slot,
    WINDOW: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Return the chunk and the split of a slot, and the number of slots: the splits of all chunks of one row."""
    chunk = 0
    first_slot = 0
    num_slots = 0
    for first_chunk in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first_chunk + tl.arange(0, CHUNKS_AT_ONCE)
        is_chunk = chunks < num_chunks
        starts = tl.load(row_starts_ptr + chunks, mask=is_chunk, other=0)
        ends = tl.load(row_starts_ptr + chunks + 1, mask=is_chunk, other=0)
        context_lens = tl.load(context_lens_ptr + chunks, mask=is_chunk, other=0)
        _, _, num_pieces = pieces_of(context_lens, WINDOW, PIECE_SIZE)
        counts = tl.where(ends - starts == 1, tl.minimum(num_pieces, MAX_SPLITS), 0)
        is_before = is_chunk & (num_slots + tl.cumsum(counts, axis=0) <= slot)
        chunk += tl.sum(is_before.to(tl.int32), axis=0)
        first_slot += tl.sum(tl.where(is_before, counts, 0), axis=0)
        num_slots += tl.sum(counts, axis=0)
    return chunk, slot - first_slot, num_slots


@triton.jit
def pieces_of(context_len, WINDOW: tl.constexpr, PIECE_SIZE: tl.constexpr):
    """Return the first position that the last row attends to, the piece of that position, and the number of pieces."""
    first = context_len * 0
    if WINDOW is not None:
        first = tl.maximum(context_len - WINDOW, 0)
    first_piece = first // PIECE_SIZE
    return first, first_piece, tl.cdiv(context_len, PIECE_SIZE) - first_piece


@triton.jit
def load_blocks(table_ptr, columns, first, end, CACHE_BLOCK: tl.constexpr):
    """Load the cache block of each position, one iteration ahead so that keys and values need not wait for it."""
    return tl.load(table_ptr + columns // CACHE_BLOCK, mask=(columns >= first) & (columns < end), other=0)


@triton.jit
def attend_positions(
    query,  # [M, V]
    query_extra,  # [M, E]
    weighted,  # [M, V] float32
    maximum,  # [M]
    total,  # [M]
    key_ptr,  # block 0 of the key-value head
    value_ptr,
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
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SHARES_VALUE: tl.constexpr,
):
    """Add BLOCK_C positions to an online softmax, which is relative to the largest score so far.

    Positions outside first to end - 1 are loaded as zeros: a weight of 0 times an uninitialised NaN would be NaN.
    """
    values = tl.arange(0, BLOCK_V)
    is_value = (values < VALUE_SIZE)[None, :]
    is_read = (columns >= first) & (columns < end)
    offsets = blocks.to(tl.int64) * cache_block_stride + columns % CACHE_BLOCK * cache_position_stride
    key = load_tile(
        key_ptr + offsets[:, None] + values[None, :], is_read[:, None], is_value, IS_MASKED, VALUE_SIZE, BLOCK_V
    )
    if key_scales_ptr is not None:
        rows = blocks.to(tl.int64) * (cache_block_stride // VALUE_SIZE) + kv_head * CACHE_BLOCK + columns % CACHE_BLOCK
        key = decode_float8(key, tl.load(key_scales_ptr + rows, mask=is_read, other=0.0), query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
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
        scores = tl.dot(query_extra, tl.trans(key_extra), scores, input_precision="ieee")
    scores *= scale * LOG2_E
    if IS_MASKED:
        is_visible = columns[None, :] <= positions[:, None]
        if WINDOW is not None:
            is_visible &= columns[None, :] > positions[:, None] - WINDOW
        scores = tl.where(is_visible, scores, float("-inf"))

    weights, weighted, maximum, total = softmax_weights(scores, weighted, maximum, total, IS_MASKED)
    if SHARES_VALUE:
        value = key
    else:
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
