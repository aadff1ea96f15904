"""Quantisation to 8-bit blocks in Triton's interpreter, compared with torch's conversion to E4M3.

Torch's conversion replaces the interpreter's, which is wrong. tests/kernels/test_sm90_rows.py checks that the compiled
kernel converts with the GPU's instruction.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.triton_kernels import fp8
from moeserve.triton_kernels.activation import activate
from moeserve.triton_kernels.fp8 import quantize_blocks

# T tokens, D width of a row, B blocks of a row

FP8 = torch.float8_e4m3fn
pytestmark = pytest.mark.usefixtures("torch_conversions")


def reference_quantize(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales."""
    num_rows, width = x_TD.shape
    num_blocks = -(-width // 128)
    padded = torch.zeros(num_rows, num_blocks * 128)
    padded[:, :width] = x_TD.float()
    blocks_TBd = padded.view(num_rows, num_blocks, 128)
    largest_TB1 = blocks_TBd.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scaled_TD = (blocks_TBd * (448.0 / largest_TB1)).view(padded.shape)[:, :width].clamp(-448, 448)
    return scaled_TD.to(FP8), largest_TB1[..., 0] / 448.0


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1), torch.float32),
        ((3, 128), torch.float16),
        ((2, 129), torch.float16),
        ((2, 16 * 128 + 5), torch.float32),
        ((0, 128), torch.float32),
        ((3, 0), torch.float16),
    ],
    ids=str,
)
def test_codes_and_scales_equal_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    wide = torch.randn(shape[0], shape[1] + 9, generator=generator)
    sizes = 10 ** (torch.rand(shape[0], 1, generator=generator) * 6 - 4)
    x_TD = (wide * sizes).to(dtype)[:, 9:]  # strided rows
    codes_TD, scales_TB = quantize_blocks(x_TD)
    expected_TD, expected_scales_TB = reference_quantize(x_TD)
    assert codes_TD.dtype == FP8
    assert torch.equal(scales_TB, expected_scales_TB)
    assert torch.equal(bits(codes_TD), bits(expected_TD))


def test_rounding_to_nearest_with_ties_to_even() -> None:
    """Quantise every code and every midpoint of two codes. With 448 in the block, the scale is one."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    midpoints = (codes[:-1] + codes[1:]) / 2
    for numbers in (codes, midpoints, -codes, -midpoints):
        x_TD = torch.cat([numbers, torch.tensor([448.0])])[None]
        codes_TD, scales_TB = quantize_blocks(x_TD)
        assert scales_TB.tolist() == [[1.0]]
        assert torch.equal(bits(codes_TD), bits(x_TD.to(FP8)))


def test_zeros_and_denormal_numbers_become_zeros() -> None:
    x_TD = torch.zeros(2, 300)
    x_TD[1] = 1e-40
    codes_TD, scales_TB = quantize_blocks(x_TD)
    assert scales_TB.isfinite().all()
    assert (scales_TB > 0).all()
    assert not codes_TD.float().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_affect_their_block_only(bad: float) -> None:
    x_TD = torch.ones(2, 384)
    x_TD[1, 130] = bad
    codes_TD, scales_TB = quantize_blocks(x_TD)
    numbers_TD = codes_TD.float() * scales_TB.repeat_interleave(128, 1)
    assert numbers_TD[1, 130].isnan()
    numbers_TD[1, 128:256] = 1.0
    assert torch.equal(numbers_TD, torch.ones(2, 384))


@pytest.mark.parametrize("num_slots", [None, 4])
@pytest.mark.parametrize("activation", [None, "swiglu", "clamped_swiglu", "squared_relu"])
def test_only_rows_that_count_are_quantised(
    num_slots: int | None, activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written for other rows, nor does a program visit them."""
    monkeypatch.setattr(fp8, "MAX_PROGRAMS", 2)  # each has several rows
    counts = [3, 0, 1, 4] if num_slots else [3, 0, 2]
    num_rows = num_slots * len(counts) if num_slots else 20
    x_TD = torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(1)).half()
    if num_slots:
        counted = [expert * num_slots + slot for expert, count in enumerate(counts) for slot in range(count)]
    else:
        counted = list(range(sum(counts)))
    others = [row for row in range(num_rows) if row not in counted]
    activated_TC = x_TD if activation is None else activate(x_TD, activation)
    expected_TC, expected_TB = reference_quantize(activated_TC)
    x_TD[others] = torch.nan
    scales_TB = torch.full_like(expected_TB, -1)
    codes_TC, _ = quantize_blocks(
        x_TD, counts_e=torch.tensor(counts), num_slots=num_slots, activation=activation, out_scale_TB=scales_TB
    )
    assert torch.equal(bits(codes_TC)[counted], bits(expected_TC)[counted])
    assert torch.equal(scales_TB[counted], expected_TB[counted])
    assert (scales_TB[others] == -1).all()
