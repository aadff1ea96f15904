"""Attention to a window of tokens and to compressed entries on a GPU: the operations of ops/compressed_attention.

Windows are pooled token by token, each by a program of its own for some channels. So there is one order of sums for all
chunks, and windows of a long prompt run at the same time. What a token attends to is listed as a block table with
blocks of one vector, for the kernels of paged attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.latent_attention import choose_splits, few_config, split_config, tile_config
from moeserve.triton_kernels.online_softmax import chunk_of_tile
from moeserve.triton_kernels.paged_launch import launch_attention
from moeserve.triton_kernels.sizes import ceil_div

# T tokens in S chunks, N query heads, H head size, m tokens of a window, B tokens of a block, E entries of a block,
# V vectors of a cache, L vectors that a token attends to at most, C entries that were chosen, X values and gates of a
# token, Y = X / 2, Z = 3 * Y values of a tail

CHANNELS = 128  # of one program
PLACES = 256  # of a list, of one program
TOKENS = 128  # of one program that finds slots
CHUNKS_AT_ONCE = 64
NO_GATE = tl.constexpr(-1e30)  # below any gate: the exponential of the difference is zero


def pool_windows(
    projected_TX: Tensor,
    bias_mY: Tensor,
    tails: Tensor,
    cache_slots: Tensor,
    block_table: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    *,
    block_size: int,
    num_series: int,
) -> Tensor:
    """Return [T, Y / num_series]: see `CompressedAttention.pool`.

    Memory moved: X * element size for each token, twice with two series, and 4 * Z for each chunk and block.

    Args:
        tails: [blocks, Z] float32, updated.
        cache_slots: [T] int64; chunks whose first slot is -1 are left out.
        block_table: [S, blocks] int32.
        row_starts: [S + 1] int32.
        context_lens: [S] int32.
    """
    ratio, width = bias_mY.shape
    size, (num_tokens, num_chunks) = width // num_series, (len(projected_TX), len(context_lens))
    pooled_TH = projected_TX.new_zeros(num_tokens, size)
    if num_tokens == 0 or num_chunks == 0:
        return pooled_TH
    assert projected_TX.stride(1) == 1
    # A tail may be replaced while other programs of its chunk begin with it.
    before_SZ = tails.new_empty(num_chunks, 3 * width)
    tables = block_table, block_table.stride(0), row_starts, context_lens
    copy_tails_kernel[(num_chunks, ceil_div(3 * width, CHANNELS))](
        tails, before_SZ, *tables, 3 * width, BLOCK_SIZE=block_size, CHANNELS=CHANNELS
    )
    grid = num_tokens // ratio + 2 * num_chunks, ceil_div(size, CHANNELS)
    pool_windows_kernel[grid](
        projected_TX,
        projected_TX.stride(0),
        bias_mY,
        before_SZ,
        tails,
        pooled_TH,
        cache_slots,
        *tables,
        num_chunks,
        size,
        BLOCK_SIZE=block_size,
        RATIO=ratio,
        NUM_SERIES=num_series,
        CHANNELS=CHANNELS,
        CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
    )
    return pooled_TH


def find_entry_slots(
    cache_slots: Tensor, positions: Tensor, *, block_size: int, ratio: int, entries_of_block: int
) -> Tensor:
    """Return [T] int64: the slot of the entry that ends with each token, block * E + offset; -1: none does."""
    slots = torch.empty_like(cache_slots)
    if len(slots):
        entry_slots_kernel[(ceil_div(len(slots), TOKENS),)](
            cache_slots,
            positions,
            slots,
            len(slots),
            BLOCK_SIZE=block_size,
            RATIO=ratio,
            ENTRIES=entries_of_block,
            TOKENS=TOKENS,
        )
    return slots


def compressed_attention(
    query_TNH: Tensor,
    vectors_VH: Tensor,
    sinks_N: Tensor,
    chosen_TC: Tensor | None,
    counts_T: Tensor | None,
    block_table: Tensor,
    window_table: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int,
    ratio: int | None,
    block_size: int,
    first_entry: int,
    entries_of_block: int,
) -> Tensor:
    """Return [T, N, H]: see `CompressedAttention.attend`, and `launch_attention` for the attention itself.

    Memory moved: 8 * L for each token, written and read, beside that of the attention.

    Args:
        vectors_VH: tokens in blocks of `window_table`, and behind `first_entry` entries in blocks of `block_table`.
        chosen_TC, counts_T: slots and numbers of entries, int32; None: all entries.
        block_table, window_table: [S, blocks] int32.
        ratio: tokens of an entry; None: there are no entries.
    """
    num_tokens, num_chunks = len(query_TNH), len(context_lens)
    most_positions = block_table.shape[1] * block_size
    num_entries = 0 if ratio is None else most_positions // ratio
    if chosen_TC is not None:
        num_entries = chosen_TC.shape[1]
    num_listed = min(window, most_positions) + num_entries
    listed_TL = row_starts.new_empty(num_tokens, num_listed)
    count_T, starts = row_starts.new_empty(num_tokens), row_starts.new_empty(num_tokens + 1)
    if num_tokens == 0 or num_chunks == 0:
        return torch.zeros_like(query_TNH)
    list_vectors_kernel[(num_tokens + 1, ceil_div(num_listed, PLACES))](
        listed_TL,
        count_T,
        starts,
        chosen_TC,
        counts_T,
        0 if chosen_TC is None else chosen_TC.stride(0),
        block_table,
        block_table.stride(0),
        window_table,
        window_table.stride(0),
        row_starts,
        context_lens,
        num_tokens,
        num_chunks,
        num_listed,
        first_entry,
        WINDOW=window,
        RATIO=ratio,
        BLOCK_SIZE=block_size,
        ENTRIES=entries_of_block,
        PLACES=PLACES,
        CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
    )
    _, num_heads, head_size = query_TNH.shape
    element_size = query_TNH.element_size()
    return launch_attention(
        query_TNH,
        vectors_VH[:, None, None],  # each vector is a block, and each row a chunk
        None,
        listed_TL,
        starts,
        count_T,
        scale=scale,
        window=None,
        sinks_N=sinks_N,
        value_size=head_size,
        max_rows_per_chunk=1,
        min_rows_per_chunk=1,
        max_context=num_listed,
        tile_config=tile_config(head_size, element_size),
        split_config=split_config(num_heads, head_size, element_size),
        few_config=few_config(num_heads, element_size),
        splits=choose_splits(num_heads),
    )


@triton.jit
def copy_tails_kernel(
    tails_ptr,
    before_ptr,
    table_ptr,
    table_stride,
    row_starts_ptr,
    context_lens_ptr,
    tail_size,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Copy the tail before the first token of each chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    num_rows = tl.load(row_starts_ptr + chunk + 1) - tl.load(row_starts_ptr + chunk)
    start = tl.load(context_lens_ptr + chunk) - num_rows
    if start <= 0:
        return
    block = tl.load(table_ptr + chunk * table_stride + (start - 1) // BLOCK_SIZE).to(tl.int64)
    tail = tl.load(tails_ptr + block * tail_size + channels, channels < tail_size, 0.0)
    tl.store(before_ptr + chunk * tail_size + channels, tail, channels < tail_size)


@triton.jit
def with_token(largest, total, values, gate, value):
    """Return the largest gate, the sum of exponentials and the weighted sum of values after one more token."""
    new_largest = tl.maximum(largest, gate)
    factor, weight = tl.exp(largest - new_largest), tl.exp(gate - new_largest)
    return new_largest, total * factor + weight, values * factor + weight * value


@triton.jit(do_not_specialize=["num_chunks"])
def pool_windows_kernel(
    projected_ptr,  # [T, 2 * NUM_SERIES * size]: values and then gates of each series
    row_stride,
    bias_ptr,
    before_ptr,  # [S, NUM_SERIES, 3, size]
    tails_ptr,  # [blocks, NUM_SERIES, 3, size]
    pooled_ptr,
    slots_ptr,
    table_ptr,
    table_stride,
    row_starts_ptr,
    context_lens_ptr,
    num_chunks,
    size,
    BLOCK_SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    NUM_SERIES: tl.constexpr,  # 1, or 2: values for the entry of the next window come before those of the own one
    CHANNELS: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Pool one window, or the part of it that a chunk has, and store the tails of its tokens that end blocks."""
    slot = tl.program_id(0)
    chunk = chunk_of_tile(row_starts_ptr, num_chunks, slot, 1, RATIO, 2, CHUNKS_AT_ONCE)
    begin, end = tl.load(row_starts_ptr + chunk), tl.load(row_starts_ptr + chunk + 1)
    start = tl.load(context_lens_ptr + chunk) - (end - begin)
    window = tl.maximum(start, 0) // RATIO + slot - (begin // RATIO + 2 * chunk)
    stop = tl.minimum((window + 1) * RATIO, start + end - begin)  # the first position behind the part
    if (end == begin) | (start < 0) | (window * RATIO >= stop):
        return
    if tl.load(slots_ptr + begin) < 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < size
    # With two series, the tokens of the window before belong to the entry too.
    first = tl.maximum((window - (NUM_SERIES - 1)) * RATIO, start)
    has_tail = (first == start) & (start > 0)
    tail_size, width = NUM_SERIES * 3 * size, NUM_SERIES * size
    before = before_ptr + chunk.to(tl.int64) * tail_size + channels
    own_largest = tl.load(before, mask & has_tail, NO_GATE)
    own_total = tl.load(before + size, mask & has_tail, 0.0)
    own_values = tl.load(before + 2 * size, mask & has_tail, 0.0)
    next_largest, next_total, next_values = own_largest, own_total, own_values
    if NUM_SERIES == 2:
        next_largest = tl.load(before + 3 * size, mask & has_tail, NO_GATE)
        next_total = tl.load(before + 4 * size, mask & has_tail, 0.0)
        next_values = tl.load(before + 5 * size, mask & has_tail, 0.0)
    for number in range(stop - first):
        position = first + number
        offset = position % RATIO
        row = (begin + position - start).to(tl.int64)
        if NUM_SERIES == 2:
            own_largest = tl.where(offset == 0, next_largest, own_largest)
            own_total = tl.where(offset == 0, next_total, own_total)
            own_values = tl.where(offset == 0, next_values, own_values)
            next_largest = tl.where(offset == 0, NO_GATE, next_largest)
            next_total = tl.where(offset == 0, 0.0, next_total)
            next_values = tl.where(offset == 0, 0.0, next_values)
        else:
            own_largest = tl.where(offset == 0, NO_GATE, own_largest)
            own_total = tl.where(offset == 0, 0.0, own_total)
            own_values = tl.where(offset == 0, 0.0, own_values)
        values_ptr = projected_ptr + row * row_stride + channels
        bias = bias_ptr + offset * width + channels
        last = (NUM_SERIES - 1) * size  # the series of the own window
        value = tl.load(values_ptr + last, mask, 0.0).to(tl.float32)
        gate = tl.load(values_ptr + width + last, mask, 0.0).to(tl.float32) + tl.load(bias + last, mask, 0.0)
        own_largest, own_total, own_values = with_token(own_largest, own_total, own_values, gate, value)
        if NUM_SERIES == 2:
            value = tl.load(values_ptr, mask, 0.0).to(tl.float32)
            gate = tl.load(values_ptr + width, mask, 0.0).to(tl.float32) + tl.load(bias, mask, 0.0)
            next_largest, next_total, next_values = with_token(next_largest, next_total, next_values, gate, value)
        is_own = position >= window * RATIO
        is_last = is_own & (offset == RATIO - 1)
        pooled = (own_values / own_total).to(pooled_ptr.dtype.element_ty)
        tl.store(pooled_ptr + row * size + channels, pooled, mask & is_last)
        is_kept = is_own & (((position + 1) % BLOCK_SIZE == 0) | (position == start + end - begin - 1))
        block = tl.load(table_ptr + chunk.to(tl.int64) * table_stride + position // BLOCK_SIZE, is_kept, 0)
        kept = tails_ptr + block.to(tl.int64) * tail_size + channels
        tl.store(kept, own_largest, mask & is_kept)
        tl.store(kept + size, own_total, mask & is_kept)
        tl.store(kept + 2 * size, own_values, mask & is_kept)
        if NUM_SERIES == 2:
            tl.store(kept + 3 * size, next_largest, mask & is_kept)
            tl.store(kept + 4 * size, next_total, mask & is_kept)
            tl.store(kept + 5 * size, next_values, mask & is_kept)


@triton.jit(do_not_specialize=["num_tokens"])
def entry_slots_kernel(
    slots_ptr,
    positions_ptr,
    entry_slots_ptr,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = tokens < num_tokens
    slot = tl.load(slots_ptr + tokens, mask, -1)
    position = tl.load(positions_ptr + tokens, mask, 0)
    first = position - slot % BLOCK_SIZE  # of the block
    entry = slot // BLOCK_SIZE * ENTRIES + position // RATIO - first // RATIO
    is_last = (slot >= 0) & ((position + 1) % RATIO == 0)
    tl.store(entry_slots_ptr + tokens, tl.where(is_last, entry, -1), mask)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "num_listed"])
