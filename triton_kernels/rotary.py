"""Rotary embedding on a GPU from given cosines and sines, alone or with the write into the paged KV cache."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.float8_rows import encode_float8, float8_scales, largest_bits
from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T tokens, N query heads, G key-value heads, H size of a query or key, V of a value, F rotated pairs: the first 2 * F
# numbers of a head


@functools.cache
def launch_sizes(num_pairs: int, num_copied: int) -> dict[str, int]:
    """Return the tile of one program, which processes BLOCK_N heads of one token, and its number of warps.

    Args:
        num_pairs: half of the numbers of a head that are rotated. BLOCK_F is a power of two that holds them.
        num_copied: numbers of a head that are copied. BLOCK_H is a power of two that holds them, or 0.
    """
    block_pairs = next_power_of_2(num_pairs)
    block_copied = next_power_of_2(num_copied) if num_copied else 0
    num_heads = max(1024 // max(2 * block_pairs, block_copied), 1)
    return {"BLOCK_N": num_heads, "BLOCK_F": block_pairs, "BLOCK_H": block_copied, "num_warps": 2}


def rotary(
    heads_TNH: Tensor, cosines_TF: Tensor, sines_TF: Tensor, is_interleaved: bool, out_TNH: Tensor | None = None
) -> Tensor:
    """Rotate the first 2 * F numbers of each head, in float32: (a, b) becomes (a cos - b sin, b cos + a sin).

    Memory moved: 4 * T * N * F * element size in place (2 * T * N * H elsewhere), and 8 * T * F for the angles; 6
    operations for each pair.

    Args:
        heads_TNH: overwritten unless an output is given. May be a view of a fused projection; heads are contiguous.
        cosines_TF, sines_TF: float32, contiguous.
        is_interleaved: pairs are neighbours (2f, 2f + 1); otherwise they are (f, f + F).
        out_TNH: memory for the result: the heads themselves, or memory that does not overlap with them.

    Returns:
        [T, N, H] in the dtype of the heads.
    """
    out_TNH = heads_TNH if out_TNH is None else out_TNH
    num_tokens, num_heads, head_size = heads_TNH.shape
    num_pairs = cosines_TF.shape[1]
    if heads_TNH.numel() == 0:  # an empty grid cannot be launched
        return out_TNH
    is_in_place = out_TNH.data_ptr() == heads_TNH.data_ptr()
    sizes = launch_sizes(num_pairs, 0 if is_in_place else head_size - 2 * num_pairs)
    rotary_kernel[(num_tokens, ceil_div(num_heads, sizes["BLOCK_N"]))](
        heads_TNH,
        cosines_TF,
        sines_TF,
        out_TNH,
        num_heads,
        head_size,
        num_pairs,
        *heads_TNH.stride()[:2],
        *out_TNH.stride()[:2],
        IS_INTERLEAVED=is_interleaved,
        **sizes,
    )
    return out_TNH


def rotary_with_cache_write(
    query_TNH: Tensor,
    key_TGH: Tensor,
    value_TGV: Tensor,
    cosines_TF: Tensor,
    sines_TF: Tensor,
    is_interleaved: bool,
    key_cache: Tensor,
    value_cache: Tensor,
    slots_T: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Rotate the queries in place, and write rotated keys and the values to the paged cache, in one launch.

    Memory moved: (4 * T * N * F + 2 * T * G * (H + V)) * element size, and 8 * T * F for the angles.

    Args:
        query_TNH, key_TGH, value_TGV: may be views of one fused projection; heads are contiguous. Keys and values are
            not modified.
        cosines_TF, sines_TF, is_interleaved: see `rotary`.
        key_cache, value_cache: [num_blocks, G, block_size, H] and [num_blocks, G, block_size, V], in the dtype of the
            keys, or uint8 codes with scales.
        slots_T: [T] int64, distinct: block * block_size + offset, or -1 to store nothing of a token.
        key_scales, value_scales: [num_blocks, G, block_size] bfloat16, contiguous: the caches get 8-bit floats.

    Returns:
        The queries.
    """
    num_tokens, num_heads, head_size = query_TNH.shape
    _, num_kv_heads, value_size = value_TGV.shape
    if num_tokens == 0:
        return query_TNH
    num_pairs = cosines_TF.shape[1]
    sizes = launch_sizes(num_pairs, max(head_size, value_size))
    num_programs = ceil_div(num_heads, sizes["BLOCK_N"]) + ceil_div(num_kv_heads, sizes["BLOCK_N"])
    rotary_with_cache_write_kernel[(num_tokens, num_programs)](
        query_TNH,
        key_TGH,
        value_TGV,
        cosines_TF,
        sines_TF,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        slots_T,
        num_heads,
        num_kv_heads,
        head_size,
        value_size,
        num_pairs,
        key_cache.shape[2],
        *query_TNH.stride()[:2],
        *key_TGH.stride()[:2],
        *value_TGV.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        IS_INTERLEAVED=is_interleaved,
        **sizes,
    )
    return query_TNH


