"""RMSNorm in Triton's interpreter, alone, in place and after an addition, compared with torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeserve.ops.rows import reference as elementwise
from moeserve.triton_kernels.fp8 import quantize_blocks
from moeserve.triton_kernels.rms_norm import add_rms_norm, quantize_rms_norm, rms_norm, rms_norm_in_place

CASES = [
    ((1, 1), "contiguous"),
    ((5, 333), "contiguous"),
    ((2, 4097), "contiguous"),
    ((41, 8), "contiguous"),
    ((2, 3, 2, 40), "contiguous"),
    ((0, 64), "contiguous"),
    ((6, 200), "row slices"),
    ((5, 3, 64), "heads of a projection"),
    ((5, 3, 64), "parts of heads"),
    ((2, 64), "zeros"),
]
DTYPES = [torch.float32, torch.float16]
TYPED_CASES = [(*case, DTYPES[place % 2]) for place, case in enumerate(CASES)]


def drawn(shape: tuple[int, ...], layout: str, dtype: torch.dtype, seed: int) -> Tensor:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    match layout:
        case "row slices":
            return draw(shape[0], 2 * shape[1])[:, 8 : 8 + shape[1]]
        case "heads of a projection":
            return draw(shape[0], (shape[1] + 2) * shape[2])[:, shape[2] : -shape[2]].unflatten(1, shape[1:])
        case "parts of heads":
            return draw(*shape[:2], shape[2] + 7)[..., 7:]
        case "zeros":
            return torch.zeros(shape, dtype=dtype)
    return draw(*shape)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Both round at the same places. Only the order of the sum differs, which rarely changes a float16."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = (actual.float() - expected.float()).abs() / (1 + expected.float().abs())
    assert not (error > {torch.float32: 1e-6, torch.float16: 1e-3}[actual.dtype]).any()
    assert actual.dtype == torch.float32 or (actual != expected).float().sum() <= 0.01 * actual.numel()


@pytest.mark.parametrize(("shape", "layout", "dtype"), TYPED_CASES, ids=str)
def test_alone_after_an_addition_and_in_place(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    x, update = drawn(shape, layout, dtype, 0), drawn(shape, "contiguous", dtype, 1)
    weight = drawn(shape[-1:], "contiguous", dtype, 2)
    whole = x if x._base is None else x._base  # with the numbers beside the view
    before = whole.clone(), update.clone()
    normed = rms_norm(x, weight, 1e-5)
    total, normed_total = add_rms_norm(x, update, weight, 1e-5)
    assert normed.is_contiguous()
    assert total.is_contiguous()
    assert torch.equal(whole, before[0])
    assert torch.equal(update, before[1])
    assert_close(normed, elementwise.rms_norm(x, weight, 1e-5))
    assert torch.equal(total, x + update)
    assert_close(normed_total, elementwise.rms_norm(total, weight, 1e-5))

    rms_norm_in_place(x, weight, 1e-5)
    assert torch.equal(x, normed)
    x.zero_()
    assert int((whole != 0).sum()) == int((before[0] != 0).sum()) - int((normed != 0).sum())


def test_result_of_a_row_does_not_depend_on_the_batch() -> None:
    for width in (40, 1000):
        x_TD = drawn((30, width), "contiguous", torch.float32, 0)
        weight_D = drawn((width,), "contiguous", torch.float32, 1)
        together_TD = rms_norm(x_TD, weight_D, 1e-5)
        for first, last in ((0, 1), (7, 8), (3, 20)):
            assert torch.equal(rms_norm(x_TD[first:last], weight_D, 1e-5), together_TD[first:last])


def test_nan_stays_in_its_row() -> None:
    x_TD = drawn((6, 50), "contiguous", torch.float32, 0)
    x_TD[2, 7] = float("nan")
    normed_TD = rms_norm(x_TD, torch.ones(50), 1e-5)
    assert normed_TD.isnan().all(-1).tolist() == [row == 2 for row in range(6)]
    assert normed_TD.isfinite().all(-1).tolist() == [row != 2 for row in range(6)]


@pytest.mark.parametrize("width", [64, 300, 1000, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("torch_conversions")
def test_quantised_rows_have_the_bytes_of_two_operations(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    x_TD, update_TD = (torch.randn(5, width, generator=generator).mul(3).to(dtype) for _ in range(2))
    weight_D = torch.randn(width, generator=generator).to(dtype)
    for update, keeps_rows in ((update_TD, True), (update_TD, False), (None, False)):
        sum_TD, normed_TD = (
            (x_TD, rms_norm(x_TD, weight_D, 1e-5)) if update is None else add_rms_norm(x_TD, update, weight_D, 1e-5)
        )
        codes_TD, scales_TB = quantize_blocks(normed_TD)
        given = quantize_rms_norm(x_TD, update, weight_D, 1e-5, keeps_rows)
        assert torch.equal(given.sum_TD, sum_TD)
        assert torch.equal(given.codes_TD.view(torch.uint8), codes_TD.view(torch.uint8))
        assert torch.equal(given.scales_TB, scales_TB)
        assert (given.rows_TD is not None) == keeps_rows
        assert given.rows_TD is None or torch.equal(given.rows_TD, normed_TD)
