"""The launches of attention over a paged cache, shared by grouped-query and latent attention.

Latent attention has one key-value head, whose values are the first elements of its keys. One kernel serves chunks of
one row and splits their context among programs; another serves chunks of more rows. The number of rows of its chunk
alone determines which kernel serves a row, unless the second one serves all.

Queries that share keys and values are the rows of a matrix product. They are the pairs (row, head) of a chunk: pair i
is row i // group and head i % group.

Kernels are not specialised on sizes that change from step to step, so that serving never waits for compilation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.triton_kernels.device import num_programs
from moeserve.triton_kernels.paged_splits import attend_split_kernel, merge_splits_kernel
from moeserve.triton_kernels.paged_tiles import attend_tile_kernel
from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T tokens, N query heads, G key-value heads, P size of a key, V size of a value, E elements of a key beyond a value's,
# S chunks, Y splits of all chunks, p parts of the values, M pairs of a tile, C positions of a tile

CHUNKS_AT_ONCE = 256  # chunks that a program reads at a time to find its own
MAX_PARTIAL_BYTES = 2**30  # partial sums of splits; more chunks take several launches
SPLITS_AT_ONCE = 16  # that a program merges in one iteration
BLOCK_MERGED = 128  # values of one program that merges splits
MERGE_WARPS = 2  # a thread holds 32 partial sums


@dataclass(frozen=True)
class AttentionSpec:
    """Compile-time sizes of an attention kernel."""

    block_pairs: int  # pairs of row and head of one program
    block_positions: int  # positions of the context in one iteration
    num_warps: int
    num_stages: int
    num_parts: int = 1  # of the values of a chunk of one row, with a program each, which computes all scores

    @property
    def compile_options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Splits:
    """Division of the context of one row. It fixes the order of additions.

    With `max_programs`, steps with many positions have longer splits, and fewer partial sums, so the last bits of a
    result depend on the other chunks of the step. Without, they depend on the chunk and the model's shape only.
    """

    piece_size: int  # positions, a multiple of AttentionSpec.block_positions
    max_splits: int  # of one context and key-value head, a power of two
    max_programs: int | None = None  # for all chunks, which share them evenly; each chunk may have one split more


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
    min_rows_per_chunk: int = 0,
    max_context: int,
    max_attended_rows: int | None = None,
    rows_have_positions: bool = False,
    tile_config: AttentionSpec,
    split_config: AttentionSpec,
    few_config: AttentionSpec | None = None,
    splits: Splits | None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Launch the kernels of one attention call; see `paged_attention.paged_attention`.

    Tables are contiguous, except that rows of the block table may be strided. Caches have contiguous vectors.

    Args:
        value_cache: None if the values are the first `value_size` elements of the keys.
        max_rows_per_chunk, min_rows_per_chunk: bounds of the rows of the chunks that are attended.
        max_attended_rows: chunks of more rows get zeros; None: there are none.
        few_config: replaces `split_config` if its programs fill at most half of the GPU.
        splits: how the context of a chunk of one row is divided among programs. None: it is not, and all rows have one
            order of additions, whatever the sizes of chunks; slow for few requests with long contexts.
        key_scales, value_scales: of contiguous caches of 8-bit floats.

    Returns:
        [T, N, value_size]
    """
    num_tokens, num_heads, key_size = query_TNP.shape
    _, num_kv_heads, cache_block, _ = key_cache.shape
    num_chunks = context_lens.shape[0]
    if query_TNP.stride(2) != 1:
        query_TNP = query_TNP.contiguous()
    group = num_heads // num_kv_heads
    has_tiles = max_rows_per_chunk > (0 if splits is None else 1)
    has_splits = splits is not None and min_rows_per_chunk <= 1 <= max_rows_per_chunk
    # If all chunks have one row, the merging kernel also writes the zeros.
    merge_writes_all = has_splits and not has_tiles
    is_written = max_attended_rows is None and (rows_have_positions or merge_writes_all)
    new = query_TNP.new_empty if is_written and num_chunks > 0 else query_TNP.new_zeros
    output_TNV = new(num_tokens, num_heads, value_size)
    if output_TNV.numel() == 0 or num_chunks == 0 or max_attended_rows == 0:
        return output_TNV

    sizes = kernel_sizes(
        group=group,
        window=window,
        cache_block=cache_block,
        value_size=value_size,
        extra_size=key_size - value_size,
        shares_value=value_cache is None,
    )
    caches = (key_cache, value_cache, key_scales, value_scales)
    strides = (*query_TNP.stride()[:2], *key_cache.stride()[:3], block_table.stride(0))
    if has_tiles:
        num_tiles = num_tokens * group // tile_config.block_pairs + num_chunks
        attend_tile_kernel[(num_tiles * num_kv_heads,)](
            query_TNP,
            *caches,
            block_table,
            row_starts,
            context_lens,
            sinks_N,
            output_TNV,
            *strides,
            num_chunks,
            num_heads,
            num_kv_heads,
            max_rows_per_chunk if max_attended_rows is None else max_attended_rows,
            scale,
            **sizes,
            LEAST_ROWS=1 if splits is None else 2,
            BLOCK_M=tile_config.block_pairs,
            BLOCK_C=tile_config.block_positions,
            CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
            **tile_config.compile_options,
        )
    if splits is None or not has_splits:
        return output_TNV

    # A window may begin inside a piece.
    longest = max_context if window is None else min(max_context, abs(window) + splits.piece_size - 1)
    num_splits = max(min(ceil_div(longest, splits.piece_size), splits.max_splits), 1)
    config = split_config
    if few_config is not None:
        num_full = num_kv_heads * num_tiles_and_parts(group, split_config) * num_chunks * num_splits
        if 2 * num_full <= num_programs(query_TNP.device, 1):
            config = few_config
    programs_per_split = num_kv_heads * num_tiles_and_parts(group, config)
    num_parts = config.num_parts
    is_balanced = splits.max_programs is not None
    num_balanced = max((splits.max_programs or 0) // programs_per_split, 1)
    most_splits = MAX_PARTIAL_BYTES // (num_heads * (value_size + 2 * num_parts) * torch.float32.itemsize)
    # Slices of tables at multiples of 4 keep the alignment that kernels are compiled for.
    most_chunks = most_splits - num_balanced if is_balanced else most_splits // num_splits
    chunks_at_once = min(num_chunks, max(most_chunks // 4 * 4, 4))
    num_slots = chunks_at_once * num_splits
    if is_balanced:  # `find_split` rounds up, so there may be one more split for each chunk
        num_slots = min(num_slots, num_balanced + chunks_at_once)
    partial_YNV = query_TNP.new_empty(num_slots, num_heads, value_size, dtype=torch.float32)
    maximum_YpN = query_TNP.new_empty(num_slots, num_parts, num_heads, dtype=torch.float32)
    total_YpN = query_TNP.new_empty(num_slots, num_parts, num_heads, dtype=torch.float32)
    balanced_S2 = context_lens.new_empty(chunks_at_once, 2) if is_balanced else None
    part_size = max(sizes["BLOCK_V"] // num_parts, 16)
    block_merged = min(part_size, BLOCK_MERGED)
    are_all_in_chunks = rows_have_positions or (min_rows_per_chunk == 1 and num_chunks == num_tokens)
    for first in range(0, num_chunks, chunks_at_once):
        num_own = min(chunks_at_once, num_chunks - first)
        is_last = first + num_own == num_chunks
        if first > 0:
            block_table, row_starts, context_lens = (
                table[chunks_at_once:] for table in (block_table, row_starts, context_lens)
            )
        attend_split_kernel[(programs_per_split * (num_slots if is_balanced else num_own * num_splits),)](
            query_TNP,
            *caches,
            block_table,
            row_starts,
            context_lens,
            partial_YNV,
            maximum_YpN,
            total_YpN,
            balanced_S2,
            *strides,
            num_own,
            num_splits,
            num_balanced,
            num_heads,
            programs_per_split // num_kv_heads // num_parts,
            scale,
            **sizes | {"BLOCK_V": part_size},
            NUM_PARTS=num_parts,
            PIECE_SIZE=splits.piece_size,
            BLOCK_M=config.block_pairs,
            BLOCK_C=config.block_positions,
            CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
            **config.compile_options,
        )
        num_padding = num_tokens if merge_writes_all and is_last and not are_all_in_chunks else 0
        merge_splits_kernel[(num_own + num_padding, num_heads, ceil_div(value_size, block_merged))](
            partial_YNV,
            maximum_YpN,
            total_YpN,
            balanced_S2,
            row_starts,
            context_lens,
            sinks_N,
            output_TNV,
            num_own,
            num_heads,
            num_splits,
            WINDOW=window,
            VALUE_SIZE=value_size,
            NUM_PARTS=num_parts,
            PART_SIZE=part_size,
            BLOCK_V=block_merged,
            PIECE_SIZE=splits.piece_size,
            MAX_SPLITS=splits.max_splits,
            SPLITS_AT_ONCE=min(SPLITS_AT_ONCE, splits.max_splits),
            num_warps=MERGE_WARPS,
        )
    return output_TNV


@functools.cache
def kernel_sizes(
    *,
    group: int,
    window: int | None,
    cache_block: int,
    value_size: int,
    extra_size: int = 0,
    shares_value: bool = False,
) -> dict[str, Any]:
    """Return the compile-time sizes that both attention kernels share.

    Args:
        extra_size: elements of a key beyond those of a value.
        shares_value: the value is the beginning of the key.
    """
    return {
        "GROUP": group,
        "WINDOW": window,
        "CACHE_BLOCK": cache_block,
        "VALUE_SIZE": value_size,
        "EXTRA_SIZE": extra_size,
        "BLOCK_V": max(next_power_of_2(value_size), 16),
        "BLOCK_E": max(next_power_of_2(extra_size), 16),
        "SHARES_VALUE": shares_value,
    }


@functools.cache
def num_tiles_and_parts(group: int, config: AttentionSpec) -> int:
    """Return the number of programs that a split of one key-value head has."""
    return ceil_div(group, config.block_pairs) * config.num_parts
