"""8-bit floats of the GPU in Triton's interpreter, against torch's own conversions.

Torch's conversions stand in for the interpreter's, which are wrong. What is tested is all else: blocks, scales, bounds.
That the compiled kernel converts by the GPU's instruction is tested in tests/kernels/test_sm90_rows.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeserve.models.quantization import decode_fp8
from moeserve.triton_kernels.fp8 import dequantize_blocks, dequantize_weight_blocks, quantize_blocks

# T tokens, D width of a row, B blocks of a row; O and I: rows and columns of a weight

FP8 = torch.float8_e4m3fn
pytestmark = pytest.mark.usefixtures("conversions_of_torch")


def reference_quantize(x_TD: Tensor, block: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and what the codes were before they were rounded."""
    num_rows, width = x_TD.shape
    num_blocks = -(-width // block)
    padded = torch.zeros(num_rows, num_blocks * block)
    padded[:, :width] = x_TD.float()
    largest_TB1 = padded.view(num_rows, num_blocks, block).abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scaled = padded.view(num_rows, num_blocks, block) * (448.0 / largest_TB1)
    scaled_TD = scaled.view(num_rows, num_blocks * block)[:, :width].clamp(-448, 448)
    return scaled_TD.to(FP8), largest_TB1[..., 0] / 448.0, scaled_TD


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 128), (2, 129), (4, 300), (2, 16 * 128 + 5), (0, 128), (3, 0)], ids=str)
def test_codes_and_scales_are_the_references(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    wide = torch.randn(shape[0], shape[1] + 9, generator=generator)
    sizes = 10 ** (torch.rand(shape[0], 1, generator=generator) * 6 - 4)
    x_TD = (wide * sizes).to(dtype)[:, 9:]
    codes_TD, scales_TB = quantize_blocks(x_TD)
    assert codes_TD.dtype == FP8
    expected_TD, expected_scales_TB, scaled_TD = reference_quantize(x_TD)
    assert torch.equal(scales_TB, expected_scales_TB)
    assert torch.equal(bits(codes_TD), bits(expected_TD))
    # A code has 3 bits after its first, and below 2**-6 steps of 2**-9.
    assert ((codes_TD.float() - scaled_TD).abs() <= torch.clamp(scaled_TD.abs() / 16, min=2**-10)).all()


def test_rounds_to_the_nearest_and_between_two_to_even() -> None:
    """Every code, and every middle of two: with 448 in the block, the scale is one."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (codes[:-1] + codes[1:]) / 2
    for numbers in (codes, middles, -codes, -middles):
        x_TD = torch.cat([numbers, torch.tensor([448.0])])[None]
        codes_TD, scales_TB = quantize_blocks(x_TD)
        assert scales_TB.tolist() == [[1.0]]
        assert torch.equal(bits(codes_TD), bits(x_TD.to(FP8)))


def test_zeros_stay_zeros_and_next_to_nothing_is_no_nan() -> None:
    x_TD = torch.zeros(2, 300)
    x_TD[1] = 1e-40
    codes_TD, scales_TB = quantize_blocks(x_TD)
    assert scales_TB.isfinite().all()
    assert (scales_TB > 0).all()
    assert torch.equal(dequantize_blocks(codes_TD, scales_TB, torch.float32), torch.zeros(2, 300))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_spoils_its_block_alone(bad: float) -> None:
    x_TD = torch.ones(2, 384)
    x_TD[1, 130] = bad
    codes_TD, scales_TB = quantize_blocks(x_TD)
    numbers_TD = dequantize_blocks(codes_TD, scales_TB, torch.float32)
    assert numbers_TD[1, 130].isnan()
    numbers_TD[1, 128:256] = 1.0
    assert torch.equal(numbers_TD, torch.ones(2, 384))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (70, 300), (33, 128), (0, 5), (5, 0)], ids=str)
def test_numbers_are_codes_times_scales(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    codes_TD = torch.randn(shape[0], shape[1] + 3, generator=generator).mul(100).to(FP8)[:, 3:]
    scales_TB = torch.rand(shape[0], -(-shape[1] // 128), generator=generator)
    expected_TD = codes_TD.float() * scales_TB.repeat_interleave(128, dim=1)[:, : shape[1]]
    assert torch.equal(dequantize_blocks(codes_TD, scales_TB, dtype), expected_TD.to(dtype))


def test_there_and_back() -> None:
    x_TD = torch.randn(5, 500, generator=torch.Generator().manual_seed(0))
    back_TD = dequantize_blocks(*quantize_blocks(x_TD), torch.float32)
    assert ((back_TD - x_TD).abs() <= x_TD.abs() / 15 + x_TD.abs().max() * 2**-9 / 448).all()


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 257), (300, 90), (0, 128)], ids=str)
def test_weights_are_the_checkpoints(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    codes_OI = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    codes_OI[(codes_OI & 0x7F) == 0x7F] = 0  # NaN, which checkpoints are refused for
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator)
    expected_OI = decode_fp8(codes_OI, scale[torch.arange(shape[0]) // 128], 128)
    assert torch.equal(dequantize_weight_blocks(codes_OI.view(FP8), scale, torch.float32), expected_OI)
    assert torch.equal(dequantize_weight_blocks(codes_OI.view(FP8), scale), expected_OI.bfloat16())
