"""Weights quantised to Q4_K, Q5_K and Q6_K, decoded by the gguf package."""

from __future__ import annotations

import pytest
import torch
from gguf_blocks import values_of
from paged_steps import INSTRUCTION_SETS, NATIVE, kernels, needs_kernels, settings_restored
from torch import Tensor

from moeserve.models.checkpoint.block_tensors import row_bytes
from moeserve.ops.native import set_num_threads
from moeserve.ops.products.interface import InputChunks, OpenWeights, PackedFormat, StoredCodes, StoredRows

pytestmark = needs_kernels

# The relative error (root mean square) of llama.cpp's own quantiser (0.3.36 of llama-cpp-python), without and with
# importances, of the weights of `weights_of`.
LLAMA_CPP: dict[PackedFormat, tuple[float, float]] = {
    "q4_k": (0.07196, 0.05795),
    "q5_k": (0.03640, 0.03031),
    "q6_k": (0.01818, 0.01554),
}
FORMATS: dict[PackedFormat, int] = {"q4_k": 15, "q5_k": 31, "q6_k": 63}  # and their highest codes


def weights_of(num_inputs: int = 1024) -> Tensor:
    """[O, I]: normal, with rows of several sizes and one outlier in each of some rows."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(96, num_inputs, generator=generator) * torch.logspace(-3, 1, 96)[:, None]
    weight_OI[:8, 5] *= 20
    return weight_OI


def importances_of(num_inputs: int = 1024) -> Tensor:
    return torch.randn(num_inputs, generator=torch.Generator().manual_seed(1)).mul(1.5).exp()


def blocks_of(packed_format: PackedFormat, weight_OI: Tensor, importances_I: Tensor | None = None) -> Tensor:
    assert kernels is not None
    blocks_OB = torch.empty(len(weight_OI), row_bytes(packed_format, weight_OI.shape[1]), dtype=torch.uint8)
    kernels.quantize_gguf(packed_format, weight_OI, blocks_OB, importances_I)
    return blocks_OB


def quantised(packed_format: PackedFormat, weight_OI: Tensor, importances_I: Tensor | None = None) -> Tensor:
    blocks_OB = blocks_of(packed_format, weight_OI, importances_I)
    return torch.from_numpy(values_of(packed_format.upper(), blocks_OB.numpy()))[:, : weight_OI.shape[1]]


def relative_error(values_OI: Tensor, weight_OI: Tensor, importances_I: Tensor | float = 1.0) -> float:
    """Each row counts by its own size."""
    errors_O = ((values_OI - weight_OI).double().square() * importances_I).sum(1)
    return float((errors_O / (weight_OI.double().square() * importances_I).sum(1)).mean().sqrt())


@pytest.mark.parametrize("packed_format", FORMATS)
def test_errors_are_those_of_llama_cpp_or_less(packed_format: PackedFormat) -> None:
    weight_OI, importances_I = weights_of(), importances_of()
    plain, weighted = LLAMA_CPP[packed_format]
    assert relative_error(quantised(packed_format, weight_OI), weight_OI) <= 1.01 * plain
    given = quantised(packed_format, weight_OI, importances_I)
    assert relative_error(given, weight_OI, importances_I) <= 1.01 * weighted


@pytest.mark.parametrize("packed_format", FORMATS)
def test_no_weight_is_further_than_two_steps_from_its_value(packed_format: PackedFormat) -> None:
    """Two steps of even codes over the range of a group, besides a step of the group's scale and of its minimum.

    The narrowest grids leave out 1.2 steps of the range, and half a step is lost by rounding. Scales and minima are
    multiples of a 63rd (Q6_K: a 127th) of the largest in a block.
    """
    weight_OI = weights_of()
    size = 16 if packed_format == "q6_k" else 32
    groups_OGI = weight_OI.unflatten(1, (-1, size))
    low_OG, high_OG = groups_OGI.amin(-1).clamp(max=0), groups_OGI.amax(-1)
    if packed_format == "q6_k":
        step_OG = groups_OGI.abs().amax(-1) / 32
        coarse_OG = _largest_of_block(step_OG) / 127 * 32
    else:
        step_OG = (high_OG - low_OG) / FORMATS[packed_format]
        coarse_OG = _largest_of_block(step_OG) / 63 * FORMATS[packed_format] + _largest_of_block(-low_OG) / 63
    bound_OI = (2 * step_OG + coarse_OG).repeat_interleave(size, dim=1)
    assert ((quantised(packed_format, weight_OI) - weight_OI).abs() <= bound_OI).all()


def _largest_of_block(values_OG: Tensor) -> Tensor:
    per_block = values_OG.shape[1] // 4  # 1024 inputs
    return values_OG.unflatten(1, (4, per_block)).amax(-1).repeat_interleave(per_block, dim=1)


@pytest.mark.parametrize("packed_format", FORMATS)
def test_importances_lower_the_error_that_they_weight(packed_format: PackedFormat) -> None:
    weight_OI, importances_I = weights_of(), importances_of()
    plain, weighted = (
        relative_error(quantised(packed_format, weight_OI, chosen), weight_OI, importances_I)
        for chosen in (None, importances_I)
    )
    assert weighted < 0.9 * plain
    same = quantised(packed_format, weight_OI, torch.full((1024,), 0.25))  # a power of two changes no rounding
    assert torch.equal(same, quantised(packed_format, weight_OI))


@pytest.mark.parametrize("packed_format", FORMATS)
def test_blocks_have_the_same_bytes_with_every_instruction_set_and_number_of_threads(
    packed_format: PackedFormat,
) -> None:
    assert kernels is not None
    weight_OI, importances_I = weights_of(992), importances_of(992)  # the last block has fewer inputs
    given = []
    with settings_restored():
        for isa in INSTRUCTION_SETS:
            for num_threads in (1, 3):
                kernels.set_isa(isa)
                set_num_threads(num_threads)
                given.append(blocks_of(packed_format, weight_OI, importances_I))
    assert all(torch.equal(given[0], other) for other in given)


@pytest.mark.parametrize("packed_format", FORMATS)
def test_packed_weights_are_packed_blocks(packed_format: PackedFormat) -> None:
    """Panels of weights that are quantised at loading are those of the same blocks from a file."""
    packing = NATIVE.packing
    assert packing is not None
    weight_OI = weights_of().bfloat16()
    for chunks in (None, InputChunks(512, keeps_float32=False)):
        packed = packing.pack(OpenWeights(weight_OI[None], chunks=chunks), packed_format, in_place=False)
        stored = OpenWeights(weight_OI[None], chunks=chunks, stored_rows=(StoredRows(packed_format, len(weight_OI)),))
        panels_B = torch.empty(packing.num_bytes(stored, packed_format), dtype=torch.uint8)
        assert packing.pack_stored(stored, panels_B, 0, StoredCodes(blocks_of(packed_format, weight_OI)))
        assert torch.equal(packed.panels[0], panels_B)


@pytest.mark.parametrize("packed_format", FORMATS)
def test_extreme_weights(packed_format: PackedFormat) -> None:
    """Zeros stay zeros; constants, tiny and huge weights stay near their values."""
    highest = FORMATS[packed_format]
    weight_OI = torch.tensor([0.0, 1.0, -3.0, 2.0**-10, 60000.0])[:, None].repeat(1, 256)
    error_OI = (quantised(packed_format, weight_OI) - weight_OI).abs()
    assert not error_OI[0].any()
    assert (error_OI <= weight_OI.abs() * max(2**-10, 0.5 / highest)).all()
    single_OI = torch.zeros(32, 256)
    single_OI[torch.arange(32), torch.arange(32) * 8] = torch.linspace(-4, 4, 32)
    error_OI = (quantised(packed_format, single_OI) - single_OI).abs()
    assert error_OI.max() <= 4 / highest


def test_refused_arguments() -> None:
    assert kernels is not None
    weight_OI, blocks_OB = torch.zeros(32, 512), torch.zeros(32, 288, dtype=torch.uint8)
    kernels.quantize_gguf("q4_k", weight_OI, blocks_OB, None)
    for arguments, message in (
        (("q8_0", weight_OI, blocks_OB), "not to q8_0"),
        (("q5_k", weight_OI, blocks_OB), r"rows has shape \[32, 288\]"),
        (("q4_k", weight_OI, blocks_OB, torch.ones(256)), r"importances has shape \[256\]"),
        (("q4_k", weight_OI, blocks_OB, torch.ones(512).double()), "importances is not of type float32"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.quantize_gguf(*arguments)
