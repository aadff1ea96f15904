"""Gated rows in C++ with each instruction set, against torch's sigmoid."""

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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 0)])
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (1, 31), (3, 64), (700, 1029)])
def test_gated_rows(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    gates, rows = (torch.randn(shape[0], 1) * 20).to(dtype), torch.randn(shape).to(dtype)
    set_num_threads(3)
    expected = gates.double().sigmoid() * rows.double() if tolerance else gates.sigmoid() * rows
    assert torch.allclose(KERNELS.gate_rows(gates, rows).to(expected.dtype), expected, rtol=tolerance, atol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_bytes_that_it_has_alone(dtype: torch.dtype) -> None:
    gates, rows = torch.randn(301, 1).to(dtype), torch.randn(301, 45).to(dtype)
    scale = KERNELS.gate_rows
    together = scale(gates, rows)
    for t in range(301):
        assert same_bytes(together[t : t + 1], scale(gates[t : t + 1], rows[t : t + 1]))


def test_far_gates() -> None:
    gates = torch.tensor([[float("nan")], [float("inf")], [float("-inf")], [200.0], [-80.0], [0.0]])
    for dtype in (torch.float32, torch.bfloat16):
        scaled = KERNELS.gate_rows(gates.to(dtype), torch.full((6, 3), 2.0, dtype=dtype)).float()
        assert scaled[0].isnan().all()
        assert scaled[1].tolist() == scaled[3].tolist() == [2.0] * 3
        assert scaled[2].abs().max() < 1e-37
        assert torch.allclose(scaled[4], torch.tensor(2 * 1.8048514e-35), rtol=2**-7)
        assert scaled[5].tolist() == [1.0] * 3


@needs_kernels
@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("gates", lambda t: t[:2], "gates has shape"),
        ("gates", lambda t: t.bfloat16(), "gates is not of type rows'"),
        ("rows", lambda t: t.half(), "float32 or bfloat16"),
        ("rows", lambda t: torch.empty(3, 10)[:, ::2], "rows is not contiguous"),
        ("out", lambda t: t[:, :4], "out has shape"),
        ("out", lambda t: torch.empty(3, 10)[:, ::2], "out is not contiguous"),
    ],
)
def test_wrong_tensors_are_refused(argument: str, wrong: Callable[[Tensor], Tensor], message: str) -> None:
    tensors = dict(gates=torch.randn(3, 1), rows=torch.randn(3, 5), out=torch.empty(3, 5))
    with pytest.raises(ValueError, match=message):
        kernels.gate_rows(**tensors | {argument: wrong(tensors[argument])})
