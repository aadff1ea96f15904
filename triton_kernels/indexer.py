"""The lightning indexer (DeepSeek-V3.2): scores of the entries of a context, and the choice of the highest.

A score is the sum over heads of weight * max(0, query . key). One kernel writes the scores of each row and another
chooses among them, one row in each program. Rows that see at most `top_k` entries get all of them without scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T tokens, N heads of the indexer, H size of a key, S chunks, C places for the entries of a row, E entries of a tile

CHUNKS_AT_ONCE = 256  # chunks that a program reads at a time to find its own
MAX_SCORES = 2**28  # in memory at a time; more rows take several launches
DIGITS = 256  # values of 8 bits of a score, which are found together


@dataclass(frozen=True)
class IndexerSpec:
    """Compile-time sizes of the kernel that writes scores."""

    block_heads: int
    block_entries: int
    num_warps: int


CHOOSE_ENTRIES = 1024  # entries of one iteration of the choice
CHOOSE_WARPS = 4


def score_config(num_heads: int, element_size: int) -> IndexerSpec:
    """Return the tiles of scores: products of 64 heads and 128 entries take half of 4 warps' registers."""
    if element_size == 4:  # without tensor cores, limited by registers
        return IndexerSpec(block_heads=16, block_entries=16, num_warps=8)
    block_heads = min(max(next_power_of_2(num_heads), 16), 64)
    return IndexerSpec(block_heads, block_entries=128, num_warps=4)


