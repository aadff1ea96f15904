"""Products of weights in types of GGUF equal sums that numpy computes from the gguf package's integers, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf_blocks import KINDS, factors_of, integers_of, random_blocks
from paged_steps import NATIVE, kernels, needs_kernels, settings_restored
from test_products import native_grouped, native_product
from torch import Tensor

from moeserve.ops.native import set_num_threads
from moeserve.ops.products.interface import InputChunks, OpenWeights, PackedWeights, RowGroups, StoredCodes, StoredRows
from moeserve.ops.rows.activations import SwiGLU

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with settings_restored():
        yield


def packed_of(
    blocks_eOB: dict[str, np.ndarray], num_inputs: int, *, chunk: int | None = None, first: int = 0, **options: object
) -> PackedWeights:
    """Pack weights [e, O, bytes], with the outputs of several types one after another."""
    packing = NATIVE.packing
    assert packing is not None
    rows = tuple(StoredRows(kind.lower(), blocks.shape[1]) for kind, blocks in blocks_eOB.items())
    num_weights = len(next(iter(blocks_eOB.values())))
    weights = OpenWeights(
        torch.empty(num_weights, sum(each.num_rows for each in rows), num_inputs, dtype=torch.bfloat16, device="meta"),
        chunks=None if chunk is None else InputChunks(chunk, keeps_float32=False),
        stored_rows=rows,
        **options,  # type: ignore[arg-type]
    )
    panels = torch.empty(num_weights, packing.num_bytes(weights, rows[0].format), dtype=torch.uint8)
    for slot in range(num_weights):
        row = 0
        for blocks in blocks_eOB.values():
            stored = StoredCodes(torch.from_numpy(blocks[slot]), first_input=first)
            assert packing.pack_stored(weights, panels[slot], row, stored)
            row += blocks.shape[1]
    return PackedWeights.from_panels(weights, rows[0].format, panels)


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c in float32, rounded once."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)  # the product is exact
    total = product + addend
    of_product = total - addend
    error = (product - of_product) + (addend - (total - of_product))  # of the sum, exactly (Knuth)
    is_even = total.view(np.int64) % 2 == 0  # round to odd, so that the next rounding does not depend on this one
    total = np.where((error != 0) & is_even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return total.astype(np.float32)


def expected_of(
    kind: str, blocks_OB: np.ndarray, rows_RI: np.ndarray, *, first: int = 0, chunk: int | None = None
) -> np.ndarray:
    """Return the products [R, O] of rows with all inputs from `first` on."""
    num_inputs = rows_RI.shape[1]
    stored = KINDS[kind][0]
    unit = math.gcd(stored, chunk or num_inputs)
    codes_OI, minima_OI = (each[:, first:] for each in integers_of(kind, blocks_OB))
    scales_OB, of_minima_OB = factors_of(kind, blocks_OB)
    sums = []
    for start in range(0, num_inputs, chunk or num_inputs):
        total_RO = np.zeros((len(rows_RI), len(blocks_OB)), np.float32)
        for k in range(start, min(start + (chunk or num_inputs), num_inputs), unit):
            values = rows_RI[:, k : k + unit]
            highest = np.abs(values).max(1)
            inverse = np.divide(np.float32(127), highest, out=np.zeros_like(highest), where=highest > 0)
            integers = np.rint(values.astype(np.float64) * inverse[:, None].astype(np.float64)).astype(np.int64)
            of_row = (highest * np.float32(1 / 127))[:, None]
            for weights_OI, factors, sign in ((codes_OI, scales_OB, 1), (minima_OI, of_minima_OB, -1)):
                dots = sign * (integers @ weights_OI[:, k : k + unit].T)
                assert np.abs(dots).max() < 2**31
                scale = factors[:, (first + k) // stored] * of_row
                total_RO = multiply_add(dots.astype(np.float32), scale, total_RO)
        sums.append(total_RO)
    while len(sums) > 1:  # neighbours first
        pairs = [sums[i : i + 2] for i in range(0, len(sums), 2)]
        sums = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return sums[0]


def assert_same(given: Tensor, expected: np.ndarray) -> None:
    assert np.array_equal(given.numpy().view(np.int32), (expected + 0.0).view(np.int32))


@pytest.mark.parametrize("chunk", [None, 512, 384, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_integers(isa: str, kind: str, chunk: int | None) -> None:
    """With any number of rows and threads, rows of any size, and outputs that do not fill a panel."""
    num_inputs = 256 if chunk == 32 else 1024
    blocks = random_blocks(kind, (1, 70, num_inputs))
    product = native_product(packed_of({kind: blocks}, num_inputs, chunk=chunk))
    generator = np.random.default_rng(1)
    rows_RI = generator.normal(size=(40, num_inputs)) * np.exp(generator.normal(size=(40, 1)) * 9)
    rows_RI[3] = 0
    rows_RI = rows_RI.astype(np.float32)
    expected = expected_of(kind, blocks[0], rows_RI, chunk=chunk)
    for num_threads in (1, 3):
        set_num_threads(num_threads)
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 40):
            assert_same(product.multiply(torch.from_numpy(rows_RI[:num_rows])), expected[:num_rows])


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_codes_and_rows_do_not_overflow(isa: str, kind: str) -> None:
    """All bytes of scales and codes alike, or two in turn, with rows of the largest values of either sign."""
    num_inputs = 512
    blocks = np.zeros_like(random_blocks(kind, (1, 32, num_inputs)))
    for n, byte in enumerate((0x00, 0xFF, 0x0F, 0xF0, 0x7F, 0x80, 0x81, 0x08, 0x3F, 0xC0)):
        blocks[0, n] = blocks[0, n + 10, ::2] = blocks[0, n + 20, 1::2] = byte
    for place in KINDS[kind][1:]:
        if place is not None:
            size = random_blocks(kind, (1, KINDS[kind][0])).shape[1]
            single = blocks.reshape(-1, size)
            single[:, place : place + 2] = np.float16([1.0]).view(np.uint8)
    product = native_product(packed_of({kind: blocks}, num_inputs))
    patterns = ([1], [-1], [1, -1], [-1, 1], [1, 1, -1, -1])
    rows_RI = np.float32([np.resize(pattern, num_inputs) for pattern in patterns])
    assert_same(product.multiply(torch.from_numpy(rows_RI * 127)), expected_of(kind, blocks[0], rows_RI * 127))


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_inputs_begins_inside_a_block(isa: str, kind: str) -> None:
    """A rank's share of 384 inputs is one and a half blocks of 256, so the second rank begins in the middle of one."""
    num_inputs, first = 768, 384
    blocks_OB = random_blocks(kind, (64, num_inputs))
    rows_RI = np.random.default_rng(1).normal(size=(3, num_inputs - first)).astype(np.float32)
    size = blocks_OB.shape[1] // (num_inputs // KINDS[kind][0])
    stored_OB = blocks_OB[:, first // KINDS[kind][0] * size :]
    packed = packed_of({kind: stored_OB[None]}, num_inputs - first, chunk=384, first=first % KINDS[kind][0])
    expected = expected_of(kind, blocks_OB, rows_RI, first=first, chunk=384)
    assert_same(native_product(packed).multiply(torch.from_numpy(rows_RI)), expected)


def test_parts_in_several_types(isa: str) -> None:
    parts = {kind: random_blocks(kind, (1, 64, 512), seed=n) for n, kind in enumerate(KINDS)}
    rows_RI = np.random.default_rng(1).normal(size=(3, 512)).astype(np.float32)
    expected = np.concatenate([expected_of(kind, blocks[0], rows_RI) for kind, blocks in parts.items()], axis=1)
    bias_eO = torch.arange(expected.shape[1], dtype=torch.float32)[None]
    given = native_product(packed_of(parts, 512, bias_eO=bias_eO)).multiply(torch.from_numpy(rows_RI))
    assert_same(given, expected + bias_eO.numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_experts_with_an_activation(isa: str, kind: str) -> None:
    """Gates and ups are parts of one weight, and rows belong to several weights."""
    blocks_eOB = random_blocks(kind, (3, 2 * 70, 512), std=0.05)
    gates, ups = blocks_eOB[:, :70], blocks_eOB[:, 70:]
    packing = NATIVE.packing
    assert packing is not None
    rows = (StoredRows(kind.lower(), 70),) * 2
    weights = OpenWeights(
        torch.empty(3, 140, 512, dtype=torch.bfloat16, device="meta"), activation=SwiGLU(), stored_rows=rows
    )
    panels = torch.empty(3, packing.num_bytes(weights, rows[0].format), dtype=torch.uint8)
    for slot in range(3):
        for row, part in ((0, gates), (70, ups)):
            assert packing.pack_stored(weights, panels[slot], row, StoredCodes(torch.from_numpy(part[slot])))
    rows_RI = np.random.default_rng(1).normal(size=(9, 512)).astype(np.float32)
    counts = [2, 0, 7]
    given = native_grouped(PackedWeights.from_panels(weights, rows[0].format, panels)).multiply(
        torch.from_numpy(rows_RI), RowGroups(torch.tensor(counts))
    )
    of_weight = np.split(rows_RI, np.cumsum(counts)[:-1])
    gate, up = (
        torch.from_numpy(np.concatenate([expected_of(kind, part[e], of_weight[e]) for e in (0, 2)])).double()
        for part in (gates, ups)
    )
    torch.testing.assert_close(given.double(), gate * gate.sigmoid() * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_finite_makes_its_row_nan(isa: str, kind: str) -> None:
    product = native_product(packed_of({kind: random_blocks(kind, (1, 64, 256))}, 256))
    for value in (float("nan"), float("inf")):
        rows_RI = torch.randn(3, 256)
        rows_RI[1, 70] = value
        assert product.multiply(rows_RI).isfinite().all(dim=1).tolist() == [True, False, True]


def test_refused_arguments() -> None:
    assert kernels is not None
    rows = torch.from_numpy(random_blocks("Q4_K", (32, 512)))
    panels = torch.empty(kernels.packed_bytes("q4_k", 32, 512), dtype=torch.uint8)
    assert kernels.pack_stored("q4_k", rows, panels, 512)
    for first_input, num_inputs in ((0, 256), (256, 512), (16, 512), (-256, 512)):
        given = panels[: kernels.packed_bytes("q4_k", 32, num_inputs)]
        with pytest.raises(ValueError, match="q4_k"):
            kernels.pack_stored("q4_k", rows, given, num_inputs, first_input=first_input)
    with pytest.raises(ValueError, match="groups of 32"):
        kernels.pack_stored("q4_k", rows, panels, 500)
    rows[7, 1] = 0x7C  # the factor is infinite
    assert not kernels.pack_stored("q4_k", rows, panels, 512)
