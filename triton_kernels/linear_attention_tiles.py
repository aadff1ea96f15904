"""Linear attention of many tokens on a GPU: tiles of tokens by matrix products.

The formulas are those of ops/linear_attention, for the tokens 1 to m of a tile at once. With the state S before the
tile and the sums G_i of the logarithms of the first i decays, the change u_i of the state by token i, the output o_i,
and the state after the tile are

    delta rule          u = (I + A)^-1 (b v - b exp(G) k S)        A_ij = b_i (exp(G_i - G_j) k_i . k_j),  j < i
    state space model   u = d v
    both                o = exp(G) q S + P u                       P_ij = exp(G_i - G_j) q_i . k_j,        j <= i
                        S <- exp(G_m) S + (exp(G_m - G) k)^T u

where A, P and the factors of keys and queries are sums over channels if each channel has its own decay. Two launches:
the first one computes everything that does not depend on the state, for all tiles at once; the second one runs through
the tiles of a request. Tiles begin at multiples of their size in the request, whatever the chunks of its prompt. A
tile that is divided by the end of a chunk is computed in two parts, whose sums have another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.online_softmax import chunk_of_tile
from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T tokens in S chunks, M tokens of a tile, N value heads, K values of a key, V of a value, X = N * V,
# C = 2 * G * K + X channels with G key heads

LEAST_ROWS = 16  # of a chunk that is computed in tiles; others are computed token by token
MAX_KEY_DIM = 128  # of heads that are computed in tiles: wider ones would need more registers than there are
CHUNKS_AT_ONCE = 64
BLOCK = tl.constexpr(16)  # tokens whose dependences are resolved one by one
L2_EPSILON = tl.constexpr(1e-6)
LEAST_LOG_DECAY = tl.constexpr(-104.0)  # exp(-104) is 0 in float32


@dataclass(frozen=True)
class TileConfig:
    """Sizes of both kernels, without spilled registers in each of them."""

    tile: int  # tokens
    values: int  # of a head, of one program that runs through the tiles
    prepare_warps: int
    attend_warps: int
    attend_stages: int


def tile_config(dtype: torch.dtype, *, has_channel_decays: bool) -> TileConfig:
    """Return the sizes for a model of this dtype."""
    if dtype == torch.float32:  # products of float32 numbers without rounding need many registers
        return TileConfig(tile=16, values=16, prepare_warps=4, attend_warps=8, attend_stages=1)
    if has_channel_decays:  # each pair of tokens takes an exponential for each channel
        return TileConfig(tile=16, values=32, prepare_warps=4, attend_warps=4, attend_stages=2)
    return TileConfig(tile=64, values=32, prepare_warps=8, attend_warps=8, attend_stages=1)


def kernel_constants(config: TileConfig, dtype: torch.dtype, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Return the compile-time arguments that both kernels share and that all layers of a model have."""
    return {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "TILE": config.tile,
        "BLOCK_K": max(next_power_of_2(key_dim), 16),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "LEAST_ROWS": LEAST_ROWS,
    }


