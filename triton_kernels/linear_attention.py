"""Linear attention on a GPU: the formulas are those of ops/linear_attention.

The recurrence computes chunks of few tokens one by one: the state of some values of a head stays in registers for all
tokens of a chunk. Chunks of many tokens are computed in tiles, by the kernels of linear_attention_tiles.py. A launch
for the norm and the gate follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.linear_attention_tiles import LEAST_ROWS, MAX_KEY_DIM, attend_tiles, log_decay_of, softplus
from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T tokens in S chunks, N value heads, G key heads, K values of a key, V of a value, X = N * V,
# C = 2 * G * K + X channels

VALUES = 32  # of a head, of one program of the recurrence
L2_EPSILON = tl.constexpr(1e-6)


def linear_attention(
    mixed_TC: Tensor,
    gates_TX: Tensor,
    decays_TX: Tensor,
    rates_TN: Tensor | None,
    log_decay_N: Tensor,
    decay_bias: Tensor,
    skip_N: Tensor | None,
    norm: Tensor,
    states: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    state_rows: tuple[Tensor, ...],
    *,
    lengths: Sequence[int],
    uses_tiles: bool,
    norm_heads: int,
    norm_epsilon: float,
    decay_floor: float | None,
    gates_with_sigmoid: bool,
) -> Tensor:
    """Return the gated outputs [T, X] in the dtype of the gates, and update the states.

    Memory moved: 4 * T * (C + 2 * X) + 2 * element size * T * X, and 8 * N * K * V for each chunk. About 7 * T * N * K
    * V operations. See also `attend_tiles`.

    Args:
        mixed_TC: float32, contiguous: queries, keys and values.
        gates_TX: this and the next two have rows that may be strided.
        decays_TX: [T, N], or [T, N * K] for each channel.
        rates_TN: of the delta rule; None: a state space model.
        log_decay_N, decay_bias, skip_N, norm: float32; see `LinearAttentionWeights`.
        states: [rows, N, K, V] float32.
        row_starts: [S + 1] int32.
        context_lens: [S] int32.
        state_rows: load, store, save and number of tokens before the save, [S] int64 each; see `StateRows`.
        lengths: of the chunks, on the host.
        uses_tiles: for chunks of at least `LEAST_ROWS` tokens. Otherwise all sums have one order, token by token.
        norm_heads: heads that are normalised together.
        decay_floor: of the logarithms of decays; None: there is none.
    """
    num_tokens, value_size = gates_TX.shape
    _, num_heads, key_dim, value_dim = states.shape
    num_key_heads = (mixed_TC.shape[1] - value_size) // (2 * key_dim)
    output_TX = torch.empty(num_tokens, value_size, dtype=torch.float32, device=mixed_TC.device)
    out_TX = torch.empty(num_tokens, value_size, dtype=gates_TX.dtype, device=mixed_TC.device)
    if num_tokens == 0:
        return out_TX
    is_delta = rates_TN is not None
    rates = decays_TX if rates_TN is None else rates_TN
    assert gates_TX.stride(1) == decays_TX.stride(1) == rates.stride(1) == 1
    uses_tiles = uses_tiles and key_dim <= MAX_KEY_DIM
    if uses_tiles and max(lengths) >= LEAST_ROWS:
        attend_tiles(
            mixed_TC,
            decays_TX,
            rates_TN,
            log_decay_N,
            decay_bias,
            skip_N,
            states,
            row_starts,
            context_lens,
            state_rows,
            output_TX,
            num_key_heads=num_key_heads,
            decay_floor=decay_floor,
            dtype=gates_TX.dtype,
        )
    if not uses_tiles or min(lengths) < LEAST_ROWS:
        recurrence_kernel[(len(row_starts) - 1, num_heads, ceil_div(value_dim, VALUES))](
            mixed_TC,
            decays_TX,
            decays_TX.stride(0),
            rates,
            rates.stride(0),
            log_decay_N,
            decay_bias,
            skip_N,
            states,
            row_starts,
            *state_rows,
            output_TX,
            num_heads,
            num_key_heads,
            key_dim,
            value_dim,
            key_dim**-0.5,
            decay_floor or 0.0,
            BLOCK_K=next_power_of_2(key_dim),
            VALUES=VALUES,
            IS_DELTA=is_delta,
            HAS_CHANNEL_DECAYS=decays_TX.shape[1] != num_heads,
            HAS_FLOOR=decay_floor is not None,
            TILED_ROWS=LEAST_ROWS if uses_tiles else 2**31 - 1,
        )
    group_size = norm_heads * value_dim
    block = next_power_of_2(group_size)
    gate_kernel[(num_tokens, num_heads // norm_heads)](
        output_TX,
        gates_TX,
        gates_TX.stride(0),
        norm,
        0 if len(norm) == value_dim else group_size,
        out_TX,
        group_size,
        norm_epsilon,
        block,
        WITH_SIGMOID=gates_with_sigmoid,
        BEFORE_NORM=not is_delta,
        num_warps=min(8, max(1, block // 256)),
    )
    return out_TX


@triton.jit
def recurrence_kernel(
    mixed_ptr,
    decays_ptr,
    decay_stride,
    rates_ptr,
    rate_stride,
    log_decay_ptr,
    decay_bias_ptr,
    skip_ptr,
    states_ptr,
    row_starts_ptr,
    load_ptr,
    store_ptr,
    save_ptr,
    before_save_ptr,
    output_ptr,
    num_heads,
    num_key_heads,
    key_dim,
    value_dim,
    query_scale,
    decay_floor,
    BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr,
    IS_DELTA: tl.constexpr,
    HAS_CHANNEL_DECAYS: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    TILED_ROWS: tl.constexpr,  # chunks of so many rows or more are left out
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    keys, values = tl.arange(0, BLOCK_K), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < key_dim, values < value_dim
    begin, end = tl.load(row_starts_ptr + chunk), tl.load(row_starts_ptr + chunk + 1)
    if end - begin >= TILED_ROWS:
        return
    load_row, store_row = tl.load(load_ptr + chunk), tl.load(store_ptr + chunk)
    save_row, saved = tl.load(save_ptr + chunk), begin + tl.load(before_save_ptr + chunk)
    places = keys[:, None] * value_dim + values[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    state_size = key_dim * value_dim
    state = tl.load(states_ptr + (load_row * num_heads + head) * state_size + places, is_state & (load_row >= 0), 0.0)
    key_size = num_key_heads * key_dim
    width = 2 * key_size + num_heads * value_dim
    key_head = head // (num_heads // num_key_heads) * key_dim
    growth = tl.exp(tl.load(log_decay_ptr + head))
    if HAS_CHANNEL_DECAYS:
        own_decays = head * key_dim + keys
        bias = tl.load(decay_bias_ptr + own_decays, is_key, 0.0)
    else:
        own_decays = head
        bias = tl.load(decay_bias_ptr + own_decays)
    for number in range(end - begin):
        t = begin.to(tl.int64) + number
        row_ptr = mixed_ptr + t * width
        query = tl.load(row_ptr + key_head + keys, is_key, 0.0)
        key = tl.load(row_ptr + key_size + key_head + keys, is_key, 0.0)
        value = tl.load(row_ptr + 2 * key_size + head * value_dim + values, is_value, 0.0)
        if HAS_CHANNEL_DECAYS:
            x = tl.load(decays_ptr + t * decay_stride + own_decays, is_key, 0.0).to(tl.float32) + bias
        else:
            x = tl.load(decays_ptr + t * decay_stride + own_decays).to(tl.float32) + bias
        decay = tl.exp(log_decay_of(x, growth, decay_floor, HAS_FLOOR))
        state = state * (decay[:, None] if HAS_CHANNEL_DECAYS else decay)
        if IS_DELTA:
            query = query * (query_scale / tl.sqrt(tl.sum(query * query) + L2_EPSILON))
            key = key / tl.sqrt(tl.sum(key * key) + L2_EPSILON)
            rate = tl.sigmoid(tl.load(rates_ptr + t * rate_stride + head).to(tl.float32))
            change = (value - tl.sum(state * key[:, None], 0)) * rate
        else:
            change = value * softplus(x)
        state += key[:, None] * change[None, :]
        output = tl.sum(state * query[:, None], 0)
        if skip_ptr is not None:
            output += tl.load(skip_ptr + head) * value
        tl.store(output_ptr + (t * num_heads + head) * value_dim + values, output, is_value)
        is_saved = (t + 1 == saved) & (save_row >= 0)
        tl.store(states_ptr + (save_row * num_heads + head) * state_size + places, state, is_state & is_saved)
    tl.store(states_ptr + (store_row * num_heads + head) * state_size + places, state, is_state & (store_row >= 0))


@triton.jit
def gate_kernel(
    output_ptr,
    gates_ptr,
    gate_stride,
    norm_ptr,
    norm_stride,  # from group to group; 0: all have the same weights
    out_ptr,
    group_size,
    epsilon,
    BLOCK: tl.constexpr,
    WITH_SIGMOID: tl.constexpr,
    BEFORE_NORM: tl.constexpr,
):
    t, group, num_groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    values = tl.arange(0, BLOCK)
    mask = values < group_size
    first = (t * num_groups + group) * group_size
    output = tl.load(output_ptr + first + values, mask, 0.0)
    gate = tl.load(gates_ptr + t * gate_stride + group * group_size + values, mask, 0.0).to(tl.float32)
    gate = tl.sigmoid(gate) * (1.0 if WITH_SIGMOID else gate)
    if BEFORE_NORM:
        output = output * gate
    output = output / tl.sqrt(tl.sum(output * output) / group_size + epsilon)
    normed = output * tl.load(norm_ptr + group * norm_stride + values, mask, 0.0)
    if not BEFORE_NORM:
        normed = normed * gate
    tl.store(out_ptr + first + values, normed.to(out_ptr.dtype.element_ty), mask)
