"""Rotary embedding in Triton's interpreter, alone and with the cache write, compared with torch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moeserve.ops.attention.float8_rows import encode_rows
from moeserve.ops.rows.interface import Rotation
from moeserve.ops.rows.reference import apply_rope
from moeserve.triton_kernels.rotary import rotary, rotary_with_cache_write

# T tokens, N query heads, G key-value heads, H head size, F rotated pairs

DTYPES = [torch.float32, torch.float16]
HEADS = [(1, 1, 2, 1), (3, 5, 16, 8), (4, 3, 24, 5), (2, 33, 8, 2), (1, 4, 96, 48), (0, 4, 8, 4)]
TYPED_HEADS = [(shape, DTYPES[place % 2]) for place, shape in enumerate(HEADS)]


def angles(num_tokens: int, num_pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    angles_TF = torch.randn(num_tokens, num_pairs, generator=generator) * 10
    return angles_TF.cos(), angles_TF.sin()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Both compute in float32 and round once. They differ only in fused multiply-adds."""
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(
        actual, expected, rtol={torch.float32: 1e-6, torch.float16: 1e-3}[actual.dtype], atol=1e-6
    )


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), TYPED_HEADS, ids=str)
def test_rotation_in_place_and_to_an_output(shape: tuple[int, ...], is_interleaved: bool, dtype: torch.dtype) -> None:
    num_tokens, num_heads, head_size, num_pairs = shape
    generator = torch.Generator().manual_seed(sum(shape))
    wide_TNH = torch.randn(num_tokens, num_heads + 2, head_size + 3, generator=generator).to(dtype)
    heads_TNH = wide_TNH[:, 1:-1, 3:]
    cosines_TF, sines_TF = angles(num_tokens, num_pairs, generator)
    expected_TNH = apply_rope(heads_TNH, Rotation(cosines_TF, sines_TF, is_interleaved))
    before = wide_TNH.clone()

    wide_out = torch.full((num_tokens, num_heads, head_size + 5), 7.0, dtype=dtype)
    out_TNH = rotary(heads_TNH, cosines_TF, sines_TF, is_interleaved, wide_out[..., :head_size])
    assert_close(out_TNH, expected_TNH)
    assert (wide_out[..., head_size:] == 7.0).all()
    assert torch.equal(wide_TNH, before)

    rotated_TNH = rotary(heads_TNH, cosines_TF, sines_TF, is_interleaved)
    assert rotated_TNH.data_ptr() == heads_TNH.data_ptr()
    assert torch.equal(rotated_TNH, out_TNH)
    rotated_TNH.copy_(before[:, 1:-1, 3:])
    assert torch.equal(wide_TNH, before)  # numbers beside the heads are unchanged

    assert torch.equal(rotary(heads_TNH, cosines_TF, sines_TF, is_interleaved, heads_TNH), out_TNH)


@pytest.mark.parametrize("seed", range(6))
def test_rotation_with_cache_write(seed: int) -> None:
    dtype = DTYPES[seed // 2 % 2]
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_tokens, num_kv_heads = [0, 1, 3, 6][seed % 4], draw.choice([1, 2, 5])
    num_heads = num_kv_heads * draw.choice([1, 3, 8])
    head_size, block_size = draw.choice([8, 20, 64]), draw.choice([1, 4, 16])
    num_pairs = draw.choice([head_size // 2, head_size // 4])
    is_interleaved = seed % 2 == 0
    num_blocks = num_tokens + 2
    # Queries, keys and values are views of one fused projection; some values are smaller.
    value_size = head_size - 3 * (seed % 3 == 1)
    fused = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_size, generator=generator).to(dtype)
    fused_heads = fused.unflatten(1, (-1, head_size))
    query, key, value = fused_heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    value = value[..., :value_size]
    cosines_TF, sines_TF = angles(num_tokens, num_pairs, generator)
    slots_T = torch.tensor(draw.sample(range(num_blocks * block_size), num_tokens), dtype=torch.int64)
    slots_T[:1] = -1
    shape = (num_blocks, num_kv_heads, block_size)
    caches = (torch.randn(*shape, size, generator=generator).to(dtype) for size in (head_size, value_size))
    key_cache, value_cache = caches
    expected_keys, expected_values = key_cache.clone(), value_cache.clone()
    expected_query = apply_rope(query, Rotation(cosines_TF, sines_TF, is_interleaved))
    rotated_key = apply_rope(key, Rotation(cosines_TF, sines_TF, is_interleaved))
    for token, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            expected_keys[slot // block_size, :, slot % block_size] = rotated_key[token]
            expected_values[slot // block_size, :, slot % block_size] = value[token]
    before = fused.clone()
    actual = rotary_with_cache_write(
        query, key, value, cosines_TF, sines_TF, is_interleaved, key_cache, value_cache, slots_T
    )
    assert actual.data_ptr() == query.data_ptr()
    assert_close(actual, expected_query)
    assert_close(key_cache, expected_keys)
    assert torch.equal(value_cache, expected_values)
    assert torch.equal(fused[:, num_heads * head_size :], before[:, num_heads * head_size :])


@pytest.mark.slow_but("dtype0-True-24", "dtype1-False-20")
@pytest.mark.usefixtures("torch_conversions")
@pytest.mark.parametrize(("head_size", "num_pairs"), [(20, 10), (24, 8), (64, 32)])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_8_bit_floats_gets_the_references_bytes(
    head_size: int, num_pairs: int, is_interleaved: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(head_size)
    query, key, value = torch.randn(3, 7, 3, head_size, generator=generator)
    key *= torch.exp(2 * torch.randn(key.shape, generator=generator))
    key[1], value[2] = 0, 1e-6
    key[3, 1, -1], key[3, 2, 0], value[4, 0, 5] = float("nan"), float("inf"), float("-inf")
    query, key, value = (heads.to(dtype) for heads in (query, key, value))
    slots = torch.tensor([3, 9, 4, 0, 15, -1, 8])
    inputs = query, key, value, *angles(7, num_pairs, generator), is_interleaved
    plain = torch.zeros(2, 4, 3, 4, head_size, dtype=dtype)
    rotary_with_cache_write(*(each.clone() if isinstance(each, Tensor) else each for each in inputs), *plain, slots)

    codes, scales = torch.zeros(plain.shape, dtype=torch.uint8), torch.zeros(plain.shape[:-1], dtype=torch.bfloat16)
    rotary_with_cache_write(*inputs, *codes, slots, *scales)
    expected_codes, expected_scales = encode_rows(plain)
    is_written = torch.zeros(16, dtype=torch.bool).scatter_(0, slots[slots >= 0], True).view(4, 4)[:, None]
    is_written = is_written.expand(2, 4, 3, 4)
    assert torch.equal(codes[is_written], expected_codes[is_written])
    torch.testing.assert_close(scales[is_written], expected_scales[is_written], rtol=0, atol=0, equal_nan=True)
    assert int(scales.isnan().sum()) == 3
    assert not codes[~is_written].any()
