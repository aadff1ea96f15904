"""Weights that stay in MXFP4: their packing, and their products, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from packed_panels import unpacked
from paged_steps import INSTRUCTION_SETS, NATIVE, kernels, needs_kernels, settings_restored
from test_products import ACTIVATIONS, assert_close, in_float64, native_grouped, native_product, quantized
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moeserve.ops.native import set_num_threads
from moeserve.ops.products.interface import OpenWeights, PackedWeights, RowGroups
from moeserve.ops.rows.activations import Activation, SwiGLU

pytestmark = needs_kernels

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(True, 64, 64), (False, 66, 96), (True, 2, 32), (True, 96, 1120)]  # has a bias, outputs, inputs


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with settings_restored():
        yield


def make(
    num_weights: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    activation: Activation | None = None,
    scales: tuple[int, int] = (118, 128),
) -> OpenWeights:
    codes_eOI = torch.randint(0, 256, (num_weights, num_outputs, num_inputs // 2), dtype=torch.uint8)
    scales_eOG = torch.randint(*scales, (num_weights, num_outputs, num_inputs // 32), dtype=torch.uint8)
    bias_eO = torch.randn(num_weights, num_outputs).to(dtype) if has_bias else None
    return OpenWeights(codes_eOI, bias_eO, activation, scales_eOG)


def packed_of(weights: OpenWeights) -> PackedWeights:
    packing = NATIVE.packing
    assert packing is not None
    return packing.pack(weights, "mxfp4", in_place=False)


@pytest.mark.parametrize("activation", [None, SwiGLU()])
def test_packing_keeps_every_value(activation: Activation | None) -> None:
    """All codes, and all scales but NaN; outputs that do not fill panels."""
    torch.manual_seed(0)
    for num_outputs, num_inputs in ((64, 64), (70, 32), (34, 320)):
        weights = make(3, num_outputs, num_inputs, torch.float32, activation=activation, scales=(1, 255))
        blocks_eOG16 = weights.weight_eOI.unflatten(2, (-1, 16))
        assert weights.scales_eGB is not None
        expected_eIO = convert_moe_packed_tensors(blocks_eOG16, weights.scales_eGB, dtype=torch.float64)
        assert torch.equal(unpacked(packed_of(weights)), expected_eIO.transpose(1, 2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(isa: str, dtype: torch.dtype, activation: Activation | None) -> None:
    """From no rows to more than an item has; the rows are parts of wider rows."""
    torch.manual_seed(0)
    for has_bias, num_outputs, num_inputs in SHAPES:
        weights = make(1, num_outputs, num_inputs, dtype, has_bias=has_bias, activation=activation)
        packed = packed_of(weights)
        product = native_product(packed)
        rows_RI = torch.randn(200, num_inputs + 9).to(dtype)[:, 9:]
        bias_O = None if weights.bias_eO is None else weights.bias_eO[0]
        expected = in_float64(quantized(rows_RI), unpacked(packed)[0], bias_O, activation)
        for num_rows in (0, 1, 2, 6, 7, 31, 200):
            given = product.multiply(rows_RI[:num_rows])
            assert given.shape == expected[:num_rows].shape
            if num_rows:
                assert_close(given, expected[:num_rows], dtype)


def test_extreme_codes_and_rows_do_not_overflow(isa: str) -> None:
    """The largest sums of a group: all weights 6 or -6, all values of the same magnitude."""
    weights = make(1, 64, 64, torch.float32, scales=(127, 128))
    signs_OI = torch.tensor([1, -1]).repeat(32)[:, None].repeat(1, 64)
    weights.weight_eOI[0] = torch.where(signs_OI[:, ::2] > 0, 0x77, 0xFF).to(torch.uint8)
    product = native_product(packed_of(weights))
    for sign in (1.0, -1.0):
        given = product.multiply(torch.full((3, 64), 127.0 * sign))
        assert torch.equal(given, (signs_OI[:, 0] * sign * 6 * 127 * 64).expand(3, 64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_a_row_depend_on_nothing_else(dtype: torch.dtype) -> None:
    """The same with any other rows, number of threads and instruction set, and in products of several weights."""
    assert kernels is not None
    torch.manual_seed(1)
    weights = make(2, 448, 1120, dtype, has_bias=True, activation=SwiGLU())
    rows_RI = torch.randn(200, 1120).to(dtype)
    expected: tuple[Tensor, ...] = ()  # with each of the weights, row by row
    for isa in INSTRUCTION_SETS:
        kernels.set_isa(isa)
        product = native_grouped(packed_of(weights))
        for num_threads, count in itertools.product((1, 3), (1, 7, 19, 200)):
            set_num_threads(num_threads)
            expected = expected or tuple(
                torch.cat([product.multiply(row_1I, RowGroups(torch.tensor(counts))) for row_1I in rows_RI.split(1)])
                for counts in ([1, 0], [0, 1])
            )
            given = product.multiply(rows_RI, RowGroups(torch.tensor([count, 200 - count])))
            assert torch.equal(given, torch.cat([expected[0][:count], expected[1][count:]])), (isa, num_threads, count)


def test_a_value_that_is_not_finite_makes_its_row_nan_or_infinite(isa: str) -> None:
    product = native_product(packed_of(make(1, 64, 96, torch.float32)))
    for value in (float("nan"), float("inf"), -float("inf")):
        rows_RI = torch.randn(3, 96)
        rows_RI[1, 70] = value
        assert product.multiply(rows_RI).isfinite().all(dim=1).tolist() == [True, False, True]
