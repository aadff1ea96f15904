"""Sums in C++ with each instruction set: torch's, to the last bit."""

from __future__ import annotations

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


@pytest.fixture(autouse=True, params=INSTRUCTION_SETS)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with settings_restored():
        use_instruction_set(request.param)
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (1, 31), (3, 64), (7, 1029), (300, 1024)])
def test_sum(shape: tuple[int, int], dtype: torch.dtype) -> None:
    a, b = torch.randn(shape).to(dtype), (torch.randn(shape) * 100).to(dtype)
    before = a.clone(), b.clone()
    set_num_threads(3)
    assert same_bytes(KERNELS.add(a, b), a + b)
    assert same_bytes(a, before[0])
    assert same_bytes(b, before[1])


def test_nan_and_infinity() -> None:
    a = torch.tensor([[float("nan"), float("inf"), float("inf"), 1.0]])
    b = torch.tensor([[1.0, float("-inf"), 1.0, float("-inf")]])
    for dtype in (torch.float32, torch.bfloat16):
        total = KERNELS.add(a.to(dtype), b.to(dtype))
        assert total.isnan().tolist() == [[True, True, False, False]]
        assert total[0, 2:].tolist() == [float("inf"), float("-inf")]


@needs_kernels
@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("a", lambda t: t[0], "a has shape"),
        ("a", lambda t: t.half(), "float32 or bfloat16"),
        ("a", lambda t: torch.empty(3, 10)[:, ::2], "a is not contiguous"),
        ("b", lambda t: t[:2], "b has shape"),
        ("b", lambda t: t.bfloat16(), "b is not of type a's"),
        ("out", lambda t: t[:, :4], "out has shape"),
        ("out", lambda t: torch.empty(3, 10)[:, ::2], "out is not contiguous"),
    ],
)
def test_wrong_tensors_are_refused(argument: str, wrong: Callable[[Tensor], Tensor], message: str) -> None:
    tensors = dict(a=torch.randn(3, 5), b=torch.randn(3, 5), out=torch.empty(3, 5))
    with pytest.raises(ValueError, match=message):
        kernels.add(**tensors | {argument: wrong(tensors[argument])})
