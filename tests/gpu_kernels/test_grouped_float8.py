"""Products of 8-bit blocks in Triton's interpreter: rows that are in 8 bits already, results in 8 bits, shared tiles.

Results in 8 bits have the bytes of a product and a quantisation of its results. tests/gpu_kernels/test_engine_float8.py
compares products with those of dequantised numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.bench.gpu.inputs import Source, draw_weights
from moeserve.ops.products.interface import Gather, OpenWeights, RowGroups
from moeserve.ops.products.triton_blocks import TritonBlockGroupedProduct, TritonBlockProduct
from moeserve.ops.rows import triton as row_operations
from moeserve.ops.rows.activations import SwiGLU
from moeserve.ops.rows.interface import Float8Rows, plain_rows
from moeserve.ops.rows.triton import quantize_rows
from moeserve.triton_kernels.fp8 import quantize_blocks
from moeserve.triton_kernels.grouped_matmul import NUM_ARRIVALS, grouped_matmul, grouped_matmul_slots
from moeserve.triton_kernels.tuning import Config

# R rows, e weights, O outputs, I inputs, S slots, F blocks of 128 columns

pytestmark = pytest.mark.usefixtures("torch_conversions")

CONFIGS = {
    "swapped": Config(16, 256, 128, num_warps=8, num_stages=3, programs_per_sm=1),
    "straight": Config(64, 256, 128, num_warps=8, num_stages=3, programs_per_sm=1),
    "quantised from memory": Config(64, 64, 128, num_warps=4, num_stages=3, programs_per_sm=1),
}
NUM_INPUTS, WIDTH = 300, 200  # no multiples of 128
COUNTS = [5, 0, 20]


def source() -> Source:
    return Source(torch.device("cpu"), torch.Generator().manual_seed(4), torch.float16)


def gate_up(num_weights: int) -> dict[str, Any]:
    weights = draw_weights(source(), num_weights, 2 * WIDTH, NUM_INPUTS, is_fp8=True, activation=SwiGLU())
    return dict(
        weight_eOI=weights.weight_eOI,
        weight_scale_eGB=weights.scales_eGB,
        activation="swiglu",
        out_dtype=torch.float16,
    )


def assert_same(codes: Tensor, scales: Tensor, of: Tensor) -> None:
    expected_codes, expected_scales = quantize_blocks(of)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.slow_but("straight", "quantised from memory")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_quantised_results_have_the_bytes_of_two_operations(config: Config) -> None:
    """Gathered rows and slots, with scales in any order; nothing is written for rows that do not count."""
    counts_e, num_rows = torch.tensor(COUNTS), sum(COUNTS)
    codes_SI, scales_SB = quantize_blocks(source().normal(40, NUM_INPUTS))
    options = gate_up(3) | dict(counts_e=counts_e, config=config)
    rows = dict(rows_SI=codes_SI, indices_R=torch.arange(39, 9, -1), row_scale_SB=scales_SB)
    plain_RC = grouped_matmul(**rows, **options)
    out_scale_RF = torch.full((30, 2), -1.0)
    rows["row_scale_SB"] = scales_SB.t().contiguous().t()
    codes_RC = grouped_matmul(**rows, **options, out_scale_RF=out_scale_RF)
    assert_same(codes_RC[:num_rows], out_scale_RF[:num_rows], plain_RC[:num_rows])
    assert (out_scale_RF[num_rows:] == -1).all()

    slots = dict(slots_eSI=codes_SI[:39].view(3, 13, -1), slot_scale_eSB=scales_SB[:39].view(3, 13, -1))
    counts_e[2] = 13
    plain_eSC = grouped_matmul_slots(**slots, **options)
    out_scale_eSF = torch.full((3, 13, 2), -1.0)
    slots["slot_scale_eSB"] = slots["slot_scale_eSB"].transpose(1, 2).contiguous().transpose(1, 2)
    codes_eSC = grouped_matmul_slots(**slots, **options, out_scale_eSF=out_scale_eSF)
    for codes_SC, scale_SF, plain_SC, count in zip(codes_eSC, out_scale_eSF, plain_eSC, (5, 0, 13), strict=True):
        assert_same(codes_SC[:count], scale_SF[:count], plain_SC[:count])
        assert (scale_SF[count:] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [2, 3, 5])
@pytest.mark.parametrize("config", [CONFIGS["swapped"], CONFIGS["straight"]], ids=["swapped", "straight"])
def test_shared_tiles(config: Config, num_splits: int) -> None:
    """Sums of parts of the inputs are added; more programs than steps of inputs are no fault; arrivals are reset."""
    codes_SI, scales_SB = quantize_blocks(source().normal(40, NUM_INPUTS))
    options = gate_up(1) | dict(rows_SI=codes_SI, row_scale_SB=scales_SB, out_dtype=torch.float32)
    expected_RC = grouped_matmul(**options, counts_e=None, config=config)
    assert torch.equal(expected_RC, grouped_matmul(**options, counts_e=torch.tensor([40]), config=config))
    arrivals = torch.zeros(NUM_ARRIVALS, dtype=torch.int32)
    split = Config(**{**config.__dict__, "num_splits": num_splits})
    for _ in range(2):
        given_RC = grouped_matmul(**options, counts_e=None, arrivals=arrivals, config=split)
        assert not arrivals.any()
        # Three sums in float32 are added in another order: a few units in the last place of the largest sum.
        torch.testing.assert_close(given_RC, expected_RC, rtol=0, atol=float(expected_RC.abs().max()) * 2**-20)
    # Programs that are not the last of a tile write no results: here none is.
    out_scale_RF = torch.full((40, 2), -1.0)
    arrivals -= 100
    grouped_matmul(**options, counts_e=None, arrivals=arrivals, config=split, out_scale_RF=out_scale_RF)
    assert (out_scale_RF == -1).all()


def test_rows_in_8_bits_are_not_quantised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products of a network, on packed rows, gathered rows, slots and a single weight."""
    rows, counts_e = source().normal(12, NUM_INPUTS), torch.tensor([3, 0, 6])
    up, down = (draw_weights(source(), 3, *shape, is_fp8=True) for shape in ((WIDTH, NUM_INPUTS), (64, WIDTH)))
    feeding = TritonBlockGroupedProduct(OpenWeights(up.weight_eOI, scales_eGB=up.scales_eGB, feeds_blocks=True))
    plain, last = TritonBlockGroupedProduct(up), TritonBlockGroupedProduct(down)
    groups, of_slots = RowGroups(counts_e, has_spare_rows=True), RowGroups(counts_e.clamp(max=4))
    gather = Gather(torch.tensor([*range(9), -1]), 1)
    expected = [
        last.multiply(plain.multiply(rows, groups), groups)[:9],
        last.multiply(plain.multiply(rows, groups, gather), groups)[:9],
        last.multiply_slots(plain.multiply_slots(rows.view(3, 4, -1), of_slots), of_slots),
    ]
    single = [
        TritonBlockProduct(
            OpenWeights(*(each[:1] for each in (w.weight_eOI,)), scales_eGB=w.scales_eGB[:1], feeds_blocks=feeds)
        )
        for w, feeds in ((up, True), (up, False), (down, False))
    ]
    expected.append(single[2].multiply(single[1].multiply(rows)))
    given = quantize_rows(rows)
    assert quantize_rows(given) is given

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("quantised again")

    monkeypatch.setattr(row_operations, "quantize_blocks", refuse)
    slots = Float8Rows(given.codes.view(3, 4, -1), given.scales.view(3, 4, -1), given.dtype)
    found = [
        last.multiply(feeding.multiply(given, groups), groups)[:9],
        last.multiply(feeding.multiply(given, groups, gather), groups)[:9],
        last.multiply_slots(feeding.multiply_slots(slots, of_slots), of_slots),
        single[2].multiply(single[0].multiply(given)),
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float16
        if one.ndim == 3:
            assert torch.equal(one[0, :3], other[0, :3])
            assert torch.equal(one[2, :4], other[2, :4])
        else:
            assert torch.equal(one, other)
    # A number is within half a step of its code: 2**-4 of itself, or of the smallest normal code.
    largest = rows.abs().amax(1, keepdim=True).float()
    assert ((plain_rows(given).float() - rows).abs() <= rows.float().abs() * 2**-4 + largest / 448 * 2**-9).all()


def test_products_quantise_only_rows_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare rows and slots are left out by the counts; the source of gathered rows has none."""
    counts_e, rows = torch.tensor([3, 0, 6]), source().normal(12, NUM_INPUTS)
    product = TritonBlockGroupedProduct(draw_weights(source(), 3, 64, NUM_INPUTS, is_fp8=True))
    groups = RowGroups(counts_e, has_spare_rows=True)
    given: list[Tensor | None] = []

    def record(x_TD: Tensor, *, counts_e: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        given.append(counts_e)
        return quantize_blocks(x_TD, counts_e=counts_e, **options)

    monkeypatch.setattr(row_operations, "quantize_blocks", record)
    product.multiply(rows, groups)
    product.multiply(rows, groups, Gather(torch.arange(9), 1))
    product.multiply_slots(rows.view(3, 4, -1), RowGroups(counts_e.clamp(max=4)))
    assert [None if each is None else each.tolist() for each in given] == [[3, 0, 6], None, [3, 0, 4]]