@triton.jit
def _rotate_heads(
    source_ptr,  # [BLOCK_N] pointers to the first number of each head
    target_ptr,  # [BLOCK_N] pointers to the results
    cosines_ptr,  # [F], cosines of this token
    sines_ptr,
    is_head,  # [BLOCK_N]
    num_pairs,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Rotate heads of one token. Source and target may be the same: all numbers are loaded before the first store."""
    pairs = tl.arange(0, BLOCK_F)
    cosines = tl.load(cosines_ptr + pairs, mask=pairs < num_pairs, other=0.0)[None, :]
    sines = tl.load(sines_ptr + pairs, mask=pairs < num_pairs, other=0.0)[None, :]
    dtype = target_ptr.dtype.element_ty
    if IS_INTERLEAVED:
        # Load neighbours together and split them in registers: strided loads would waste half of each access.
        columns = tl.arange(0, 2 * BLOCK_F)[None, :]
        is_inside = is_head[:, None] & (columns < 2 * num_pairs)
        both = tl.load(source_ptr[:, None] + columns, mask=is_inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (BLOCK_N, BLOCK_F, 2)))
        rotated = tl.join(first * cosines - second * sines, second * cosines + first * sines)
        tl.store(target_ptr[:, None] + columns, tl.reshape(rotated, (BLOCK_N, 2 * BLOCK_F)).to(dtype), mask=is_inside)
    else:
        columns = pairs[None, :]
        is_inside = is_head[:, None] & (columns < num_pairs)
        first = tl.load(source_ptr[:, None] + columns, mask=is_inside, other=0.0).to(tl.float32)
        second = tl.load(source_ptr[:, None] + columns + num_pairs, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(target_ptr[:, None] + columns, (first * cosines - second * sines).to(dtype), mask=is_inside)
        rotated = second * cosines + first * sines
        tl.store(target_ptr[:, None] + columns + num_pairs, rotated.to(dtype), mask=is_inside)


@triton.jit
def _copy_heads(
    source_ptr,  # [BLOCK_N] pointers to the first number of each head
    target_ptr,  # [BLOCK_N] pointers
    is_head,  # [BLOCK_N]
    first_column,
    head_size,
    BLOCK_H: tl.constexpr,
):
    """Copy the numbers of each head from first_column on."""
    columns = first_column + tl.arange(0, BLOCK_H)[None, :]
    is_inside = is_head[:, None] & (columns < head_size)
    tl.store(target_ptr[:, None] + columns, tl.load(source_ptr[:, None] + columns, mask=is_inside), mask=is_inside)


@triton.jit
def _encode_heads(source_ptr, target_ptr, scales_ptr, is_head, head_size, BLOCK_H: tl.constexpr):
    """Write heads as 8-bit floats, and their scales."""
    columns = tl.arange(0, BLOCK_H)[None, :]
    is_inside = is_head[:, None] & (columns < head_size)
    numbers = tl.load(source_ptr[:, None] + columns, mask=is_inside, other=0.0).to(tl.float32)
    scales = float8_scales(largest_bits(numbers))
    tl.store(target_ptr[:, None] + columns, encode_float8(numbers, scales), mask=is_inside)
    tl.store(scales_ptr, scales.to(scales_ptr.dtype.element_ty), mask=is_head)


@triton.jit
def _encode_rotated_heads(
    source_ptr,
    target_ptr,
    scales_ptr,  # [BLOCK_N] pointers
    cosines_ptr,
    sines_ptr,
    is_head,
    num_pairs,
    head_size,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Rotate heads of one token, see `_rotate_heads`, and write them as 8-bit floats. They are rounded in between."""
    pairs = tl.arange(0, BLOCK_F)
    cosines = tl.load(cosines_ptr + pairs, mask=pairs < num_pairs, other=0.0)[None, :]
    sines = tl.load(sines_ptr + pairs, mask=pairs < num_pairs, other=0.0)[None, :]
    first_columns = (2 * pairs if IS_INTERLEAVED else pairs)[None, :]
    second_columns = first_columns + (1 if IS_INTERLEAVED else num_pairs)
    is_pair = is_head[:, None] & (pairs < num_pairs)[None, :]
    a = tl.load(source_ptr[:, None] + first_columns, mask=is_pair, other=0.0).to(tl.float32)
    b = tl.load(source_ptr[:, None] + second_columns, mask=is_pair, other=0.0).to(tl.float32)
    dtype = source_ptr.dtype.element_ty
    first = (a * cosines - b * sines).to(dtype).to(tl.float32)
    second = (b * cosines + a * sines).to(dtype).to(tl.float32)
    columns = 2 * num_pairs + tl.arange(0, BLOCK_H)[None, :]
    is_rest = is_head[:, None] & (columns < head_size)
    rest = tl.load(source_ptr[:, None] + columns, mask=is_rest, other=0.0).to(tl.float32)
    bits = tl.maximum(tl.maximum(largest_bits(first), largest_bits(second)), largest_bits(rest))
    scales = float8_scales(bits)
    tl.store(target_ptr[:, None] + first_columns, encode_float8(first, scales), mask=is_pair)
    tl.store(target_ptr[:, None] + second_columns, encode_float8(second, scales), mask=is_pair)
    tl.store(target_ptr[:, None] + columns, encode_float8(rest, scales), mask=is_rest)
    tl.store(scales_ptr, scales.to(scales_ptr.dtype.element_ty), mask=is_head)


@triton.jit
def rotary_kernel(
    heads_ptr,  # [T, N, H]
    cosines_ptr,  # [T, F], contiguous
    sines_ptr,  # [T, F], contiguous
    out_ptr,  # [T, N, H], may be the heads
    num_heads,
    head_size,
    num_pairs,
    heads_token_stride,
    heads_head_stride,
    out_token_stride,
    out_head_stride,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # token * stride can exceed 2**31
    heads = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_head = heads < num_heads
    source = heads_ptr + token * heads_token_stride + heads * heads_head_stride
    target = out_ptr + token * out_token_stride + heads * out_head_stride
    angles = token * num_pairs
    _rotate_heads(
        source, target, cosines_ptr + angles, sines_ptr + angles, is_head, num_pairs, IS_INTERLEAVED, BLOCK_N, BLOCK_F
    )
    if BLOCK_H > 0:
        _copy_heads(source, target, is_head, 2 * num_pairs, head_size, BLOCK_H)


@triton.jit
def rotary_with_cache_write_kernel(
    query_ptr,  # [T, N, H]
    key_ptr,  # [T, G, H]
    value_ptr,  # [T, G, V]
    cosines_ptr,  # [T, F], contiguous
    sines_ptr,  # [T, F], contiguous
    key_cache_ptr,  # [num_blocks, G, block_size, H]
    value_cache_ptr,  # [num_blocks, G, block_size, V]
    key_scales_ptr,  # [num_blocks, G, block_size], or None
    value_scales_ptr,
    slots_ptr,  # [T] int64
    num_heads,
    num_kv_heads,
    head_size,
    value_size,
    num_pairs,
    block_size,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_cache_block_stride,
    key_cache_head_stride,
    key_cache_offset_stride,
    value_cache_block_stride,
    value_cache_head_stride,
    value_cache_offset_stride,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # token * stride can exceed 2**31
    program = tl.program_id(1)
    num_query_programs = tl.cdiv(num_heads, BLOCK_N)
    cosines_ptr += token * num_pairs
    sines_ptr += token * num_pairs
    if program < num_query_programs:
        heads = (program * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        queries = query_ptr + token * query_token_stride + heads * query_head_stride
        is_head = heads < num_heads
        _rotate_heads(queries, queries, cosines_ptr, sines_ptr, is_head, num_pairs, IS_INTERLEAVED, BLOCK_N, BLOCK_F)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            block, offset = slot // block_size, slot % block_size
            heads = ((program - num_query_programs) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
            is_head = heads < num_kv_heads
            keys = key_ptr + token * key_token_stride + heads * key_head_stride
            key_targets = key_cache_ptr + block * key_cache_block_stride + offset * key_cache_offset_stride
            key_targets += heads * key_cache_head_stride
            values = value_ptr + token * value_token_stride + heads * value_head_stride
            value_targets = value_cache_ptr + block * value_cache_block_stride + offset * value_cache_offset_stride
            value_targets += heads * value_cache_head_stride
            if key_scales_ptr is None:
                _rotate_heads(
                    keys, key_targets, cosines_ptr, sines_ptr, is_head, num_pairs, IS_INTERLEAVED, BLOCK_N, BLOCK_F
                )
                _copy_heads(keys, key_targets, is_head, 2 * num_pairs, head_size, BLOCK_H)
                _copy_heads(values, value_targets, is_head, 0, value_size, BLOCK_H)
            else:
                scale_offsets = (block * num_kv_heads + heads) * block_size + offset
                _encode_rotated_heads(
                    keys,
                    key_targets,
                    key_scales_ptr + scale_offsets,
                    cosines_ptr,
                    sines_ptr,
                    is_head,
                    num_pairs,
                    head_size,
                    IS_INTERLEAVED,
                    BLOCK_F,
                    BLOCK_H,
                )
                _encode_heads(values, value_targets, value_scales_ptr + scale_offsets, is_head, value_size, BLOCK_H)
