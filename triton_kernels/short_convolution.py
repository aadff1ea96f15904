"""Short convolutions on a GPU: the operation of ops/convolution.

A program runs through some tokens of a chunk. The states after chunks of many tokens have a launch of their own: the
programs of the first tokens read what it overwrites.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.online_softmax import chunk_of_tile
from moeserve.triton_kernels.sizes import ceil_div

# T tokens in S chunks, C channels, W taps, w = W - 1

CHANNELS = 256  # of one program
TOKENS = 16  # of one program
CHUNKS_AT_ONCE = 64


def short_convolution(
    input_TX: Tensor,
    taps_WC: Tensor,
    bias_C: Tensor | None,
    states: Tensor,
    row_starts: Tensor,
    state_rows: tuple[Tensor, ...],
    *,
    max_rows_per_chunk: int,
    is_gated: bool,
) -> Tensor:
    """Return [T, C]: the SiLU of a causal convolution of each channel in float32, or a gated one in the input's dtype.

    Memory moved: (element size + 4) * T * C, or with gates 4 * element size * T * C; and 2 * w * C * element size for
    each chunk.

    Args:
        input_TX: [T, C]; gated: [T, 3 * C]. Rows may be strided.
        taps_WC: float32; the last one multiplies the token itself.
        bias_C: float32.
        states: [rows, w, C], in the dtype of the input; the oldest first. Updated.
        row_starts: [S + 1] int32.
        state_rows: load, store, save and number of tokens before the save, [S] int64 each; see `StateRows`.
        max_rows_per_chunk: on the host.
    """
    num_tokens, num_channels = len(input_TX), taps_WC.shape[1]
    assert input_TX.shape[1] == num_channels * (3 if is_gated else 1), (input_TX.shape, taps_WC.shape)
    assert input_TX.stride(1) == 1, input_TX.stride()
    dtype = input_TX.dtype if is_gated else torch.float32
    out_TC = torch.empty(num_tokens, num_channels, dtype=dtype, device=input_TX.device)
    if num_tokens:
        num_chunks, num_parts = len(row_starts) - 1, ceil_div(num_channels, CHANNELS)
        constants = {"NUM_TAPS": len(taps_WC), "CHANNELS": CHANNELS, "IS_GATED": is_gated}
        inputs = input_TX, input_TX.stride(0)
        rows = states, row_starts, *state_rows
        is_divided = max_rows_per_chunk > TOKENS
        convolve_kernel[(num_tokens // TOKENS + num_chunks, num_parts)](
            *inputs,
            taps_WC,
            bias_C,
            *rows,
            out_TC,
            num_chunks,
            num_channels,
            TOKENS=TOKENS,
            STORES_STATES=not is_divided,
            CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
            **constants,
        )
        if is_divided:
            store_states_kernel[(num_chunks, num_parts)](*inputs, *rows, num_channels, **constants)
    return out_TC


@triton.jit
def load_input(input_ptr, row_stride, place, channels, mask, num_channels, IS_GATED: tl.constexpr):
    """Return inputs of the convolution in the dtype of the states."""
    row_ptr = input_ptr + place.to(tl.int64) * row_stride
    if not IS_GATED:
        return tl.load(row_ptr + channels, mask, 0.0)
    gate = tl.load(row_ptr + channels, mask, 0.0)
    value = tl.load(row_ptr + 2 * num_channels + channels, mask, 0.0)
    return (gate.to(tl.float32) * value.to(tl.float32)).to(gate.dtype)


@triton.jit(do_not_specialize=["num_chunks"])
def convolve_kernel(
    input_ptr,
    row_stride,
    taps_ptr,
    bias_ptr,
    states_ptr,
    row_starts_ptr,
    load_ptr,
    store_ptr,
    save_ptr,
    before_save_ptr,
    out_ptr,
    num_chunks,
    num_channels,
    NUM_TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_GATED: tl.constexpr,
    STORES_STATES: tl.constexpr,  # each chunk has one program for each of its channels
    CHUNKS_AT_ONCE: tl.constexpr,
):
    slot = tl.program_id(0)
    chunk = chunk_of_tile(row_starts_ptr, num_chunks, slot, 1, TOKENS, 1, CHUNKS_AT_ONCE)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < num_channels
    begin, end = tl.load(row_starts_ptr + chunk), tl.load(row_starts_ptr + chunk + 1)
    load_row = tl.load(load_ptr + chunk)
    first = begin + (slot - (begin // TOKENS + chunk)) * TOKENS
    for number in range(tl.minimum(end - first, TOKENS)):
        t = first.to(tl.int64) + number
        total = tl.zeros([CHANNELS], tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channels, mask, 0.0)
        for tap in tl.static_range(NUM_TAPS):
            place = t - (NUM_TAPS - 1) + tap  # of the input; before the chunk, in the state
            own = load_input(
                input_ptr, row_stride, place, channels, mask & (place >= begin), num_channels, IS_GATED=IS_GATED
            )
            row = load_row * (NUM_TAPS - 1) + (place - begin + NUM_TAPS - 1)
            is_before = (place < begin) & (load_row >= 0)
            old = tl.load(states_ptr + row * num_channels + channels, mask & is_before, 0.0)
            weight = tl.load(taps_ptr + tap * num_channels + channels, mask, 0.0)
            total += (own.to(tl.float32) + old.to(tl.float32)) * weight
        if IS_GATED:
            gate = tl.load(input_ptr + t * row_stride + num_channels + channels, mask, 0.0)
            total = total * gate.to(tl.float32)
        else:
            total = total * tl.sigmoid(total)
        tl.store(out_ptr + t * num_channels + channels, total.to(out_ptr.dtype.element_ty), mask)
    if STORES_STATES:
        store_states(
            input_ptr, row_stride, states_ptr, begin, tl.where(first < end, end, begin), load_row, store_ptr + chunk,
            save_ptr + chunk, before_save_ptr + chunk, channels, mask, num_channels, NUM_TAPS, IS_GATED,
        )  # fmt: skip


@triton.jit
def store_states_kernel(
    input_ptr,
    row_stride,
    states_ptr,
    row_starts_ptr,
    load_ptr,
    store_ptr,
    save_ptr,
    before_save_ptr,
    num_channels,
    NUM_TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    chunk = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    begin, end = tl.load(row_starts_ptr + chunk), tl.load(row_starts_ptr + chunk + 1)
    store_states(
        input_ptr, row_stride, states_ptr, begin, end, tl.load(load_ptr + chunk), store_ptr + chunk, save_ptr + chunk,
        before_save_ptr + chunk, channels, channels < num_channels, num_channels, NUM_TAPS, IS_GATED,
    )  # fmt: skip


@triton.jit
def store_states(
    input_ptr,
    row_stride,
    states_ptr,
    begin,
    end,
    load_row,
    store_ptr,
    save_ptr,
    before_save_ptr,
    channels,
    mask,
    num_channels,
    NUM_TAPS: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Store the last inputs of a chunk that has tokens, of which some may be those before the chunk."""
    # All are read before the first is written: a chunk mostly stores to the row that it has loaded.
    for number in tl.static_range(2):
        target = tl.load(save_ptr if number == 0 else store_ptr)
        stop = begin + tl.load(before_save_ptr) if number == 0 else end
        is_stored = (target >= 0) & (stop <= end) & (begin < end)
        for tap in tl.static_range(NUM_TAPS - 1):
            place = stop - (NUM_TAPS - 1) + tap
            is_own = is_stored & (place >= begin)
            own = load_input(input_ptr, row_stride, place, channels, mask & is_own, num_channels, IS_GATED=IS_GATED)
            row = load_row * (NUM_TAPS - 1) + (place - begin + NUM_TAPS - 1)
            is_before = is_stored & (place < begin) & (load_row >= 0)
            old = tl.load(states_ptr + row * num_channels + channels, mask & is_before, 0.0)
            kept = target * (NUM_TAPS - 1) + tap
            # Earlier taps are written first, and read only at or after their own place.
            tl.store(states_ptr + kept * num_channels + channels, own + old, mask & is_stored)
