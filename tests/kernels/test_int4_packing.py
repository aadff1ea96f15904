"""The scales, zero points and codes that are chosen for int4 weights."""

from __future__ import annotations

import pytest
import torch
from packed_panels import unpacked
from paged_steps import INSTRUCTION_SETS, kernels, needs_kernels, settings_restored
from test_products import packed_copy
from torch import Tensor

from moeserve.ops.products.interface import InputChunks, OpenWeights

pytestmark = needs_kernels

# O outputs, G groups of 32 inputs, I inputs


def packed_values(weight_OI: Tensor) -> Tensor:
    """[O, I] float64: the values that a weight has once it is packed."""
    return unpacked(packed_copy(OpenWeights(weight_OI[None]), "int4"))[0]


def squared_errors(values_OI: Tensor, weight_OI: Tensor) -> Tensor:
    """[O, G]"""
    return (values_OI - weight_OI.double()).pow(2).unflatten(1, (-1, 32)).sum(-1)


def test_weights_on_a_grid_keep_their_values() -> None:
    """Every scale of float16 above 2^-17, and every zero point; each group has the lowest and the highest code."""
    generator = torch.Generator().manual_seed(0)
    num_outputs, num_groups = 96, 40
    bits_OG1 = torch.randint(0x80, 0x7400, (num_outputs, num_groups, 1), dtype=torch.int16, generator=generator)
    steps_OG1 = torch.randint(-64, 192, (num_outputs, num_groups, 1), generator=generator)
    codes_OG32 = torch.randint(0, 16, (num_outputs, num_groups, 32), generator=generator)
    codes_OG32[..., 7], codes_OG32[..., 31] = 15, 0
    weight_OI = ((codes_OG32 - steps_OG1 / 8) * bits_OG1.view(torch.float16).float()).flatten(1)
    assert torch.equal(packed_values(weight_OI), weight_OI.double())


def test_groups_of_one_value_keep_it() -> None:
    """Zeros exactly, other values within the rounding of a scale to float16."""
    weight_OI = torch.tensor([0.0, 1.0, -3.0, 2.0**-10])[:, None].repeat(8, 64)
    error_OI = (packed_values(weight_OI) - weight_OI).abs()
    assert (error_OI <= 2**-11 * weight_OI.abs()).all()


def test_no_group_has_a_larger_error_than_even_steps_over_its_range() -> None:
    weight_OI = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).mul(0.02)
    groups_OG32 = weight_OI.double().unflatten(1, (-1, 32))
    low_OG1, high_OG1 = groups_OG32.amin(-1, keepdim=True), groups_OG32.amax(-1, keepdim=True)
    scale_OG1 = ((high_OG1 - low_OG1) / 15).half().double()
    zero_OG1 = (-low_OG1 / scale_OG1 * 8).round() / 8
    even_OG32 = ((groups_OG32 / scale_OG1 + zero_OG1).round().clamp(0, 15) - zero_OG1) * scale_OG1
    even_OG = squared_errors(even_OG32.flatten(1), weight_OI)
    given_OG = squared_errors(packed_values(weight_OI), weight_OI)
    assert (given_OG <= even_OG * (1 + 1e-4)).all()  # errors are compared in float32
    assert given_OG.sum() <= 0.89 * even_OG.sum()  # measured: 0.87


def test_panels_are_the_same_with_every_instruction_set() -> None:
    generator = torch.Generator().manual_seed(2)
    weight_eOI = torch.randn(1, 70, 200, generator=generator) * torch.logspace(-9, 9, 70)[:, None]
    panels = []
    with settings_restored():
        for isa in INSTRUCTION_SETS:
            assert kernels is not None
            kernels.set_isa(isa)
            panels.append(packed_copy(OpenWeights(weight_eOI), "int4").panels)
    assert all(torch.equal(panels[0], other) for other in panels)


def test_given_scales_keep_integers() -> None:
    """Also where weights are rounded to bfloat16, and where the last group has fewer inputs."""
    generator = torch.Generator().manual_seed(3)
    for num_inputs, dtype in ((128, torch.float32), (104, torch.bfloat16)):
        bits_OG = torch.randint(0x80, 0x7400, (70, -(-num_inputs // 32)), dtype=torch.int16, generator=generator)
        scales_OG = bits_OG.view(torch.float16)
        zeros_OG = torch.randint(0, 17, scales_OG.shape, generator=generator)
        codes_OI = torch.randint(0, 16, (70, num_inputs), generator=generator)
        codes_OI[:8] = codes_OI[:8] // 3 + 5  # groups without the lowest and the highest code
        zeros_OI, scales_OI = (of.repeat_interleave(32, 1)[:, :num_inputs] for of in (zeros_OG, scales_OG))
        exact_OI = (codes_OI - zeros_OI) * scales_OI.double()
        weights = OpenWeights(exact_OI.to(dtype)[None], int4_scales_eOG=scales_OG[None])
        assert torch.equal(unpacked(packed_copy(weights, "int4"))[0], exact_OI)


def test_chunks_have_their_part_of_given_scales() -> None:
    generator = torch.Generator().manual_seed(4)
    scales_OG = torch.rand(40, 6, generator=generator).half()
    weight_OI = torch.randint(-8, 8, (40, 192), generator=generator) * scales_OG.float().repeat_interleave(32, 1)
    for chunk_size in (32, 64, 96):
        chunks = InputChunks(chunk_size, keeps_float32=False)
        weights = OpenWeights(weight_OI[None], chunks=chunks, int4_scales_eOG=scales_OG[None])
        panels_PB = packed_copy(weights, "int4").panels.view(2, -1)
        parts = [
            packed_copy(OpenWeights(weight.contiguous()[None], int4_scales_eOG=scales.contiguous()[None]), "int4")
            for weight, scales in zip(weight_OI.split(chunk_size, 1), scales_OG.split(chunk_size // 32, 1), strict=True)
        ]
        assert torch.equal(panels_PB, torch.cat([part.panels.view(2, -1) for part in parts], dim=1))


def test_wrong_scales_are_refused() -> None:
    weight_OI, panels = torch.zeros(32, 64), torch.zeros(2 * 608, dtype=torch.uint8)
    assert kernels is not None
    for arguments, message in (
        (("int4", weight_OI, panels, 1, None, torch.zeros(32, 3).half()), r"int4_scales has shape \[32, 3\]"),
        (("int4", weight_OI, panels, 1, None, torch.zeros(32, 2)), "int4_scales is not of type float16"),
        (
            ("int4", weight_OI, torch.zeros(4 * 608, dtype=torch.uint8), 1, 20, torch.zeros(32, 2).half()),
            "whole groups",
        ),
        (("int8", weight_OI, torch.zeros(2176, dtype=torch.uint8), 1, None, torch.zeros(32, 2).half()), "int4 only"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.pack_weight(*arguments)
