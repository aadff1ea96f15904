"""Grouped products in Triton's interpreter, compared with the torch reference in float64.

The interpreter's products are wrong in bfloat16, so these tests use float32, float16 and E4M3 blocks.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moeserve.ops.products.interface import OpenWeights, RowGroups
from moeserve.ops.products.reference import TorchGroupedProduct
from moeserve.ops.rows.activations import ClampedSwiGLU, CutSwiGLU, LimitedSwiGLU, SquaredReLU, SwiGLU
from moeserve.triton_kernels import grouped_matmul as module
from moeserve.triton_kernels.grouped_matmul import grouped_matmul, grouped_matmul_slots, max_tiles
from moeserve.triton_kernels.tuning import Config, Problem

# S source rows, R rows, e weights, O outputs, I inputs, C columns, B blocks of 128 inputs, G blocks of 128 outputs

SWAPPED = Config(16, 64, 32, num_warps=4, num_stages=2, programs_per_sm=1, group_m=2)
STRAIGHT = Config(64, 32, 32, num_warps=4, num_stages=2, programs_per_sm=1, group_m=2)
CONFIGS = [SWAPPED, STRAIGHT]
REFERENCE_ACTIVATIONS = {
    None: None,
    "swiglu": SwiGLU(),
    "clamped_swiglu": ClampedSwiGLU(alpha=1.3, limit=0.8),
    "limited_swiglu": LimitedSwiGLU(limit=0.8),
    "cut_swiglu": CutSwiGLU(limit=0.8),
    "squared_relu": SquaredReLU(),
}
CLAMPED = {"alpha": 1.3, "limit": 0.8}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
COUNTS = [[5], [0, 0, 3], [70, 0, 1, 9], [1, 0, 0, 0, 0, 0, 0], [0, 40, 0, 17, 33], [0, 0], [2] * 20]
ACTIVATIONS = list(REFERENCE_ACTIVATIONS)
NAMES = ["swapped", "straight"]


def expected(rows_RI: Tensor, weight_eOI: Tensor, counts_e: Tensor, bias_eO: Tensor | None, name: str | None) -> Tensor:
    bias_eO = None if bias_eO is None else bias_eO.double()
    weights = OpenWeights(weight_eOI.double(), bias_eO, REFERENCE_ACTIVATIONS[name])
    return TorchGroupedProduct(weights).multiply(rows_RI.double(), RowGroups(counts_e))


def assert_close(actual: Tensor, reference: Tensor, tolerance: float) -> None:
    assert actual.shape == reference.shape
    error = (actual.double() - reference).abs() / (1 + reference.abs())
    assert (error <= tolerance).all(), error.max()  # fails for NaN


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize(("counts", "activation"), list(zip(COUNTS, ACTIVATIONS * 3, strict=False)), ids=str)
def test_result_equals_the_reference(
    counts: list[int], activation: Any, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draw dtypes, widths that no block divides, a gather, biases and unused rows."""
    draw = random.Random(f"{counts} {activation} {config}")
    torch.manual_seed(draw.randrange(1000))
    num_programs = draw.choice([1, 2, 5])
    monkeypatch.setattr(module, "num_programs", lambda device, programs_per_sm: num_programs)
    dtype = draw.choice([torch.float32, torch.float16])
    num_outputs, num_inputs = draw.choice([(90, 70), (64, 64), (2, 1), (130, 33)])
    num_kept, num_spare = sum(counts), draw.choice([0, 0, 1, 50])
    counts_e = torch.tensor(counts, dtype=draw.choice([torch.int64, torch.int32]))
    weight_eOI = (torch.randn(len(counts), num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    bias_eO = torch.randn(len(counts), num_outputs).to(dtype) if draw.random() < 0.5 else None

    if draw.random() < 0.5:
        divisor = draw.choice([1, 3])
        source_SI = torch.randn(20, num_inputs + 8).to(dtype)[:, 8:]  # rows of a wider tensor
        indices_R = torch.randint(0, 20 * divisor, (num_kept + num_spare,))
        rows_RI = source_SI[indices_R // divisor]
        indices_R[num_kept:] = -(2**40)  # reading it would fail
    else:
        divisor, indices_R = 1, None
        rows_RI = source_SI = torch.randn(num_kept + num_spare, num_inputs).to(dtype)

    sentinel = 12345.0
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, sentinel, **options))
    output_RC = grouped_matmul(
        source_SI,
        weight_eOI,
        counts_e,
        indices_R=indices_R,
        divisor=divisor,
        bias_eO=bias_eO,
        activation=activation,
        config=config,
        **CLAMPED,
    )
    assert output_RC.dtype == dtype
    reference_RC = expected(rows_RI[:num_kept], weight_eOI, counts_e, bias_eO, activation)
    assert_close(output_RC[:num_kept], reference_RC, TOLERANCE[dtype])
    assert (output_RC[num_kept:] == output_RC.new_tensor(sentinel)).all()  # nothing was written


@pytest.mark.parametrize(
    ("activation", "config"), [(None, STRAIGHT), ("swiglu", SWAPPED), ("clamped_swiglu", STRAIGHT)]
)
def test_slots(activation: Any, config: Config) -> None:
    torch.manual_seed(1)
    counts = [0, 33, 1, 66]
    slots_eSI, weight_eOI, bias_eO = torch.randn(4, 66, 40), torch.randn(4, 50, 40) / 6, torch.randn(4, 50)
    for slots_SI, count in zip(slots_eSI, counts, strict=True):
        slots_SI[count:] = float("nan")
    output_eSC = grouped_matmul_slots(
        slots_eSI, weight_eOI, torch.tensor(counts), bias_eO=bias_eO, activation=activation, config=config, **CLAMPED
    )
    rows_RI = used(slots_eSI, counts)
    assert_close(
        used(output_eSC, counts), expected(rows_RI, weight_eOI, torch.tensor(counts), bias_eO, activation), 1e-5
    )


def used(slots_eSX: Tensor, counts: list[int]) -> Tensor:
    """Return the used slots of all experts, one after another."""
    return torch.cat([slots_SX[:count] for slots_SX, count in zip(slots_eSX, counts, strict=True)])


def random_blocks(*shape: int) -> tuple[Tensor, Tensor]:
    """Draw codes, and scales that differ by orders of magnitude."""
    *_, num_outputs, num_inputs = shape
    codes_eOI = torch.randn(shape).to(torch.float8_e4m3fn)
    return codes_eOI, torch.exp2(torch.randn(*shape[:-2], -(-num_outputs // 128), -(-num_inputs // 128)) - 4)


def dequantised(codes: Tensor, scale: Tensor, block_rows: int) -> Tensor:
    scale = scale.double().repeat_interleave(128, -1).repeat_interleave(block_rows, -2)
    return codes.double() * scale[..., : codes.shape[-2], : codes.shape[-1]]


FP8_SWAPPED = Config(16, 64, 128, num_warps=4, num_stages=2, programs_per_sm=1, group_m=2)
FP8_STRAIGHT = Config(64, 64, 128, num_warps=4, num_stages=2, programs_per_sm=1, group_m=2)


@pytest.mark.parametrize(
    ("layout", "columns", "activation", "config"),
    [
        ("rows", 200, None, FP8_SWAPPED),
        ("rows", 256, "swiglu", FP8_STRAIGHT),
        ("rows", 200, "clamped_swiglu", None),
        ("gathered", 256, None, None),
        ("gathered", 200, "swiglu", FP8_SWAPPED),
        ("slots", 200, None, FP8_STRAIGHT),
        ("slots", 200, "swiglu", None),
        ("slots", 256, "clamped_swiglu", FP8_SWAPPED),
    ],
)
def test_blocks_with_scales(layout: str, columns: int, activation: Any, config: Config | None) -> None:
    """Gates and ups have separate scales, even if 128 does not divide their number. Without a config, rules apply."""
    torch.manual_seed(2)
    num_inputs, counts = 320, [19, 0, 1]
    counts_e = torch.tensor(counts)
    parts = [random_blocks(3, columns, num_inputs) for _ in range(1 if activation is None else 2)]
    weight_eOI = torch.cat([codes.view(torch.uint8) for codes, _ in parts], dim=1).view(torch.float8_e4m3fn)
    dequantised_eOI = torch.cat([dequantised(*part, 128) for part in parts], dim=1)
    bias_eO = torch.randn(3, weight_eOI.shape[1])
    options: dict[str, Any] = dict(
        weight_scale_eGB=torch.cat([scale for _, scale in parts], dim=1),
        bias_eO=bias_eO,
        activation=activation,
        out_dtype=torch.float32,
        config=config,
        **CLAMPED,
    )

    codes_SI = torch.randn(60, num_inputs).to(torch.float8_e4m3fn)
    scale_SB = torch.exp2(torch.randn(60, 3))
    source_SI = dequantised(codes_SI, scale_SB, 1)
    if layout == "slots":
        rows_RI = used(source_SI.view(3, 20, -1), counts)
        slot_scale_eSB = scale_SB.view(3, 20, -1).transpose(1, 2).contiguous().transpose(1, 2)  # strided, as of DeepEP
        output_eSC = grouped_matmul_slots(
            codes_SI.view(3, 20, -1), weight_eOI, counts_e, slot_scale_eSB=slot_scale_eSB, **options
        )
        output_RC = used(output_eSC, counts)
    else:
        indices_R = torch.randint(0, 120, (23,)) if layout == "gathered" else None
        rows_RI = source_SI[:20] if indices_R is None else source_SI[indices_R[:20] // 2]
        output_RC = grouped_matmul(
            codes_SI, weight_eOI, counts_e, row_scale_SB=scale_SB, indices_R=indices_R, divisor=2, **options
        )[:20]
    assert_close(output_RC, expected(rows_RI, dequantised_eOI, counts_e, bias_eO, activation), 2e-5)


@pytest.mark.parametrize(
    ("dtype", "layout", "activation", "config"),
    [
        (torch.float32, "rows", None, dataclasses.replace(SWAPPED, block_k=128)),
        (torch.float32, "slots", "swiglu", dataclasses.replace(SWAPPED, block_k=64)),
        (torch.float32, "gathered", "clamped_swiglu", None),
        (torch.float16, "gathered", "swiglu", STRAIGHT),
        (torch.float16, "slots", None, None),
    ],
)
def test_weights_in_mxfp4(dtype: torch.dtype, activation: Any, config: Config | None, layout: str) -> None:
    """Outputs and inputs that blocks do not divide. The interpreter has no dot_scaled, so weights are decoded first."""
    torch.manual_seed(3)
    num_outputs, num_inputs, counts = 90, 96, [19, 0, 1]
    counts_e = torch.tensor(counts)
    blocks_eOG16 = torch.randint(0, 256, (3, num_outputs, num_inputs // 32, 16), dtype=torch.uint8)
    exponents_eOG = torch.randint(118, 128, (3, num_outputs, num_inputs // 32), dtype=torch.uint8)
    weight_eOI = convert_moe_packed_tensors(blocks_eOG16, exponents_eOG, dtype=torch.float32).transpose(1, 2)
    bias_eO = torch.randn(3, num_outputs).to(dtype)
    options: dict[str, Any] = dict(
        weight_scale_eGB=exponents_eOG, bias_eO=bias_eO, activation=activation, config=config, **CLAMPED
    )
    source_SI, codes_eOW = torch.randn(60, num_inputs).to(dtype), blocks_eOG16.flatten(2)
    if layout == "slots":
        rows_RI = used(source_SI.view(3, 20, -1), counts)
        output_RC = used(grouped_matmul_slots(source_SI.view(3, 20, -1), codes_eOW, counts_e, **options), counts)
    else:
        indices_R = torch.randint(0, 120, (23,)) if layout == "gathered" else None
        rows_RI = source_SI[:20] if indices_R is None else source_SI[indices_R[:20] // 2]
        output_RC = grouped_matmul(source_SI, codes_eOW, counts_e, indices_R=indices_R, divisor=2, **options)[:20]
    assert output_RC.dtype == dtype
    assert_close(output_RC, expected(rows_RI, weight_eOI, counts_e, bias_eO, activation), TOLERANCE[dtype])


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_result_of_a_row_does_not_depend_on_other_rows(config: Config) -> None:
    torch.manual_seed(4)
    rows_RI, weight_eOI = torch.randn(75, 100).half(), torch.randn(2, 40, 100).half()
    together_RC = grouped_matmul(rows_RI, weight_eOI, torch.tensor([5, 70]), activation="swiglu", config=config)
    for row, counts in ((0, [1, 0]), (4, [1, 0]), (5, [0, 1]), (74, [0, 1])):
        alone_RC = grouped_matmul(
            rows_RI[row : row + 1], weight_eOI, torch.tensor(counts), activation="swiglu", config=config
        )
        assert torch.equal(alone_RC[0], together_RC[row])


def test_expected_rows_determine_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []

    def choose(problem: Problem, device_name: str) -> Config:
        problems.append((problem, device_name))
        return SWAPPED

    monkeypatch.setattr(module, "choose_config", choose)
    monkeypatch.setattr(module, "plan_launch", module.plan_launch.__wrapped__)  # without its cache
    slots_eSI, weight_eOI, counts_e = torch.randn(2, 50, 8), torch.randn(2, 6, 8), torch.tensor([1, 2])
    grouped_matmul_slots(slots_eSI, weight_eOI, counts_e)
    grouped_matmul_slots(slots_eSI, weight_eOI, counts_e, activation="swiglu", expected_rows=3)
    grouped_matmul(slots_eSI[0], weight_eOI, counts_e, expected_rows=4)
    shape: dict[str, Any] = dict(kind="fp32", num_experts=2, num_outputs=6, num_inputs=8)
    assert problems == [
        (Problem(is_gated=False, num_rows=100, **shape), "CPU"),
        (Problem(is_gated=True, num_rows=3, **shape), "CPU"),
        (Problem(is_gated=False, num_rows=4, **shape), "CPU"),
    ]


def test_without_rows_or_experts() -> None:
    weight_eOI = torch.randn(2, 6, 5)
    assert grouped_matmul(torch.randn(0, 5), weight_eOI, torch.zeros(2).long()).shape == (0, 6)
    indices_R = torch.zeros(0).long()
    empty = grouped_matmul(torch.randn(4, 5), weight_eOI, torch.zeros(2).long(), indices_R=indices_R)
    assert empty.shape == (0, 6)
    no_experts = grouped_matmul(torch.randn(4, 5), weight_eOI[:0], torch.zeros(0).long(), activation="swiglu")
    assert no_experts.shape == (4, 3)


def test_max_tiles_is_an_upper_bound() -> None:
    draw = random.Random(0)
    for _ in range(300):
        counts = [draw.choice([0, 0, 1, draw.randint(0, 99)]) for _ in range(draw.randint(1, 9))]
        config = draw.choice(CONFIGS)
        num_tiles = sum(-(-count // config.block_m) for count in counts) * -(-50 // config.block_n)
        assert num_tiles <= max_tiles(sum(counts), len(counts), 50, None, config)
    assert max_tiles(1, 256, 64, None, SWAPPED) == 1  # one row, one tile of rows
    assert max_tiles(1, 256, 64, "swiglu", SWAPPED) == 2
