"""Hyper-connections on a GPU: the operations of ops/streams. Torch multiplies the streams by the map."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T tokens, D model width, S streams, X = S * D, C coefficients

BLOCK_D = 512  # elements of each stream at a time
NUM_WARPS = 4


def collapse_streams(
    streams_TX: Tensor,
    map_CX: Tensor,
    base_C: Tensor,
    scales: Tensor,
    *,
    num_streams: int,
    num_iterations: int,
    epsilon: float,
    norm_epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Return the input of a network [T, D], and the coefficients [T, C] float32.

    Memory moved: X * (3 * element size + 8) bytes for each token, of which a third may come from the L2 cache, and 4 *
    C * X. Operations: 2 * C * X for each token in float32.

    Args:
        streams_TX: contiguous.
        map_CX, base_C, scales: float32; see `StreamsWeights`.
    """
    num_tokens, width = len(streams_TX), streams_TX.shape[1] // num_streams
    # The norm divides all inputs of the map by one number, so it divides the results.
    mapped_TC = functional.linear(streams_TX.float(), map_CX)
    coefficients_TC = torch.empty_like(mapped_TC)
    collapsed_TD = streams_TX.new_empty(num_tokens, width)
    if num_tokens:
        collapse_kernel[(num_tokens,)](
            streams_TX,
            mapped_TC,
            base_C,
            scales,
            collapsed_TD,
            coefficients_TC,
            width,
            epsilon,
            norm_epsilon,
            NUM_STREAMS=num_streams,
            NUM_COEFFICIENTS=len(map_CX),
            NUM_ITERATIONS=num_iterations,
            BLOCK_S=next_power_of_2(num_streams),
            BLOCK_D=BLOCK_D,
            num_warps=NUM_WARPS,
        )
    return collapsed_TD, coefficients_TC


def expand_streams(streams_TX: Tensor, update_TD: Tensor, coefficients_TC: Tensor, *, num_streams: int) -> Tensor:
    """Return the streams [T, X] behind a network with these outputs.

    Memory moved: (2 * X + D) * element size for each token, which bounds the time.
    """
    num_tokens, width = update_TD.shape
    expanded_TX = torch.empty_like(streams_TX)
    if num_tokens:
        expand_kernel[(num_tokens, ceil_div(width, BLOCK_D))](
            streams_TX,
            update_TD,
            update_TD.stride(0),
            coefficients_TC,
            expanded_TX,
            width,
            NUM_STREAMS=num_streams,
            BLOCK_S=next_power_of_2(num_streams),
            BLOCK_D=BLOCK_D,
            num_warps=NUM_WARPS,
        )
    return expanded_TX


@triton.jit
def collapse_kernel(
    streams_ptr,
    mapped_ptr,
    base_ptr,
    scales_ptr,
    collapsed_ptr,
    coefficients_ptr,
    width,
    epsilon,
    norm_epsilon,
    NUM_STREAMS: tl.constexpr,
    NUM_COEFFICIENTS: tl.constexpr,  # NUM_STREAMS behind the last network
    NUM_ITERATIONS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    streams, elements = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    is_stream = streams < NUM_STREAMS
    streams_ptrs = streams_ptr + token * NUM_STREAMS * width + streams[:, None] * width + elements[None, :]
    squares = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for first in range(0, width, BLOCK_D):
        mask = is_stream[:, None] & (first + elements < width)[None, :]
        values = tl.load(streams_ptrs + first, mask, 0.0).to(tl.float32)
        squares += values * values
    factor = 1.0 / tl.sqrt(tl.sum(squares) / (NUM_STREAMS * width) + norm_epsilon)

    mapped_row_ptr, row_ptr = mapped_ptr + token * NUM_COEFFICIENTS, coefficients_ptr + token * NUM_COEFFICIENTS
    before = tl.load(mapped_row_ptr + streams, is_stream, 0.0) * factor
    before = tl.sigmoid(before * tl.load(scales_ptr) + tl.load(base_ptr + streams, is_stream, 0.0)) + epsilon
    tl.store(row_ptr + streams, before, is_stream)
    if NUM_COEFFICIENTS > NUM_STREAMS:
        after = tl.load(mapped_row_ptr + NUM_STREAMS + streams, is_stream, 0.0) * factor * tl.load(scales_ptr + 1)
        after = 2.0 * tl.sigmoid(after + tl.load(base_ptr + NUM_STREAMS + streams, is_stream, 0.0))
        tl.store(row_ptr + NUM_STREAMS + streams, after, is_stream)
        places = 2 * NUM_STREAMS + streams[:, None] * NUM_STREAMS + streams[None, :]
        is_place = is_stream[:, None] & is_stream[None, :]
        mix = tl.load(mapped_row_ptr + places, is_place, 0.0) * factor * tl.load(scales_ptr + 2)
        mix = tl.where(is_place, mix + tl.load(base_ptr + places, is_place, 0.0), float("-inf"))
        mix = tl.where(is_place, tl.exp(mix - tl.where(is_stream, tl.max(mix, 1), 0.0)[:, None]), 0.0)
        mix = tl.where(is_place, mix / tl.where(is_stream, tl.sum(mix, 1), 1.0)[:, None] + epsilon, 0.0)
        mix = mix / (tl.sum(mix, 0) + epsilon)[None, :]
        for _ in range(NUM_ITERATIONS - 1):
            mix = mix / (tl.sum(mix, 1) + epsilon)[:, None]
            mix = mix / (tl.sum(mix, 0) + epsilon)[None, :]
        tl.store(row_ptr + places, mix, is_place)

    for first in range(0, width, BLOCK_D):
        is_element = first + elements < width
        values = tl.load(streams_ptrs + first, is_stream[:, None] & is_element[None, :], 0.0).to(tl.float32)
        collapsed = tl.sum(tl.where(is_stream, before, 0.0)[:, None] * values, 0)
        collapsed = collapsed.to(collapsed_ptr.dtype.element_ty)
        tl.store(collapsed_ptr + token * width + first + elements, collapsed, is_element)


@triton.jit
def expand_kernel(
    streams_ptr,
    update_ptr,
    update_stride,
    coefficients_ptr,
    expanded_ptr,
    width,
    NUM_STREAMS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    streams, elements = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_stream, is_element = streams < NUM_STREAMS, elements < width
    first = token * NUM_STREAMS * width
    places = streams[:, None] * width + elements[None, :]
    values = tl.load(streams_ptr + first + places, is_stream[:, None] & is_element[None, :], 0.0).to(tl.float32)
    update = tl.load(update_ptr + token * update_stride + elements, is_element, 0.0).to(tl.float32)
    row_ptr = coefficients_ptr + token * NUM_STREAMS * (2 + NUM_STREAMS) + NUM_STREAMS
    for stream in tl.static_range(NUM_STREAMS):
        mix = tl.load(row_ptr + NUM_STREAMS + streams * NUM_STREAMS + stream, is_stream, 0.0)
        expanded = tl.load(row_ptr + stream) * update + tl.sum(mix[:, None] * values, 0)
        expanded = expanded.to(expanded_ptr.dtype.element_ty)
        tl.store(expanded_ptr + first + stream * width + elements, expanded, is_element)
