"""Zero points and codes of int4 weights with given scales."""

from __future__ import annotations

import pytest
import torch
from packed_panels import unpacked
from paged_steps import INSTRUCTION_SETS, kernels, needs_kernels, settings_restored
from test_products import packed_copy

from moeserve.ops.products.interface import InputChunks, OpenWeights

pytestmark = needs_kernels

# O outputs, G groups of 32 inputs, I inputs


def test_panels_are_the_same_with_every_instruction_set() -> None:
    generator = torch.Generator().manual_seed(2)
    weight_eOI = torch.randn(1, 70, 200, generator=generator) * torch.logspace(-5, 3, 70)[:, None]
    scales_eOG = torch.logspace(-5, 3, 70).half()[None, :, None].repeat(1, 1, 7)
    panels = []
    with settings_restored():
        for isa in INSTRUCTION_SETS:
            assert kernels is not None
            kernels.set_isa(isa)
            panels.append(packed_copy(OpenWeights(weight_eOI, int4_scales_eOG=scales_eOG), "int4").panels)
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
        (("int8", weight_OI, torch.zeros(2176, dtype=torch.uint8), 1, None, torch.zeros(32, 2).half()), "are for int4"),
        (("int4", weight_OI, panels), "which needs them"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.pack_weight(*arguments)
