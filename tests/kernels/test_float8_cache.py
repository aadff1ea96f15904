"""The KV cache of 8-bit floats: the format of rows, writes, and attention in torch and in C++."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

import pytest
import torch
from attention_cases import Case, Shape, attend, attention_shape, expected_attention, make_case, random_case, with_step
from paged_steps import (
    NATIVE,
    drawn_chunks,
    make_step,
    rounds_weights,
    same_bytes,
    settings_restored,
    within_bfloat16_rounding,
)
from torch import Tensor

from moeserve.ops import attention as attention_ops
from moeserve.ops.attention.float8_rows import decode_rows, encode_rows
from moeserve.ops.attention.interface import KeyValueCache
from moeserve.ops.backend import REFERENCE, Backend
from moeserve.ops.native import set_num_threads

CODES = torch.arange(256, dtype=torch.uint8)
# All numbers of E4M3 by the definition of the format: sign, 4 bits of exponent with bias 7, 3 bits of fraction.
NUMBERS = torch.tensor(
    [
        math.copysign((8 * (code >> 3 & 15 > 0) + code % 8) * 2.0 ** (max(code >> 3 & 15, 1) - 10), 0.5 - (code > 127))
        for code in range(256)
    ],
    dtype=torch.float64,
)


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    with settings_restored():
        yield


@pytest.fixture
def backend(implementation: str) -> Backend:
    return REFERENCE if implementation == "torch" else NATIVE


@pytest.fixture
def native(isa: str) -> Backend:
    return NATIVE


def drawn_rows(num_rows: int, head_size: int, dtype: torch.dtype) -> Tensor:
    """Return rows [T, 2, H] of many magnitudes, with numbers of many magnitudes in each."""
    generator = torch.Generator().manual_seed(num_rows + head_size)
    rows = torch.randn(num_rows, 2, head_size, generator=generator)
    rows *= torch.exp(3 * torch.randn(rows.shape, generator=generator))
    return (rows * torch.logspace(-25, -2, num_rows)[:, None, None]).to(dtype)


def nearest_numbers(rows_XH: Tensor) -> Tensor:
    """Round rows to the format in float64, by looking for the nearest of all numbers, ties to even codes."""
    scale_X1 = rows_XH.double().abs().amax(-1, keepdim=True) / 448
    fraction, exponent = torch.frexp(scale_X1)
    scale_X1 = torch.ldexp(torch.ceil(fraction * 16) / 16, exponent)
    usable = (CODES % 128 >= 8) & (CODES % 128 < 127) | (CODES == 0)
    numbers, order = NUMBERS[usable].sort()
    even = CODES[usable][order] % 2 == 0
    scaled_XH = rows_XH.double() / scale_X1
    above = torch.searchsorted(numbers, scaled_XH.contiguous()).clamp(1, len(numbers) - 1)
    below = above - 1
    to_above, to_below = numbers[above] - scaled_XH, scaled_XH - numbers[below]
    is_above = (to_above < to_below) | ((to_above == to_below) & even[above])
    rounded_XH = torch.where(is_above, numbers[above], numbers[below])
    return torch.where(scaled_XH.abs() < 2**-6, 0, rounded_XH) * scale_X1


def float8_cache(backend: Backend, case: Case) -> KeyValueCache:
    """Return a cache with the keys and values of a case, written by these kernels, and other bytes where none are."""
    codes = (torch.full(cache.shape, 0xFF, dtype=torch.uint8) for cache in (case.key_cache, case.value_cache))
    scales = (torch.full(case.key_cache.shape[:3], math.nan, dtype=torch.bfloat16) for _ in range(2))
    cache = KeyValueCache(*codes, *scales)
    whole = [(len(keys), len(keys)) for keys in case.keys_CGH]
    step = make_step(whole, case.step.block_table.tolist(), case.key_cache.shape[2])
    attention = attention_ops.make(backend, attention_shape(case.shape, case.query_TNH.dtype))
    attention.write(torch.cat(case.keys_CGH), torch.cat(case.values_CGL), cache, step)  # type: ignore[attr-defined]
    return cache


def attend_float8(backend: Backend, case: Case, cache: KeyValueCache) -> Tensor:
    attention = attention_ops.make(backend, attention_shape(case.shape, case.query_TNH.dtype))
    return attention.attend(case.query_TNH, cache, case.step, case.sinks_N)


def rounded(case: Case) -> Case:
    """Return the case with keys and values that are rounded to the format, without a cache."""
    keys, values = (
        [nearest_numbers(rows).to(rows.dtype) for rows in each] for each in (case.keys_CGH, case.values_CGL)
    )
    return dataclasses.replace(case, keys_CGH=keys, values_CGL=values)


def test_numbers_are_torchs() -> None:
    expected = CODES.view(torch.float8_e4m3fn).double()
    assert torch.equal(NUMBERS[CODES % 128 < 127], expected[CODES % 128 < 127])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_to_the_nearest_code(dtype: torch.dtype) -> None:
    rows = drawn_rows(300, 64, dtype)
    codes, scales = encode_rows(rows)
    actual = decode_rows(codes, scales, torch.float64)
    # The quotient is rounded to float32 before it is rounded to a code.
    assert ((actual - rows).abs() <= (nearest_numbers(rows) - rows).abs() + rows.abs() * 2**-22).all()
    assert torch.equal(actual, actual.bfloat16().double()), "numbers are exact in bfloat16"
    assert ((actual - rows).abs().amax(-1) <= rows.abs().amax(-1) / 24).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [1, 20, 33, 64, 80, 128])
def test_written_bytes_are_the_references(native: Backend, head_size: int, dtype: torch.dtype) -> None:
    rows = drawn_rows(300, head_size, dtype)
    rows[5] = 0
    rows[6] = 3e38
    for place, wrong in enumerate((math.nan, math.inf, -math.inf)):
        rows[10 + place, 1, head_size // 2] = wrong
    wide = torch.stack([rows, rows.flip(0)], dim=1)  # neither tokens nor heads are contiguous
    case = make_case([(300, 300)], Shape(2, 2, head_size), dtype=dtype)
    case = dataclasses.replace(case, keys_CGH=[wide[:, 0]], values_CGL=[wide[:, 1]])
    actual, expected = float8_cache(native, case), float8_cache(REFERENCE, case)
    for found, wanted in zip(actual.tensors, expected.tensors, strict=True):
        assert same_bytes(found, wanted)
    scales = encode_rows(rows)[1]
    assert scales[10:13, 1].isnan().all()
    assert int(scales.isnan().sum()) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [30, 31, 32, 34])
def test_attention_over_rounded_keys_and_values(backend: Backend, seed: int, dtype: torch.dtype) -> None:
    case = rounded(random_case(seed, dtype, is_latent=False)[0])
    expected, spread = expected_attention(case)
    actual = attend_float8(backend, case, float8_cache(backend, random_case(seed, dtype, is_latent=False)[0]))
    assert actual.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-5)
    elif backend is REFERENCE:  # torch's own attention rounds between its steps as it likes
        torch.testing.assert_close(actual.double(), expected, atol=2e-2, rtol=2e-2)
    else:
        assert within_bfloat16_rounding(actual, expected, spread if rounds_weights() else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [Shape(6, 2, 64), Shape(8, 2, 64, window=150, with_sinks=True), Shape(1, 1, 33), Shape(4, 2, 128)]
)
def test_bytes_are_those_of_a_cache_of_the_rounded_numbers(native: Backend, shape: Shape, dtype: torch.dtype) -> None:
    """In steps of any chunks and with any number of threads: nothing else depends on the format of the cache."""
    lengths = [(530, 530), (150, 150), (45, 45)]
    case = make_case(lengths, shape, dtype=dtype)
    keys, values = (
        [decode_rows(*encode_rows(rows), dtype) for rows in each] for each in (case.keys_CGH, case.values_CGL)
    )
    plain = make_case(lengths, shape, dtype=dtype)
    for ids, of_keys, of_values in zip(case.step.block_table, keys, values, strict=True):
        for p in range(len(of_keys)):
            plain.key_cache[ids[p // 16], :, p % 16] = of_keys[p]
            plain.value_cache[ids[p // 16], :, p % 16] = of_values[p]
    expected = attend(native, plain)
    cache = float8_cache(native, case)
    assert same_bytes(attend_float8(native, case, cache), expected)
    draw = random.Random(0)
    for chunks, rows in drawn_chunks(case.step.spans, draw):
        set_num_threads(draw.choice([1, 2, 3]))
        assert same_bytes(attend_float8(native, with_step(case, chunks, rows), cache), expected[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", ["key_scales", "value_scales"])
def test_a_row_of_nan_reaches_only_rows_that_attend_to_it(native: Backend, scales: str, dtype: torch.dtype) -> None:
    case = make_case([(300, 300)], Shape(6, 2, 64, window=120), dtype=dtype)
    cache = float8_cache(native, case)
    expected = attend_float8(native, case, cache)
    position = 141  # shares a tile with the row before it
    getattr(cache, scales)[int(case.step.block_table[0, position // 16]), 1, position % 16] = math.nan
    actual = attend_float8(native, case, cache)
    assert actual[position : position + 120, 3:].isnan().all()
    assert same_bytes(actual[:, :3], expected[:, :3])
    assert same_bytes(actual[:position], expected[:position])
    assert same_bytes(actual[position + 120 :], expected[position + 120 :])
