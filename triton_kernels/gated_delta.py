"""The gated delta rule on a GPU, token by token: the formulas are those of ops/gated_delta.py.

Three launches: the convolution, the recurrence, and the norm with the gate. The state of some values of a head stays in
registers for all tokens of a chunk. Long prompts take time in proportion to their tokens: chunks of tokens by matrix
products would be faster there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens in S chunks, C channels, W taps, w = W - 1, N value heads, G key heads, K values of a key, V of a value,
# X = N * V

CHANNELS = 256  # of one program of the convolution
VALUES = 32  # of a head, of one program of the recurrence
L2_EPSILON = tl.constexpr(1e-6)


def convolve(
    input_TC: Tensor, taps_WC: Tensor, inputs: Tensor, row_starts: Tensor, states: tuple[Tensor, ...]
) -> Tensor:
    """Return the SiLU of a causal convolution of each channel, [T, C] float32, and update the last inputs.

    Memory moved: (element size + 4) * T * C, and 2 * w * C * element size for each chunk.

    Args:
        input_TC: rows may be strided.
        taps_WC: float32; the last one multiplies the token itself.
        inputs: [rows, w, C], in the dtype of the input; the oldest first.
        row_starts: [S + 1] int32.
        states: load, store, save and number of tokens before the save, [S] int64 each; see `StateRows`.
    """
    num_tokens, num_channels = input_TC.shape
    assert input_TC.stride(1) == 1, input_TC.stride()
    out_TC = torch.empty(num_tokens, num_channels, dtype=torch.float32, device=input_TC.device)
    if num_tokens:
        grid = (len(row_starts) - 1, triton.cdiv(num_channels, CHANNELS))
        convolve_kernel[grid](
            input_TC,
            input_TC.stride(0),
            taps_WC,
            inputs,
            row_starts,
            *states,
            out_TC,
            num_channels,
            NUM_TAPS=len(taps_WC),
            CHANNELS=CHANNELS,
        )
    return out_TC


@triton.jit
def convolve_kernel(
    input_ptr,
    row_stride,
    taps_ptr,
    inputs_ptr,
    row_starts_ptr,
    load_ptr,
    store_ptr,
    save_ptr,
    before_save_ptr,
    out_ptr,
    num_channels,
    NUM_TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    chunk = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < num_channels
    begin, end = tl.load(row_starts_ptr + chunk), tl.load(row_starts_ptr + chunk + 1)
    load_row, store_row = tl.load(load_ptr + chunk), tl.load(store_ptr + chunk)
    save_row, saved = tl.load(save_ptr + chunk), begin + tl.load(before_save_ptr + chunk)
    for number in range(end - begin):
        t = begin.to(tl.int64) + number
        total = tl.zeros([CHANNELS], tl.float32)
        for tap in tl.static_range(NUM_TAPS):
            place = t - (NUM_TAPS - 1) + tap  # of the input; before the chunk, in the state
            own = tl.load(input_ptr + place.to(tl.int64) * row_stride + channels, mask & (place >= begin), 0.0)
            row = load_row * (NUM_TAPS - 1) + (place - begin + NUM_TAPS - 1)
            is_before = (place < begin) & (load_row >= 0)
            old = tl.load(inputs_ptr + row * num_channels + channels, mask & is_before, 0.0)
            weight = tl.load(taps_ptr + tap * num_channels + channels, mask, 0.0)
            total += (own.to(tl.float32) + old.to(tl.float32)) * weight
        tl.store(out_ptr + t * num_channels + channels, total * tl.sigmoid(total), mask)
    # The last inputs, of which some may be those before the chunk. All are read before the first is written: a chunk
    # mostly stores to the row that it has loaded.
    for number in tl.static_range(2):
        target, stop = (save_row, saved) if number == 0 else (store_row, end)
        is_stored = (target >= 0) & (stop <= end)
        for tap in tl.static_range(NUM_TAPS - 1):
            place = stop - (NUM_TAPS - 1) + tap
            own = tl.load(
                input_ptr + place.to(tl.int64) * row_stride + channels, mask & is_stored & (place >= begin), 0.0
            )
            row = load_row * (NUM_TAPS - 1) + (place - begin + NUM_TAPS - 1)
            is_before = is_stored & (place < begin) & (load_row >= 0)
            old = tl.load(inputs_ptr + row * num_channels + channels, mask & is_before, 0.0)
            kept = target * (NUM_TAPS - 1) + tap
            # Earlier taps are written first, and read only at or after their own place.
            tl.store(inputs_ptr + kept * num_channels + channels, own + old, mask & is_stored)


def gated_delta(
    mixed_TC: Tensor,
    gates_TX: Tensor,
    rates_T2N: Tensor,
    log_decay_N: Tensor,
    decay_bias_N: Tensor,
    norm_V: Tensor,
    cache: Tensor,
    row_starts: Tensor,
    states: tuple[Tensor, ...],
    epsilon: float,
) -> Tensor:
    """Return the gated outputs [T, X] in the dtype of the gates, and update the states.

    Memory moved: 4 * T * (C + 2 * X) + 2 * element size * T * X, and 8 * N * K * V for each chunk. About 7 * T * N * K
    * V operations.

    Args:
        mixed_TC: float32, contiguous: queries, keys and values.
        gates_TX: rows may be strided.
        rates_T2N: contiguous.
        log_decay_N, decay_bias_N, norm_V: float32.
        cache: [rows, N, K, V] float32.
        row_starts, states: see `convolve`.
    """
    num_tokens, value_size = gates_TX.shape
    _, num_heads, key_dim, value_dim = cache.shape
    num_key_heads = (mixed_TC.shape[1] - value_size) // (2 * key_dim)
    output_TX = torch.empty(num_tokens, value_size, dtype=torch.float32, device=mixed_TC.device)
    out_TX = torch.empty(num_tokens, value_size, dtype=gates_TX.dtype, device=mixed_TC.device)
    if num_tokens == 0:
        return out_TX
    assert gates_TX.stride(1) == 1, gates_TX.stride()
    grid = (len(row_starts) - 1, num_heads, triton.cdiv(value_dim, VALUES))
    delta_kernel[grid](
        mixed_TC,
        rates_T2N,
        log_decay_N,
        decay_bias_N,
        cache,
        row_starts,
        *states,
        output_TX,
        num_heads,
        num_key_heads,
        key_dim,
        value_dim,
        key_dim**-0.5,
        BLOCK_K=triton.next_power_of_2(key_dim),
        VALUES=VALUES,
    )
    gate_kernel[(num_tokens, num_heads)](
        output_TX, gates_TX, gates_TX.stride(0), norm_V, out_TX, value_dim, epsilon, triton.next_power_of_2(value_dim)
    )
    return out_TX


@triton.jit
def delta_kernel(
    mixed_ptr,
    rates_ptr,
    log_decay_ptr,
    decay_bias_ptr,
    cache_ptr,
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
    BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    keys, values = tl.arange(0, BLOCK_K), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < key_dim, values < value_dim
    begin, end = tl.load(row_starts_ptr + chunk), tl.load(row_starts_ptr + chunk + 1)
    load_row, store_row = tl.load(load_ptr + chunk), tl.load(store_ptr + chunk)
    save_row, saved = tl.load(save_ptr + chunk), begin + tl.load(before_save_ptr + chunk)
    places = keys[:, None] * value_dim + values[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    state_size = key_dim * value_dim
    state = tl.load(cache_ptr + (load_row * num_heads + head) * state_size + places, is_state & (load_row >= 0), 0.0)
    key_size = num_key_heads * key_dim
    width = 2 * key_size + num_heads * value_dim
    key_head = head // (num_heads // num_key_heads) * key_dim
    growth_rate = tl.exp(tl.load(log_decay_ptr + head))
    bias = tl.load(decay_bias_ptr + head)
    for number in range(end - begin):
        t = begin.to(tl.int64) + number
        row_ptr = mixed_ptr + t * width
        query = tl.load(row_ptr + key_head + keys, is_key, 0.0)
        key = tl.load(row_ptr + key_size + key_head + keys, is_key, 0.0)
        value = tl.load(row_ptr + 2 * key_size + head * value_dim + values, is_value, 0.0)
        query = query * (query_scale / tl.sqrt(tl.sum(query * query) + L2_EPSILON))
        key = key / tl.sqrt(tl.sum(key * key) + L2_EPSILON)
        rates = rates_ptr + t * 2 * num_heads + head
        rate = tl.sigmoid(tl.load(rates).to(tl.float32))
        x = tl.load(rates + num_heads).to(tl.float32) + bias
        growth = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        state = state * tl.exp(-growth_rate * growth)
        change = (value - tl.sum(state * key[:, None], 0)) * rate
        state += key[:, None] * change[None, :]
        output = tl.sum(state * query[:, None], 0)
        tl.store(output_ptr + (t * num_heads + head) * value_dim + values, output, is_value)
        is_saved = (t + 1 == saved) & (save_row >= 0)
        tl.store(cache_ptr + (save_row * num_heads + head) * state_size + places, state, is_state & is_saved)
    tl.store(cache_ptr + (store_row * num_heads + head) * state_size + places, state, is_state & (store_row >= 0))


@triton.jit
def gate_kernel(output_ptr, gates_ptr, gate_stride, norm_ptr, out_ptr, value_dim, epsilon, BLOCK_V: tl.constexpr):
    t, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    values = tl.arange(0, BLOCK_V)
    mask = values < value_dim
    first = (t * num_heads + head) * value_dim
    output = tl.load(output_ptr + first + values, mask, 0.0)
    output = output / tl.sqrt(tl.sum(output * output) / value_dim + epsilon)
    gate = tl.load(gates_ptr + t * gate_stride + head * value_dim + values, mask, 0.0).to(tl.float32)
    normed = output * tl.load(norm_ptr + values, mask, 0.0)
    tl.store(out_ptr + first + values, (normed * gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask)