def attend_tiles(
    mixed_TC: Tensor,
    decays_TX: Tensor,
    rates_TN: Tensor | None,
    log_decay_N: Tensor,
    decay_bias: Tensor,
    skip_N: Tensor | None,
    states: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    state_rows: tuple[Tensor, ...],
    output_TX: Tensor,
    *,
    num_key_heads: int,
    decay_floor: float | None,
    dtype: torch.dtype,
) -> None:
    """Write the outputs of chunks of at least `LEAST_ROWS` tokens before norm and gate, and update their states.

    Memory moved, beside that of `linear_attention`: 4 * T * N * (4 * K + 4 * V + 2 * M) without its repetition by
    programs of the same head. Operations of the delta rule: 2 * T * N * (M * (3 * K + 2 * V) + 3 * K * V).

    Args:
        output_TX: float32, contiguous.
        dtype: of the model.
    """
    num_tokens, num_chunks = len(mixed_TC), len(row_starts) - 1
    _, num_heads, key_dim, value_dim = states.shape
    has_channel_decays = decays_TX.shape[1] != num_heads
    config = tile_config(dtype, has_channel_decays=has_channel_decays)
    is_delta = rates_TN is not None
    rates = decays_TX if rates_TN is None else rates_TN
    scratch = mixed_TC.new_empty
    totals = scratch(num_heads, num_tokens, key_dim if has_channel_decays else 1)
    pairs_NTM = scratch(num_heads, num_tokens, config.tile)
    factors_NT2 = scratch(num_heads, num_tokens, 2)
    reads_NTK = scratch(num_heads, num_tokens, key_dim) if is_delta else None
    changes_NTV = scratch(num_heads, num_tokens, value_dim) if is_delta else None
    sizes = num_tokens, num_heads, num_key_heads
    constants = kernel_constants(config, dtype, key_dim, value_dim)
    constants |= {"IS_DELTA": is_delta, "HAS_CHANNEL_DECAYS": has_channel_decays}
    # A chunk may end within a tile and begin within another one.
    prepare_tiles_kernel[(num_tokens // config.tile + 2 * num_chunks, num_heads)](
        mixed_TC,
        decays_TX,
        decays_TX.stride(0),
        rates,
        rates.stride(0),
        log_decay_N,
        decay_bias,
        row_starts,
        context_lens,
        totals,
        pairs_NTM,
        factors_NT2,
        reads_NTK,
        changes_NTV,
        num_chunks,
        *sizes,
        key_dim**-0.5 if is_delta else 1.0,
        decay_floor or 0.0,
        BLOCK_V=max(next_power_of_2(value_dim), 16),
        HAS_FLOOR=decay_floor is not None,
        CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
        **constants,
        num_warps=config.prepare_warps,
    )
    attend_tiles_kernel[(num_chunks, num_heads, ceil_div(value_dim, config.values))](
        mixed_TC,
        skip_N,
        states,
        row_starts,
        context_lens,
        *state_rows,
        totals,
        pairs_NTM,
        factors_NT2,
        reads_NTK,
        changes_NTV,
        output_TX,
        *sizes,
        VALUES=config.values,
        **constants,
        num_warps=config.attend_warps,
        num_stages=config.attend_stages,
    )


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def log_decay_of(x, growth, floor, HAS_FLOOR: tl.constexpr):
    """Return the logarithms of decays."""
    return floor * tl.sigmoid(growth * x) if HAS_FLOOR else -growth * softplus(x)


@triton.jit(do_not_specialize=["num_chunks"])
def prepare_tiles_kernel(
    mixed_ptr,
    decays_ptr,
    decay_stride,
    rates_ptr,
    rate_stride,
    log_decay_ptr,
    decay_bias_ptr,
    row_starts_ptr,
    context_lens_ptr,
    totals_ptr,  # gets G
    pairs_ptr,  # gets P
    factors_ptr,  # gets the factors of queries and keys that all their channels have
    reads_ptr,  # gets (I + A)^-1 b exp(G) k
    changes_ptr,  # gets (I + A)^-1 b v
    num_chunks,
    num_tokens,
    num_heads,
    num_key_heads,
    query_scale,
    decay_floor,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_DELTA: tl.constexpr,
    HAS_CHANNEL_DECAYS: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    LEAST_ROWS: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slot, head = tl.program_id(0), tl.program_id(1)
    chunk = chunk_of_tile(row_starts_ptr, num_chunks, slot, 1, TILE, 2, CHUNKS_AT_ONCE)
    begin, end = tl.load(row_starts_ptr + chunk), tl.load(row_starts_ptr + chunk + 1)
    first_position = tl.maximum(tl.load(context_lens_ptr + chunk) - (end - begin), 0)
    first = begin - first_position % TILE + (slot - (begin // TILE + 2 * chunk)) * TILE
    if (end - begin < LEAST_ROWS) | (first >= end):
        return
    places = tl.arange(0, TILE)
    is_row = (first + places >= begin) & (first + places < end)
    rows = (first + places).to(tl.int64)
    keys, values = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_key, is_value = is_row[:, None] & (keys < KEY_DIM)[None, :], is_row[:, None] & (values < VALUE_DIM)[None, :]
    key_size = num_key_heads * KEY_DIM
    row_ptrs = mixed_ptr + rows * (2 * key_size + num_heads * VALUE_DIM)
    query_ptrs = row_ptrs[:, None] + (head // (num_heads // num_key_heads) * KEY_DIM + keys)[None, :]
    query = tl.load(query_ptrs, is_key, 0.0)
    key = tl.load(query_ptrs + key_size, is_key, 0.0)

    growth = tl.exp(tl.load(log_decay_ptr + head))
    if HAS_CHANNEL_DECAYS:
        own = head * KEY_DIM + keys
        x = tl.load(decays_ptr + (rows * decay_stride)[:, None] + own[None, :], is_key, 0.0).to(tl.float32)
        x += tl.load(decay_bias_ptr + own, keys < KEY_DIM, 0.0)[None, :]
        log_decay = tl.where(is_key, log_decay_of(x, growth, decay_floor, HAS_FLOOR), 0.0)
    else:
        x = tl.load(decays_ptr + rows * decay_stride + head, is_row, 0.0).to(tl.float32) + tl.load(
            decay_bias_ptr + head
        )
        log_decay = tl.where(is_row, log_decay_of(x, growth, decay_floor, HAS_FLOOR), 0.0)
    total = tl.cumsum(tl.maximum(log_decay, LEAST_LOG_DECAY), 0)
    scratch_rows = head.to(tl.int64) * num_tokens + rows
    if HAS_CHANNEL_DECAYS:
        tl.store(totals_ptr + (scratch_rows * KEY_DIM)[:, None] + keys[None, :], total, is_key)
    else:
        tl.store(totals_ptr + scratch_rows, total, is_row)

    if IS_DELTA:
        query_factor = query_scale / tl.sqrt(tl.sum(query * query, 1) + L2_EPSILON)
        key_factor = 1.0 / tl.sqrt(tl.sum(key * key, 1) + L2_EPSILON)
    else:
        query_factor = tl.full([TILE], 1.0, tl.float32)
        key_factor = tl.where(is_row, softplus(x), 0.0)
    tl.store(factors_ptr + scratch_rows * 2, query_factor, is_row)
    tl.store(factors_ptr + scratch_rows * 2 + 1, key_factor, is_row)

    # [i, j]: products of token i with an earlier token j; those of keys are transposed.
    if HAS_CHANNEL_DECAYS:
        pairs = tl.zeros([TILE, TILE], tl.float32)
        key_pairs = tl.zeros([TILE, TILE], tl.float32)
        for j in range(TILE):
            is_j = (places == j)[:, None]
            key_j, total_j = tl.sum(tl.where(is_j, key, 0.0), 0), tl.sum(tl.where(is_j, total, 0.0), 0)
            decayed = key_j[None, :] * tl.exp(tl.minimum(total - total_j[None, :], 0.0))
            pairs = tl.where((places == j)[None, :], tl.sum(query * decayed, 1)[:, None], pairs)
            key_pairs = tl.where((places == j)[None, :], tl.sum(key * decayed, 1)[:, None], key_pairs)
        key_pairs = tl.trans(key_pairs)
    else:
        between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        pairs = tl.dot(query, tl.trans(key), input_precision=PRECISION) * between
        if IS_DELTA:
            between = tl.exp(tl.minimum(total[None, :] - total[:, None], 0.0))
            key_pairs = tl.dot(key, tl.trans(key), input_precision=PRECISION) * between
    pairs = tl.where(places[:, None] >= places[None, :], pairs * query_factor[:, None] * key_factor[None, :], 0.0)
    tl.store(pairs_ptr + (scratch_rows * TILE)[:, None] + places[None, :], pairs, is_row[:, None])

    if IS_DELTA:
        rate = tl.sigmoid(tl.load(rates_ptr + rows * rate_stride + head, is_row, 0.0).to(tl.float32))
        key_pairs = key_pairs * key_factor[:, None] * (key_factor * rate)[None, :]
        key_pairs = tl.where(places[:, None] < places[None, :], key_pairs, 0.0)
        # Forward substitution: row i of all blocks on the diagonal at once, from the rows before.
        is_in_block = (places // BLOCK)[:, None] == (places // BLOCK)[None, :]
        block_pairs = tl.where(is_in_block, key_pairs, 0.0)
        inverse = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
        for i in range(1, BLOCK):
            is_i = places % BLOCK == i
            weights = tl.sum(tl.where(is_i[None, :], block_pairs, 0.0), 1)
            known = tl.sum(weights[:, None] * inverse, 0)
            inverse = tl.where(is_i[:, None] & is_in_block, inverse - known[None, :], inverse)
        if TILE > BLOCK:
            # With these inverses D, and L for A outside of the blocks: (I - D L) (I + (D L)^2) D for four blocks.
            tl.static_assert(TILE <= 4 * BLOCK)
            others = tl.trans(tl.where(is_in_block, 0.0, -key_pairs))
            step = tl.dot(inverse, others, input_precision=PRECISION)
            inverse = tl.dot(step, inverse, inverse, input_precision=PRECISION)
            step = tl.dot(step, step, input_precision=PRECISION)
            inverse = tl.dot(step, inverse, inverse, input_precision=PRECISION)
        inverse = inverse * rate[None, :]
        value_ptrs = row_ptrs[:, None] + (2 * key_size + head * VALUE_DIM + values)[None, :]
        value = tl.load(value_ptrs, is_value, 0.0)
        changes = tl.dot(inverse, value, input_precision=PRECISION)
        tl.store(changes_ptr + (scratch_rows * VALUE_DIM)[:, None] + values[None, :], changes, is_value)
        if HAS_CHANNEL_DECAYS:
            key = key * tl.exp(total) * key_factor[:, None]
        else:
            inverse = inverse * (tl.exp(total) * key_factor)[None, :]
        reads = tl.dot(inverse, key, input_precision=PRECISION)
        tl.store(reads_ptr + (scratch_rows * KEY_DIM)[:, None] + keys[None, :], reads, is_key)


@triton.jit
def attend_tiles_kernel(
    mixed_ptr,
    skip_ptr,
    states_ptr,
    row_starts_ptr,
    context_lens_ptr,
    load_ptr,
    store_ptr,
    save_ptr,
    before_save_ptr,
    totals_ptr,  # see `prepare_tiles_kernel`
    pairs_ptr,
    factors_ptr,
    reads_ptr,
    changes_ptr,
    output_ptr,
    num_tokens,
    num_heads,
    num_key_heads,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr,
    IS_DELTA: tl.constexpr,
    HAS_CHANNEL_DECAYS: tl.constexpr,
    LEAST_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(row_starts_ptr + chunk), tl.load(row_starts_ptr + chunk + 1)
    if end - begin < LEAST_ROWS:
        return
    first_position = tl.maximum(tl.load(context_lens_ptr + chunk) - (end - begin), 0)
    load_row, store_row = tl.load(load_ptr + chunk), tl.load(store_ptr + chunk)
    save_row, saved = tl.load(save_ptr + chunk), begin + tl.load(before_save_ptr + chunk)
    places, keys = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    state_places = head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    is_state = (keys < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
    state_size = num_heads * KEY_DIM * VALUE_DIM
    state = tl.load(states_ptr + load_row * state_size + state_places, is_state & (load_row >= 0), 0.0)
    key_size = num_key_heads * KEY_DIM
    width = 2 * key_size + num_heads * VALUE_DIM
    # Offsets within a tile have 32 bits, which take fewer registers.
    query_places = places[:, None] * width + (head // (num_heads // num_key_heads) * KEY_DIM + keys)[None, :]
    value_places = places[:, None] * width + (2 * key_size + head * VALUE_DIM + values)[None, :]
    output_places = places[:, None] * (num_heads * VALUE_DIM) + (head * VALUE_DIM + values)[None, :]
    start = begin - first_position % TILE
    for tile in range(tl.cdiv(end - start, TILE)):
        first = start + tile * TILE
        rows = first + places
        is_row = (rows >= begin) & (rows < end)
        is_key, is_value = is_row[:, None] & (keys < KEY_DIM)[None, :], is_row[:, None] & (values < VALUE_DIM)[None, :]
        mixed_tile_ptr = mixed_ptr + first.to(tl.int64) * width
        scratch_row = head.to(tl.int64) * num_tokens + first
        factors_tile_ptr, last = factors_ptr + scratch_row * 2, tl.minimum(first + TILE, end) - 1
        query_factor = tl.load(factors_tile_ptr + places * 2, is_row, 0.0)
        query = tl.load(mixed_tile_ptr + query_places, is_key, 0.0)
        if HAS_CHANNEL_DECAYS:
            totals_tile_ptr = totals_ptr + scratch_row * KEY_DIM
            total = tl.load(totals_tile_ptr + places[:, None] * KEY_DIM + keys[None, :], is_key, 0.0)
            query = query * tl.exp(total)
        else:
            totals_tile_ptr = totals_ptr + scratch_row
            total = tl.load(totals_tile_ptr + places, is_row, 0.0)
            query_factor = query_factor * tl.exp(total)
        output = tl.dot(query, state, input_precision=PRECISION) * query_factor[:, None]
        if IS_DELTA:
            changes_tile_ptr, reads_tile_ptr = changes_ptr + scratch_row * VALUE_DIM, reads_ptr + scratch_row * KEY_DIM
            changes = tl.load(changes_tile_ptr + places[:, None] * VALUE_DIM + values[None, :], is_value, 0.0)
            reads = tl.load(reads_tile_ptr + places[:, None] * KEY_DIM + keys[None, :], is_key, 0.0)
            changes -= tl.dot(reads, state, input_precision=PRECISION)
        else:
            changes = tl.load(mixed_tile_ptr + value_places, is_value, 0.0)
        pairs_places = places[:, None] * TILE + places[None, :]
        pairs = tl.load(pairs_ptr + scratch_row * TILE + pairs_places, is_row[:, None], 0.0)
        output = tl.dot(pairs, changes, output, input_precision=PRECISION)
        if skip_ptr is not None:
            output += tl.load(skip_ptr + head) * changes
        tl.store(output_ptr + first.to(tl.int64) * (num_heads * VALUE_DIM) + output_places, output, is_value)

        key = tl.load(mixed_tile_ptr + key_size + query_places, is_key, 0.0)
        changes = changes * tl.load(factors_tile_ptr + places * 2 + 1, is_row, 0.0)[:, None]
        if (save_row >= 0) & (saved > tl.maximum(first, begin)) & (saved <= last + 1):
            last_saved = (saved - 1 - first).to(tl.int32)
            kept = state_after(
                state, key, changes, total, totals_tile_ptr, last_saved, KEY_DIM, HAS_CHANNEL_DECAYS, PRECISION
            )
            tl.store(states_ptr + save_row * state_size + state_places, kept, is_state)
        state = state_after(
            state, key, changes, total, totals_tile_ptr, last - first, KEY_DIM, HAS_CHANNEL_DECAYS, PRECISION
        )
    tl.store(states_ptr + store_row * state_size + state_places, state, is_state & (store_row >= 0))


@triton.jit
def state_after(
    state,
    key,
    changes,
    total,
    totals_tile_ptr,
    last,
    KEY_DIM: tl.constexpr,
    HAS_CHANNEL_DECAYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the state after the row `last` of a tile, from the one before the tile."""
    places, keys = tl.arange(0, key.shape[0]), tl.arange(0, key.shape[1])
    if HAS_CHANNEL_DECAYS:
        last_total = tl.load(totals_tile_ptr + last * KEY_DIM + keys, keys < KEY_DIM, 0.0)
        key = key * tl.exp(tl.minimum(last_total[None, :] - total, 0.0))
        state = state * tl.exp(last_total)[:, None]
    else:
        last_total = tl.load(totals_tile_ptr + last)
        changes = changes * tl.exp(tl.minimum(last_total - total, 0.0))[:, None]
        state = state * tl.exp(last_total)
    changes = tl.where((places <= last)[:, None], changes, 0.0)
    return tl.dot(tl.trans(key), changes, state, input_precision=PRECISION)
