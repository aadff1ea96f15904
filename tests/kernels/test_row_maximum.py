"""The maximum of each row and its first index, in torch and in C++, against plain loops."""

from __future__ import annotations

import math
import random

import pytest
import torch
from paged_steps import KERNELS
from torch import Tensor

from moeserve.ops.interfaces import RowMaximum
from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch.table import TORCH_KERNELS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def row_maximum(implementation: str) -> RowMaximum:
    return TORCH_KERNELS.row_maximum if implementation == "torch" else KERNELS.row_maximum


def assert_found(row_maximum: RowMaximum, rows: Tensor) -> None:
    largest, indices = row_maximum(rows)
    assert indices.dtype == torch.int64
    for row, number, index in zip(rows.tolist(), largest.tolist(), indices.tolist(), strict=True):
        is_nan = [math.isnan(value) for value in row]
        if any(is_nan):
            assert math.isnan(number)
            assert index == is_nan.index(True)
        else:
            assert number == max(row)
            assert index == row.index(max(row))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 15, 31, 64, 1000, 1024, 1025, 2047, 5000])
def test_largest_and_first(row_maximum: RowMaximum, width: int, dtype: torch.dtype) -> None:
    draw = random.Random(width)
    torch.manual_seed(width)
    rows = torch.randn(30, width + 2).to(dtype)[:, 2:]  # bfloat16 has many ties
    rows[1] = 1.5
    rows[2] = -math.inf
    rows[3] = torch.tensor([0.0, -0.0]).repeat(width)[:width]
    for row, bad in enumerate([math.nan, -math.nan, math.inf, -math.inf] * 3, start=10):
        rows[row, draw.randrange(width)] = bad
    for row in range(14, 22):
        rows[row, draw.randrange(width)] = math.nan
        rows[row, draw.randrange(width)] = math.inf
    assert_found(row_maximum, rows)


def test_every_index(row_maximum: RowMaximum) -> None:
    width = 1100
    rows = -torch.ones(width, width) - torch.eye(width)  # the maximum is off the diagonal
    assert_found(row_maximum, rows)
    assert_found(row_maximum, torch.eye(width).bfloat16())


def test_any_number_of_threads(row_maximum: RowMaximum) -> None:
    rows = torch.randn(40, 9000).bfloat16()
    for num_threads in (1, 2, 8):
        set_num_threads(num_threads)
        assert_found(row_maximum, rows)


def test_transposed_rows(row_maximum: RowMaximum) -> None:
    assert_found(row_maximum, torch.randn(50, 7).t())


def test_no_rows(row_maximum: RowMaximum) -> None:
    assert row_maximum(torch.empty(0, 5))[1].shape == (0,)
