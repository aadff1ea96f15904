"""C++ kernels that mix rows and heads: against torch, and with the same bytes of a row in any batch."""

from __future__ import annotations

import pytest
import torch
from paged_steps import INSTRUCTION_SETS, kernels, needs_kernels, same_bytes, settings_restored
from torch import Tensor

from moeserve.ops.mixing.cpu import CpuMixing
from moeserve.ops.mixing.interface import UNCHANGED, Affine
from moeserve.ops.mixing.reference import TorchMixing

pytestmark = needs_kernels
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def results(mixing: CpuMixing | TorchMixing, dtype: torch.dtype, rows: slice, width: int) -> list[Tensor]:
    """Return the results of all operations for some of 50 rows, with 6 query heads and 2 key heads."""
    generator = torch.Generator().manual_seed(width)
    a_TD, b_TD = (torch.randn(50, width, generator=generator).to(dtype)[rows] for _ in range(2))
    affines = [Affine(*torch.randn(2, width, generator=generator)) for _ in range(2)]
    projected_TX = torch.randn(50, 8 * width + 3, generator=generator).to(dtype)[rows, : 8 * width]
    convolved_TeH = torch.randn(50, 8, width, generator=generator).to(dtype)[rows].contiguous()
    temperatures_G = torch.randn(2, generator=generator)
    return [
        mixing.add(a_TD, affines[0], b_TD, affines[1]),
        mixing.add(a_TD, UNCHANGED, b_TD, Affine(affines[0].scale_D)),
        mixing.add(a_TD, affines[1]),
        mixing.gelu(a_TD),
        mixing.mix_heads(projected_TX, convolved_TeH, temperatures_G),
        mixing.limit_lengths(projected_TX.unflatten(1, (8, width)), width**0.5),
        mixing.limit_lengths(convolved_TeH, width**0.5, torch.rand(8, width, generator=generator) * 2),
        *_attended(mixing, convolved_TeH, a_TD),
    ]


def _attended(mixing: CpuMixing | TorchMixing, sums_TeD: Tensor, update_TD: Tensor) -> list[Tensor]:
    """Return the attention to 4 and to 5 of 8 sums, and the sums, some of which an update is added to."""
    queries_QD = torch.linspace(-1.0, 2.0, 3 * update_TD.shape[1]).view(3, -1)
    sums_TeD = sums_TeD.clone()
    first = mixing.attend_sums(sums_TeD, 4, update_TD, begins=False, queries_QD=queries_QD)
    second = mixing.attend_sums(sums_TeD, 5, update_TD, begins=True, queries_QD=queries_QD[:1])
    assert first is not None
    assert second is not None
    assert mixing.attend_sums(sums_TeD, 2, update_TD, begins=False, queries_QD=None) is None
    return [first, second, sums_TeD]


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("width", [1, 10, 128, 301])
@DTYPES
def test_results_equal_the_reference(dtype: torch.dtype, width: int, isa: str) -> None:
    with settings_restored():
        kernels.set_isa(isa)
        actual = results(CpuMixing(kernels), dtype, slice(0, 50), width)
    expected = results(TorchMixing(), dtype, slice(0, 50), width)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7  # rounded once, perhaps to neighbouring numbers
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=1e-5)


@DTYPES
def test_bytes_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    whole = results(CpuMixing(kernels), dtype, slice(0, 50), 37)
    some = results(CpuMixing(kernels), dtype, slice(17, 24), 37)
    assert all(same_bytes(one[17:24].contiguous(), other) for one, other in zip(whole, some, strict=True))
