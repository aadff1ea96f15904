"""Products of weights that stay in FP8 have the bytes of products with the dequantised weights in bfloat16."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from paged_steps import NATIVE, kernels, needs_kernels, settings_restored
from test_products import native_grouped, native_product, packed_copy
from torch import Tensor

from moeserve.ops.native import set_num_threads
from moeserve.ops.products.interface import (
    InputChunks,
    OpenWeights,
    PackedWeights,
    RowGroups,
    StoredCodes,
    StoredRows,
)
from moeserve.ops.rows.activations import Activation, SwiGLU

pytestmark = needs_kernels

CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)  # all but NaN
SCALES = [1.0, 2.0**-9, 0.0123, -3.7e-3, 0.1 + 2**-20, 200.0, 1e-30, 1e-33, 0.0]
Alike = Literal["all", "rows of a block", "none"]  # outputs with the same scale


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with settings_restored():
        yield


def decoded(codes: Tensor, scales: Tensor, unit: int) -> Tensor:
    """Return the weights in bfloat16, as loading dequantises them."""
    values = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(unit, -1)[..., : codes.shape[-1]]
    return values.bfloat16()


def make(
    num_weights: int,
    num_outputs: int,
    num_inputs: int,
    alike: Alike = "all",
    *,
    chunk: int | None = None,
    activation: Activation | None = None,
) -> tuple[PackedWeights, PackedWeights]:
    """Return random weights in FP8, and the same dequantised."""
    packing = NATIVE.packing
    assert packing is not None
    unit = next(size for size in (128, 64, 32) if (chunk or num_inputs) % size == 0)
    codes = CODES[torch.randint(len(CODES), (num_weights, num_outputs, num_inputs))]
    height = {"all": num_outputs, "rows of a block": 40, "none": 1}[alike]
    scales = torch.rand(num_weights, -(-num_outputs // height), num_inputs // unit).add(0.5).mul(num_inputs**-0.5 / 200)
    scales = scales.repeat_interleave(height, 1)[:, :num_outputs].contiguous()
    bias = torch.randn(num_weights, num_outputs).bfloat16()
    chunks = None if chunk is None else InputChunks(chunk, keeps_float32=False)
    num_parts = 1 if activation is None else 2
    rows = (StoredRows("fp8", num_outputs // num_parts),) * num_parts
    shape = OpenWeights(
        torch.empty(codes.shape, dtype=torch.bfloat16, device="meta"), bias, activation, None, chunks, stored_rows=rows
    )
    panels = torch.empty(num_weights, packing.num_bytes(shape, "fp8"), dtype=torch.uint8)
    for slot, part in itertools.product(range(num_weights), range(num_parts)):
        own = slice(part * rows[0].num_rows, (part + 1) * rows[0].num_rows)
        stored = StoredCodes(codes[slot, own], scales[slot, own])
        assert packing.pack_stored(shape, panels[slot], own.start, stored)
    open_weights = OpenWeights(decoded(codes, scales, unit), bias, activation, chunks=chunks)
    return PackedWeights.from_panels(shape, "fp8", panels), packed_copy(open_weights, "bfloat16")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("is_alone", [False, True])
def test_all_codes(isa: str, scale: float, is_alone: bool) -> None:
    """A row that is 1 at one input, and else 0, has the weights of that input as results."""
    packing = NATIVE.packing
    assert packing is not None
    codes_OI = CODES.repeat(64)[: 128 * 126].view(126, 128).roll(1, 0)
    scales_O1 = torch.full((126, 1), scale)
    if is_alone:
        scales_O1[7] *= 1.5
    shape = OpenWeights(torch.empty(1, 126, 128, device="meta").bfloat16(), stored_rows=(StoredRows("fp8", 126),))
    panels = torch.empty(1, packing.num_bytes(shape, "fp8"), dtype=torch.uint8)
    assert packing.pack_stored(shape, panels[0], 0, StoredCodes(codes_OI, scales_O1))
    given_IO = native_product(PackedWeights.from_panels(shape, "fp8", panels)).multiply(torch.eye(128).bfloat16())
    expected_OI = decoded(codes_OI, scales_O1, 128)
    assert len(torch.unique(codes_OI)) == len(CODES)
    assert torch.equal(given_IO.T, expected_OI)


@pytest.mark.parametrize("chunk", [None, 256, 192, 32])
@pytest.mark.parametrize("alike", ["all", "rows of a block", "none"])
def test_products_have_the_bytes_of_dequantised_weights(isa: str, alike: Alike, chunk: int | None) -> None:
    """With any number of rows and threads, and outputs that do not fill a panel."""
    num_inputs = {None: 640, 256: 640, 192: 576, 32: 160}[chunk]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        in_fp8, in_bfloat16 = map(native_product, make(1, 70, num_inputs, alike, chunk=chunk))
        rows_RI = torch.randn(200, num_inputs).bfloat16()
    for num_threads in (1, 3):
        set_num_threads(num_threads)
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 40, 200):
            given = in_fp8.multiply(rows_RI[:num_rows])
            assert torch.equal(given, in_bfloat16.multiply(rows_RI[:num_rows])), num_rows


def test_gated_experts_have_the_bytes_of_dequantised_weights(isa: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        in_fp8, in_bfloat16 = map(native_grouped, make(4, 2 * 70, 256, "rows of a block", activation=SwiGLU()))
        rows_RI = torch.randn(60, 256).bfloat16()
    groups = RowGroups(torch.tensor([1, 0, 9, 50]))
    assert torch.equal(in_fp8.multiply(rows_RI, groups), in_bfloat16.multiply(rows_RI, groups))


def test_refused_arguments() -> None:
    assert kernels is not None
    codes, scales = torch.zeros(32, 256, dtype=torch.uint8), torch.ones(32, 2)
    panels = torch.empty(kernels.packed_bytes("fp8", 32, 256), dtype=torch.uint8)
    assert kernels.pack_stored("fp8", codes, panels, 256, scales=scales)
    with pytest.raises(ValueError, match="needs scales"):
        kernels.pack_stored("fp8", codes, panels, 256)
    with pytest.raises(ValueError, match="scales has shape"):
        kernels.pack_stored("fp8", codes, panels, 256, scales=scales[:, :1].contiguous())
    with pytest.raises(ValueError, match="fp8"):
        kernels.pack_stored("fp8", codes[:, 1:], panels, 256, scales=scales)
    size = kernels.packed_bytes("fp8", 32, 160, chunk_inputs=128)
    with pytest.raises(ValueError, match="fp8"):
        kernels.pack_stored("fp8", codes[:, :160], panels[:size], 160, chunk_inputs=128, scales=scales)
    for code in (0x7F, 0xFF):
        codes[31, 255] = code
        assert not kernels.pack_stored("fp8", codes, panels, 256, scales=scales)
    codes[31, 255], scales[31, 1] = 0, float("inf")
    assert not kernels.pack_stored("fp8", codes, panels, 256, scales=scales)
