"""The probe of the machine's limits: it executes all multiply-adds that it counts, and reads all memory."""

from __future__ import annotations

import pytest
import torch
from paged_steps import kernels, needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("number_format", ["float32", "bfloat16", "int8"])
def test_multiply_adds_are_counted_by_their_sums(isa: str, number_format: str) -> None:
    """A sum of ones that overflowed, or items that are lost with several threads, change the count."""
    of_two_threads, floats = map(kernels.multiply_on_registers, (number_format, "float32"))
    kernels.set_num_threads(1)  # the fixture restores it
    of_one_thread = kernels.multiply_on_registers(number_format)
    assert of_two_threads == 2 * of_one_thread
    assert floats > 0
    per_float = of_two_threads / floats  # of an instruction, and of the tiles of AMX
    assert per_float in {"float32": (1,), "bfloat16": (1, 2, 32), "int8": (4,)}[number_format]


def test_all_memory_is_read(isa: str) -> None:
    numbers = torch.randint(
        -(2**31), 2**31, (128 * 9999,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    assert kernels.read_memory(numbers) == int(numbers.long().sum()) % 2**32


def test_other_formats_and_parts_of_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="int4"):
        kernels.multiply_on_registers("int4")
    with pytest.raises(ValueError, match="260"):
        kernels.read_memory(torch.zeros(65, dtype=torch.int32))