def list_vectors_kernel(
    listed_ptr,  # [T, num_listed]
    count_ptr,  # [T]
    starts_ptr,  # [T + 1]: gets the numbers from 0 up
    chosen_ptr,  # or None
    chosen_counts_ptr,
    chosen_stride,
    table_ptr,
    table_stride,
    window_table_ptr,
    window_stride,
    row_starts_ptr,
    context_lens_ptr,
    num_tokens,
    num_chunks,
    num_listed,
    first_entry,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,  # or None
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """List what a token attends to: the tokens of its window, then entries, both in the order of positions."""
    token, part = tl.program_id(0), tl.program_id(1)
    if part == 0:
        tl.store(starts_ptr + token, token)
    if token >= num_tokens:
        return
    chunk = chunk_of_tile(row_starts_ptr, num_chunks, token, 1, 1, 0, CHUNKS_AT_ONCE).to(tl.int64)
    end = tl.load(row_starts_ptr + chunk + 1)
    position = tl.load(context_lens_ptr + chunk) - (end - token)
    is_listed = (token < end) & (position >= 0)
    num_window = tl.where(is_listed, tl.minimum(position + 1, WINDOW), 0)
    num_entries = num_window * 0
    if chosen_ptr is not None:
        num_entries = tl.where(is_listed, tl.load(chosen_counts_ptr + token), 0)
    elif RATIO is not None:
        num_entries = tl.where(is_listed, (position + 1) // RATIO, 0)
    if part == 0:
        tl.store(count_ptr + token, num_window + num_entries)
    places = part * PLACES + tl.arange(0, PLACES)
    is_token = places < num_window
    positions = position + 1 - num_window + places
    blocks = tl.load(window_table_ptr + chunk * window_stride + positions // BLOCK_SIZE, is_token, 0)
    listed = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    entries = places - num_window
    is_entry = (entries >= 0) & (entries < num_entries)
    if chosen_ptr is not None:
        chosen = tl.load(chosen_ptr + token.to(tl.int64) * chosen_stride + entries, is_entry, 0)
        listed = tl.where(is_token, listed, first_entry + chosen)
    elif RATIO is not None:
        index = ((entries + 1) * RATIO - 1) // BLOCK_SIZE  # of the block in which the window ends
        blocks = tl.load(table_ptr + chunk * table_stride + index, is_entry, 0)
        listed = tl.where(is_token, listed, first_entry + blocks * ENTRIES + entries - index * BLOCK_SIZE // RATIO)
    tl.store(listed_ptr + token.to(tl.int64) * num_listed + places, listed, is_token | is_entry)