def choose_entries(
    query_TNH: Tensor,
    weights_TN: Tensor,
    cache: Tensor,
    block_table: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    slots_TC: Tensor,
    counts_T: Tensor,
    starts: Tensor,
    *,
    top_k: int,
    tokens_per_entry: int,
) -> None:
    """Fill the slots, counts and starts of `ChosenEntries`. The choice of a row depends on its own context alone.

    Memory moved: the keys of each row's context, 4 bytes for each score, written once and read 5 times. Operations:
    2 * N * H for each entry of a context.

    Args:
        query_TNH: [T, N, H] float32, bfloat16 or float16; may be strided.
        weights_TN: same dtype, rows contiguous.
        cache: [num_blocks, block_size, H], same dtype.
        block_table: [S, max_blocks] int32; entries beyond a chunk's context are not read.
        row_starts: [S + 1] int32.
        context_lens: [S] int32, in tokens.
        slots_TC, counts_T, starts: int32.
        tokens_per_entry: a row at position p sees the first (p + 1) // tokens_per_entry entries.
    """
    num_tokens, num_heads, head_size = query_TNH.shape
    num_chunks = len(context_lens)
    if num_tokens == 0:
        starts.zero_()
        return
    max_entries = block_table.shape[1] * cache.shape[1]
    has_scores = max_entries > top_k
    rows_at_once = max(1, min(num_tokens, MAX_SCORES // max_entries)) if has_scores else num_tokens
    config = score_config(num_heads, query_TNH.element_size())
    # Rows of scores are aligned as kernels are compiled for.
    stride = ceil_div(max_entries, 16) * 16
    scores = query_TNH.new_empty(rows_at_once if has_scores else 1, stride if has_scores else 16, dtype=torch.float32)
    tables = block_table, row_starts, context_lens
    for first_row in range(0, num_tokens, rows_at_once):
        num_rows = min(rows_at_once, num_tokens - first_row)
        if has_scores:
            score_entries_kernel[(ceil_div(max_entries, config.block_entries), num_rows)](
                query_TNH,
                weights_TN,
                cache,
                *tables,
                scores,
                *query_TNH.stride()[:2],
                weights_TN.stride(0),
                *cache.stride()[:2],
                block_table.stride(0),
                scores.stride(0),
                num_chunks,
                first_row,
                **kernel_sizes(top_k, tokens_per_entry, cache.shape[1]),
                NUM_HEADS=num_heads,
                HEAD_SIZE=head_size,
                BLOCK_N=config.block_heads,
                BLOCK_H=max(next_power_of_2(head_size), 16),
                BLOCK_E=config.block_entries,
                num_warps=config.num_warps,
            )
        choose_entries_kernel[(num_rows,)](
            scores,
            *tables,
            slots_TC,
            counts_T,
            starts,
            block_table.stride(0),
            scores.stride(0),
            slots_TC.stride(0),
            num_chunks,
            first_row,
            num_tokens,
            **kernel_sizes(top_k, tokens_per_entry, cache.shape[1]),
            DIGITS=DIGITS,
            BLOCK_E=CHOOSE_ENTRIES,
            num_warps=CHOOSE_WARPS,
        )


def kernel_sizes(top_k: int, tokens_per_entry: int, cache_block: int) -> dict[str, int]:
    """Return the compile-time sizes that both kernels share."""
    return {
        "TOP_K": top_k,
        "TOKENS_PER_ENTRY": tokens_per_entry,
        "CACHE_BLOCK": cache_block,
        "CHUNKS_AT_ONCE": CHUNKS_AT_ONCE,
    }


@triton.jit(do_not_specialize=["table_stride", "num_chunks", "first_row"])
def score_entries_kernel(
    query_ptr,  # [T, N, H]
    weights_ptr,  # [T, N]
    cache_ptr,  # [num_blocks, CACHE_BLOCK, H]
    block_table_ptr,
    row_starts_ptr,
    context_lens_ptr,
    scores_ptr,  # [rows, score_stride] float32
    query_row_stride,
    query_head_stride,
    weight_stride,
    cache_block_stride,
    cache_entry_stride,
    table_stride,
    score_stride,
    num_chunks,
    first_row,
    TOP_K: tl.constexpr,
    TOKENS_PER_ENTRY: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the scores of BLOCK_E entries for one row, if it must choose among its entries."""
    local_row = tl.program_id(1).to(tl.int64)
    row = first_row + local_row
    chunk, num_seen = find_row(row, row_starts_ptr, context_lens_ptr, num_chunks, TOKENS_PER_ENTRY, CHUNKS_AT_ONCE)
    first = tl.program_id(0) * BLOCK_E
    if (num_seen <= TOP_K) | (first >= num_seen):
        return
    entries = first + tl.arange(0, BLOCK_E)
    is_seen = entries < num_seen
    blocks = tl.load(block_table_ptr + chunk * table_stride + entries // CACHE_BLOCK, mask=is_seen, other=0)
    places = blocks.to(tl.int64) * cache_block_stride + entries % CACHE_BLOCK * cache_entry_stride
    elements = tl.arange(0, BLOCK_H)
    is_element = elements < HEAD_SIZE
    keys = tl.load(
        cache_ptr + places[:, None] + elements[None, :], mask=is_seen[:, None] & is_element[None, :], other=0.0
    )
    scores = tl.zeros([BLOCK_E], tl.float32)
    for first_head in range(0, NUM_HEADS, BLOCK_N):
        heads = first_head + tl.arange(0, BLOCK_N)
        is_head = heads < NUM_HEADS
        query = tl.load(
            query_ptr + row * query_row_stride + heads[:, None] * query_head_stride + elements[None, :],
            mask=is_head[:, None] & is_element[None, :],
            other=0.0,
        )
        weights = tl.load(weights_ptr + row * weight_stride + heads, mask=is_head, other=0.0).to(tl.float32)
        products = tl.dot(query, tl.trans(keys), input_precision="ieee")
        scores += tl.sum(tl.maximum(products, 0.0) * weights[:, None], axis=0)
    tl.store(scores_ptr + local_row * score_stride + entries, scores, mask=is_seen)


@triton.jit(do_not_specialize=["table_stride", "num_chunks", "first_row", "num_tokens"])
def choose_entries_kernel(
    scores_ptr,  # [rows, score_stride] float32
    block_table_ptr,
    row_starts_ptr,
    context_lens_ptr,
    slots_ptr,  # [T, slot_stride]
    counts_ptr,  # [T]
    starts_ptr,  # [T + 1]
    table_stride,
    score_stride,
    slot_stride,
    num_chunks,
    first_row,
    num_tokens,
    TOP_K: tl.constexpr,
    TOKENS_PER_ENTRY: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
    DIGITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Choose the entries of one row.

    The lowest of the highest scores is found digit by digit: of the scores that begin like it, those with a higher
    digit are chosen. A second pass writes the slots in order, so that lower positions come first among equal scores.
    """
    local_row = tl.program_id(0).to(tl.int64)
    row = first_row + local_row
    chunk, num_seen = find_row(row, row_starts_ptr, context_lens_ptr, num_chunks, TOKENS_PER_ENTRY, CHUNKS_AT_ONCE)
    tl.store(counts_ptr + row, tl.minimum(num_seen, TOP_K))
    tl.store(starts_ptr + row, row.to(tl.int32))
    if row == num_tokens - 1:
        tl.store(starts_ptr + num_tokens, num_tokens)
    table_ptr = block_table_ptr + chunk * table_stride
    row_scores_ptr = scores_ptr + local_row * score_stride
    row_slots_ptr = slots_ptr + row * slot_stride
    entries_E = tl.arange(0, BLOCK_E)
    if num_seen <= TOP_K:
        for first in range(0, num_seen, BLOCK_E):
            entries = first + entries_E
            is_seen = entries < num_seen
            tl.store(row_slots_ptr + entries, slots_of(table_ptr, entries, is_seen, CACHE_BLOCK), mask=is_seen)
        return

    lowest = tl.full([], 0, tl.uint32)  # the digits that are known
    missing = tl.full([], TOP_K, tl.int32)  # entries to choose among the scores that begin with them
    digits = tl.arange(0, DIGITS)
    for number in tl.static_range(4):
        shift = 24 - 8 * number
        totals = tl.zeros([DIGITS], tl.int32)
        for first in range(0, num_seen, BLOCK_E):
            entries = first + entries_E
            is_alike = entries < num_seen
            orders = load_orders(row_scores_ptr + entries, is_alike)
            if number > 0:
                is_alike = is_alike & ((orders >> (shift + 8)) == (lowest >> (shift + 8)))
            of_entries = tl.where(is_alike, ((orders >> shift) & 255).to(tl.int32), 0)
            num_others = BLOCK_E - tl.sum(is_alike.to(tl.int32), axis=0)
            totals += tl.histogram(of_entries, DIGITS) - tl.where(digits == 0, num_others, 0)
        num_above = tl.sum(totals, axis=0) - tl.cumsum(totals, axis=0)  # scores with a higher digit
        digit = tl.sum((num_above >= missing).to(tl.int32), axis=0)
        missing -= tl.sum(tl.where(digits == digit, num_above, 0), axis=0)
        lowest = lowest | (digit.to(tl.uint32) << shift)

    num_written = tl.full([], 0, tl.int32)
    for first in range(0, num_seen, BLOCK_E):
        entries = first + entries_E
        is_seen = entries < num_seen
        orders = load_orders(row_scores_ptr + entries, is_seen)
        is_equal = (is_seen & (orders == lowest)).to(tl.int32)
        is_missing = tl.cumsum(is_equal, axis=0) <= missing
        is_chosen = is_seen & ((orders > lowest) | ((orders == lowest) & is_missing))
        places = num_written + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
        slots = slots_of(table_ptr, entries, is_chosen, CACHE_BLOCK)
        tl.store(row_slots_ptr + places, slots, mask=is_chosen)
        num_written += tl.sum(is_chosen.to(tl.int32), axis=0)
        missing -= tl.sum(is_equal, axis=0)


@triton.jit
def find_row(
    row,
    row_starts_ptr,
    context_lens_ptr,
    num_chunks,
    TOKENS_PER_ENTRY: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Return the chunk of a row, and the number of entries that it sees. A row without a chunk sees none."""
    chunk = tl.full([], 0, tl.int64)
    for first_chunk in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first_chunk + tl.arange(0, CHUNKS_AT_ONCE)
        is_chunk = chunks < num_chunks
        ends = tl.load(row_starts_ptr + chunks + 1, mask=is_chunk, other=0)
        chunk += tl.sum((is_chunk & (ends <= row)).to(tl.int32), axis=0)
    has_chunk = chunk < num_chunks
    chunk = tl.where(has_chunk, chunk, 0)
    end = tl.load(row_starts_ptr + chunk + 1, mask=has_chunk, other=0)
    context_len = tl.load(context_lens_ptr + chunk, mask=has_chunk, other=0)
    num_positions = tl.maximum(context_len - end + row.to(tl.int32) + 1, 0)
    return chunk, tl.where(has_chunk, num_positions // TOKENS_PER_ENTRY, 0)


@triton.jit
def slots_of(table_ptr, entries, is_used, CACHE_BLOCK: tl.constexpr):
    blocks = tl.load(table_ptr + entries // CACHE_BLOCK, mask=is_used, other=0)
    return blocks * CACHE_BLOCK + entries % CACHE_BLOCK


@triton.jit
def load_orders(score_ptrs, is_used):
    """Return integers that are larger for larger scores. Zeros of both signs are equal."""
    scores = tl.load(score_ptrs, mask=is_used, other=0.0)
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.uint32, bitcast=True)
    is_negative = (bits >> 31) == 1
    return tl.where(is_negative, bits ^ 0xFFFFFFFF, bits | 0x80000000)
