"""Gated activations in Triton's interpreter, compared with the functions of the models."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeserve.ops.rows.activations import ClampedSwiGLU, CutSwiGLU, LimitedSwiGLU, SquaredReLU, SwiGLU
from moeserve.triton_kernels.activation import activate

GPT_OSS = dict(alpha=1.702, limit=7.0)
SHAPES = [(1, 2), (2, 2 * 1024), (4, 2 * 1500), (2, 3, 20), (0, 64), (5, 0)]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Both round at the same places. Exponentials may differ in the last bit, which rarely changes a float16."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.is_contiguous()
    rtol = {torch.float32: 2e-6, torch.float16: 2e-3}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6, equal_nan=True)
    differing = (actual != expected) & ~(actual.isnan() & expected.isnan())
    assert actual.dtype == torch.float32 or differing.sum() <= 0.01 * actual.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_equal_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 6).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(activate(gate_up, "swiglu"), SwiGLU()(gate, up))
    assert_close(activate(gate_up, "clamped_swiglu", **GPT_OSS), ClampedSwiGLU(**GPT_OSS)(gate, up))
    assert_close(activate(gate_up, "limited_swiglu", limit=1.3), LimitedSwiGLU(1.3)(gate, up))
    assert_close(activate(gate_up, "cut_swiglu", limit=1.3), CutSwiGLU(1.3)(gate, up))
    assert_close(activate(gate_up, "squared_relu"), SquaredReLU()(gate_up))


def test_strided_rows() -> None:
    wide = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(activate(wide[:, 10:50], "swiglu"), activate(wide[:, 10:50].contiguous(), "swiglu"))


def test_extremes_equal_torch() -> None:
    numbers = [0.0, -0.0, 7.0, -7.0, 7.5, -7.5, 90.0, -90.0, 1e30, -1e30, math.inf, -math.inf, math.nan]
    gate = torch.tensor([gate for gate in numbers for _ in numbers])
    up = torch.tensor(numbers * len(numbers))
    gate_up = torch.cat([gate, up])[None]
    for actual, expected in (
        (activate(gate_up, "swiglu")[0], SwiGLU()(gate, up)),
        (activate(gate_up, "clamped_swiglu", **GPT_OSS)[0], ClampedSwiGLU(**GPT_OSS)(gate, up)),
        (activate(gate_up, "limited_swiglu", limit=7.0)[0], LimitedSwiGLU(7.0)(gate, up)),
        (activate(gate_up, "cut_swiglu", limit=7.0)[0], CutSwiGLU(7.0)(gate, up)),
        (activate(gate_up, "squared_relu")[0], SquaredReLU()(gate_up[0])),
    ):
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-30, equal_nan=True)
