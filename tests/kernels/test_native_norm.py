"""RMSNorm in C++ with each instruction set, alone and after an addition: its numbers, and who can change a byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from paged_steps import (
    INSTRUCTION_SETS,
    KERNELS,
    kernels,
    needs_kernels,
    same_bytes,
    settings_restored,
    use_instruction_set,
)
from torch import Tensor

from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch.table import TORCH_KERNELS

# T tokens, N heads, H head size, D width of a row

DTYPES = [torch.float32, torch.bfloat16]
EPSILON = 1e-5


@pytest.fixture(autouse=True, params=INSTRUCTION_SETS)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with settings_restored():
        use_instruction_set(request.param)
        yield


def exactly(x: Tensor, weight: Tensor) -> Tensor:
    """In float64."""
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def assert_is_norm(actual: Tensor, x: Tensor, weight: Tensor) -> None:
    assert actual.dtype == x.dtype
    assert actual.shape == x.shape
    if x.dtype == torch.float32:
        torch.testing.assert_close(actual.double(), exactly(x, weight), atol=1e-6, rtol=1e-6)
    else:
        # Both round at the same two places, so only the order of the sum differs: rarely, a number lands a step away.
        expected = TORCH_KERNELS.rms_norm(x, weight, EPSILON)
        torch.testing.assert_close(actual.double(), expected.double(), atol=1e-6, rtol=2**-7)
        assert actual.numel() == 0 or (actual != expected).float().mean() <= 0.01


def random_rows(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [T, D] or heads [T, N, H], some of them views, and a weight."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width = draw.choice([1, 3, 8, 15, 16, 31, 32, 33, 64, 80, 128, 200, 1024, 1037])
    weight = torch.randn(width).to(dtype)
    num_tokens = draw.choice([0, 1, 2, 5, 40])
    wide = torch.randn(num_tokens, draw.choice([1, 2, 5]), width + draw.choice([0, 6])) * draw.choice([1e-3, 1.0, 50.0])
    heads = wide.to(dtype)[..., -width:]
    return (heads if draw.random() < 0.5 else heads[:, 0]), weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(25))
def test_norm(dtype: torch.dtype, seed: int) -> None:
    x, weight = random_rows(seed, dtype)
    before = x.clone()
    assert_is_norm(KERNELS.rms_norm(x, weight, EPSILON), x, weight)
    assert same_bytes(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(25))
def test_norm_after_an_addition(dtype: torch.dtype, seed: int) -> None:
    x, weight = random_rows(seed, dtype)
    update = torch.randn(x.shape).to(dtype) * 3
    before = x.clone(), update.clone()
    total, normed = KERNELS.add_rms_norm(x, update, weight, EPSILON)
    assert same_bytes(total, x + update)
    assert_is_norm(normed, x + update, weight)
    assert same_bytes(normed, KERNELS.rms_norm(total, weight, EPSILON))
    assert same_bytes(x, before[0])
    assert same_bytes(update, before[1])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("seed", range(10))
def test_norm_in_place(dtype: torch.dtype, seed: int) -> None:
    """The rows may be views, of which the rest stays as it is."""
    wide = torch.randn(5, 100).to(dtype)
    before, x, weight = wide.clone(), wide[:, 3 : 60 + seed], torch.randn(57 + seed).to(dtype)
    expected = KERNELS.rms_norm(x, weight, EPSILON)
    KERNELS.rms_norm_in_place(x, weight, EPSILON)
    assert same_bytes(x, expected)
    assert same_bytes(wide[:, :3], before[:, :3])
    assert same_bytes(wide[:, 60 + seed :], before[:, 60 + seed :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 1000])
def test_a_row_has_the_same_bytes_alone_and_in_any_batch_on_any_threads(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    x, update, weight = (torch.randn(shape).to(dtype) for shape in ((700, width), (700, width), (width,)))
    set_num_threads(1)
    totals, normed = KERNELS.add_rms_norm(x, update, weight, EPSILON)
    for num_threads in (2, 3, 8):
        set_num_threads(num_threads)
        again = KERNELS.add_rms_norm(x, update, weight, EPSILON)
        assert same_bytes(again[0], totals)
        assert same_bytes(again[1], normed)
    for row in (0, 1, 350, 699):
        alone = KERNELS.add_rms_norm(x[row : row + 1], update[row : row + 1], weight, EPSILON)
        assert same_bytes(alone[1], normed[row : row + 1])
    assert same_bytes(KERNELS.add_rms_norm(x[3:9], update[3:9], weight, EPSILON)[1], normed[3:9])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 70).to(dtype), torch.ones(70, dtype=dtype)
    expected = KERNELS.rms_norm(x, weight, EPSILON)
    x[1, 69], x[3, 0] = float("nan"), float("inf")
    actual = KERNELS.rms_norm(x, weight, EPSILON)
    assert actual[1].isnan().all()
    assert actual[3, 0].isnan()
    assert same_bytes(actual[[0, 2, 4]], expected[[0, 2, 4]])


def test_zeros_stay_zeros() -> None:
    assert not KERNELS.rms_norm(torch.zeros(2, 33), torch.ones(33), EPSILON).any()


def test_float16_is_the_reference() -> None:
    x, weight = torch.randn(3, 40).half(), torch.randn(40).half()
    assert same_bytes(KERNELS.rms_norm(x, weight, EPSILON), TORCH_KERNELS.rms_norm(x, weight, EPSILON))
    total, normed = KERNELS.add_rms_norm(x, x, weight, EPSILON)
    assert same_bytes(total, x + x)
    assert same_bytes(normed, TORCH_KERNELS.rms_norm(x + x, weight, EPSILON))


@needs_kernels
@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("x", lambda t: t[0], "x has shape .*, expected 3 dimensions"),
        ("x", lambda t: t.half(), "x is not of type float32 or bfloat16"),
        ("x", lambda t: t.t().contiguous().t(), "x is not contiguous"),
        ("x", lambda t: t[:3], r"update has shape \[4, 40\], expected \[3, 40\]|out has shape"),
        ("update", lambda t: t[:, :39], "update has shape"),
        ("update", lambda t: t.bfloat16(), "update is not of type x's"),
        ("weight", lambda t: t[:39], "weight has shape"),
        ("weight", lambda t: t.bfloat16(), "weight is not of type x's"),
        ("weight", lambda t: torch.randn(80)[::2], "weight is not contiguous"),
        ("sum", lambda t: t[:, None], "sum has shape"),
        ("out", lambda t: t.double(), "out is not of type x's"),
        ("out", lambda t: t.t().contiguous().t(), "out is not contiguous"),
    ],
)
def test_wrong_tensors_are_refused(argument: str, wrong: Callable[[Tensor], Tensor], message: str) -> None:
    tensors = {name: torch.randn(4, 40) for name in ("x", "update", "sum", "out")} | {"weight": torch.randn(40)}
    arguments = tensors | {argument: wrong(tensors[argument])}
    with pytest.raises(ValueError, match=message):
        kernels.add_rms_norm(epsilon=EPSILON, **arguments)
