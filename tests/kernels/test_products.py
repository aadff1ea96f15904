"""Packed weights and their products against float64."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
from packed_panels import unpacked
from paged_steps import INSTRUCTION_SETS, NATIVE, kernels, needs_kernels, same_bytes, settings_restored
from torch import Tensor
from torch.nn import functional

from moeserve.ops import products as products_ops
from moeserve.ops.native import set_num_threads
from moeserve.ops.products.cpu import native_weights
from moeserve.ops.products.interface import (
    Gather,
    GroupedProduct,
    InputChunks,
    OpenWeights,
    PackedFormat,
    PackedWeights,
    Product,
    RowGroups,
)
from moeserve.ops.products.reference import TorchGroupedProduct, TorchHeadProduct
from moeserve.ops.rows.activations import (
    Activation,
    CappedSwiGLU,
    ClampedSwiGLU,
    GeGLU,
    LimitedSwiGLU,
    SquaredReLU,
    SwiGLU,
    num_parts_of,
)

pytestmark = needs_kernels

FORMATS: tuple[PackedFormat, ...] = ("float32", "bfloat16", "int8", "int4")
ACTIVATIONS: tuple[Activation | None, ...] = (
    None,
    SwiGLU(),
    ClampedSwiGLU(alpha=1.7, limit=0.8),
    LimitedSwiGLU(0.8),
    SquaredReLU(),
    GeGLU(),
    CappedSwiGLU(alpha=0.7, limit=1.9),
)
ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 2**-8}  # of the largest result


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with settings_restored():
        yield


def dtypes_of(packed_format: PackedFormat) -> tuple[torch.dtype, ...]:
    """Return the types of the rows that the format supports."""
    if packed_format in ("float32", "bfloat16"):
        return (getattr(torch, packed_format),)
    return torch.float32, torch.bfloat16


CASES = [(packed_format, dtype) for packed_format in FORMATS for dtype in dtypes_of(packed_format)]


def make(
    num_weights: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    activation: Activation | None = None,
    chunks: InputChunks | None = None,
) -> OpenWeights:
    weight_eOI = torch.randn(num_weights, num_outputs, num_inputs).mul(num_inputs**-0.5).to(dtype)
    bias_eO = torch.randn(num_weights, num_outputs).to(dtype) if has_bias else None
    return OpenWeights(weight_eOI, bias_eO, activation, chunks=chunks)


def packed_copy(weights: OpenWeights, packed_format: PackedFormat) -> PackedWeights:
    packing = NATIVE.packing
    assert packing is not None
    copy = dataclasses.replace(weights, weight_eOI=weights.weight_eOI.clone())
    if packed_format == "int4" and copy.int4_scales_eOG is None:
        copy = dataclasses.replace(copy, int4_scales_eOG=_int4_scales(copy.weight_eOI))
    return packing.pack(copy, packed_format, in_place=False)


def _int4_scales(weight_eOI: torch.Tensor) -> torch.Tensor:
    """Scales [e, O, G] of even steps over the range of each group."""
    padded = torch.nn.functional.pad(weight_eOI.float(), (0, -weight_eOI.shape[2] % 32)).unflatten(2, (-1, 32))
    return ((padded.amax(-1) - padded.amin(-1)) / 14).half()


def native_product(packed: PackedWeights) -> Product:
    return products_ops.SINGLE.of_packed(NATIVE.native, packed)


def native_grouped(packed: PackedWeights) -> GroupedProduct:
    return products_ops.GROUPED.of_packed(NATIVE.native, packed)


def quantized(rows_RI: Tensor) -> Tensor:
    """Return the rows rounded to 8 bits as csrc/cpu/quantized_rows.h describes it, in float64."""
    rows = functional.pad(rows_RI.float(), (0, -rows_RI.shape[1] % 32)).unflatten(1, (-1, 32))
    highest = rows.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(highest, 127) / highest  # 127 / highest rounds twice
    steps = (rows.double() * inverse.double()).round().nan_to_num(0)
    return (steps * (highest * (1 / 127)).double()).flatten(1)[:, : rows_RI.shape[1]]


def in_float64(rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, activation: Activation | None) -> Tensor:
    output = functional.linear(rows_RI.double(), weight_OI, None if bias_O is None else bias_O.double())
    return output if activation is None else activation(*output.chunk(num_parts_of(activation), dim=-1))


def assert_close(given: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert given.dtype == dtype
    error = (given.double() - expected).abs().max()
    assert error <= ROUNDING[dtype] * max(1.0, float(expected.abs().max())) * 2, error


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("packed_format", "dtype"), CASES)
def test_products(isa: str, packed_format: PackedFormat, dtype: torch.dtype, activation: Activation | None) -> None:
    """From no rows to more than an item has, with outputs and inputs that fill panels and that do not.

    The rows are parts of wider rows.
    """
    torch.manual_seed(0)
    for has_bias, num_outputs, num_inputs in [(True, 64, 64), (False, 66, 70), (True, 2, 5), (True, 96, 1100)]:
        weights = make(1, num_outputs, num_inputs, dtype, has_bias=has_bias, activation=activation)
        packed = packed_copy(weights, packed_format)
        product = native_product(packed)
        (weight_OI,) = unpacked(packed)
        bias_O = None if weights.bias_eO is None else weights.bias_eO[0]
        rows_RI = torch.randn(200, num_inputs + 9).to(dtype)[:, 9:]
        multiplied_RI = quantized(rows_RI) if packed_format in ("int8", "int4") else rows_RI
        expected = in_float64(multiplied_RI, weight_OI, bias_O, activation)
        for num_rows in (0, 1, 2, 6, 7, 31, 200):
            given = product.multiply(rows_RI[:num_rows])
            assert given.shape == expected[:num_rows].shape
            if num_rows:
                assert_close(given, expected[:num_rows], dtype)


@pytest.mark.parametrize("packed_format", ["float32", "bfloat16"])
def test_packing_only_moves_values(packed_format: PackedFormat) -> None:
    dtype = getattr(torch, packed_format)
    for num_outputs, num_inputs, activation in itertools.product((64, 70, 128), (64, 31), (None, SwiGLU())):
        weights = make(3, num_outputs, num_inputs, dtype, activation=activation)
        packed = packed_copy(weights, packed_format)
        assert torch.equal(unpacked(packed), weights.weight_eOI.double())


def test_packing_in_place_takes_no_memory() -> None:
    weights = make(2, 128, 64, torch.bfloat16)
    copy = weights.weight_eOI.clone()
    packing = NATIVE.packing
    assert packing is not None
    packed = packing.pack(weights, "bfloat16", in_place=True)
    assert packed.panels.data_ptr() == weights.weight_eOI.data_ptr()
    assert torch.equal(unpacked(packed), copy.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_within_half_a_step(dtype: torch.dtype) -> None:
    weights = make(2, 96, 130, dtype)
    weights.weight_eOI[0, 7] = 0
    weight_eOI = weights.weight_eOI.double()
    step_eO1 = weight_eOI.abs().amax(-1, keepdim=True) / 127
    error_eOI = (unpacked(packed_copy(weights, "int8")) - weight_eOI).abs()
    assert (error_eOI <= 0.5001 * step_eO1).all()


@pytest.mark.parametrize(("packed_format", "dtype"), CASES)
def test_bytes_of_a_row_do_not_depend_on_others_or_threads(
    isa: str, packed_format: PackedFormat, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    for num_outputs, num_inputs, activation in [(256, 384, None), (448, 1100, SwiGLU())]:
        weights = make(1, num_outputs, num_inputs, dtype, has_bias=True, activation=activation)
        product = native_product(packed_copy(weights, packed_format))
        rows_RI = torch.randn(200, num_inputs).to(dtype)
        set_num_threads(1)
        alone = torch.cat([product.multiply(row[None]) for row in rows_RI])
        for num_threads, num_rows in itertools.product((1, 2, 3), (2, 6, 7, 19, 200)):
            set_num_threads(num_threads)
            first = 200 - num_rows
            assert torch.equal(product.multiply(rows_RI[first:]), alone[first:]), (num_threads, num_rows)


def add_in_tree(parts: list[Tensor]) -> Tensor:
    """Return the sum of 1, 2, 4 or 8 parts, or of the first of as many: ((0 + 1) + (2 + 3)) + ..."""
    while len(parts) > 1:
        parts = [
            parts[first] + parts[first + 1] if first + 1 < len(parts) else parts[first]
            for first in range(0, len(parts), 2)
        ]
    return parts[0]


def product_of_chunks(
    whole: OpenWeights, packed_format: PackedFormat, chunks: range, chunk_size: int
) -> tuple[slice, Product]:
    """Return some inputs of a weight, and the partial product of a rank that has them."""
    inputs = slice(chunks.start * chunk_size, min(chunks.stop * chunk_size, whole.weight_eOI.shape[2]))
    part = OpenWeights(
        whole.weight_eOI[:, :, inputs].contiguous(),
        whole.bias_eO if chunks.start == 0 else None,
        chunks=InputChunks(chunk_size, keeps_float32=True),
    )
    return inputs, native_product(packed_copy(part, packed_format))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("packed_format", "dtype"), CASES)
def test_chunks_have_the_bytes_of_their_sums_on_any_number_of_ranks(
    isa: str, packed_format: PackedFormat, dtype: torch.dtype, has_bias: bool
) -> None:
    """Chunks that fill blocks and groups of inputs and chunks that do not; last chunks that are smaller or missing."""
    torch.manual_seed(7)
    sizes = [(64, 8 * 256, 256), (70, 8 * 32, 32), (32, 8 * 12, 12), (34, 8 * 13, 13), (96, 7 * 40 + 3, 40)]
    for num_outputs, num_inputs, chunk_size in [*sizes, (32, 5 * 16 + 1, 16), (33, 3 * 96, 96), (64, 70, 70)]:
        if packed_format == "int4" and chunk_size % 32 and chunk_size < num_inputs:
            continue  # its scales are those of whole groups
        chunks = InputChunks(chunk_size, keeps_float32=False)
        whole = make(1, num_outputs, num_inputs, dtype, has_bias=has_bias, chunks=chunks)
        product = native_product(packed_copy(whole, packed_format))
        rows_RI = torch.randn(200, num_inputs + 6).to(dtype)[:, 6:]
        num_chunks = -(-num_inputs // chunk_size)
        for num_rows, num_ranks in itertools.product((1, 6, 7, 200), (2, 4, 8)):
            rows = rows_RI[:num_rows]
            parts: list[Tensor] = []
            for rank in range(num_ranks):
                of_rank = range(8 * rank // num_ranks, min(8 * (rank + 1) // num_ranks, num_chunks))
                if of_rank:
                    inputs, of_chunks = product_of_chunks(whole, packed_format, of_rank, chunk_size)
                    parts.append(of_chunks.multiply(rows[:, inputs]))
            assert all(part.dtype == torch.float32 for part in parts)
            assert torch.equal(product.multiply(rows), add_in_tree(parts).to(dtype)), (num_inputs, num_rows, num_ranks)
            if num_ranks == 8 and num_chunks > 3:
                in_order = functools.reduce(torch.add, parts)
                assert num_rows < 200 or not torch.equal(in_order, add_in_tree(parts)), "the order must matter here"


def test_a_rank_without_inputs_has_partial_sums_of_zero() -> None:
    weights = OpenWeights(torch.empty(1, 5, 0).bfloat16(), chunks=InputChunks(3, keeps_float32=True))
    product = products_ops.SINGLE.make(NATIVE, weights)
    assert torch.equal(product.multiply(torch.empty(2, 0).bfloat16()), torch.zeros(2, 5))


@pytest.mark.parametrize(("packed_format", "dtype"), CASES)
def test_chunks_are_packed_as_weights_of_their_own(packed_format: PackedFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    for num_inputs, chunk_size in ((8 * 64, 64), (8 * 12, 12), (7 * 5, 10)):
        if packed_format == "int4" and chunk_size % 32:
            continue  # its scales are those of whole groups
        whole = make(2, 64, num_inputs, dtype, chunks=InputChunks(chunk_size, keeps_float32=False))
        panels_ePB = packed_copy(whole, packed_format).panels.view(2, 2, -1)
        chunks = [
            packed_copy(OpenWeights(part.contiguous()), packed_format).panels.view(2, 2, -1)
            for part in whole.weight_eOI.split(chunk_size, dim=2)
        ]
        assert torch.equal(panels_ePB, torch.cat(chunks, dim=2))


@pytest.mark.parametrize(
    ("packed_format", "dtype", "digest"),
    [
        ("int8", torch.float32, "8eeb0c0d553b0d97"),
        ("int8", torch.bfloat16, "798ef036aa296142"),
        ("int4", torch.float32, "5e95157c5a7525d4"),
        ("int4", torch.bfloat16, "78dec0ed956e1f63"),
    ],
)
def test_quantized_products_have_the_same_bytes_with_every_instruction_set(
    packed_format: PackedFormat, dtype: torch.dtype, digest: str
) -> None:
    """The digests are those of x86-64 and of ARM. Random integers are the same on all processors."""
    assert kernels is not None
    torch.manual_seed(2)
    weight_eOI, bias_eO = torch.randint(-128, 129, (1, 96, 300)) / 1024, torch.randint(-128, 129, (1, 96)) / 64
    weights = OpenWeights(weight_eOI.to(dtype), bias_eO.to(dtype), None)
    rows_RI = (torch.randint(-128, 129, (40, 300)) * 2.0 ** torch.randint(-10, 10, (300,))).to(dtype)
    for isa in INSTRUCTION_SETS:
        kernels.set_isa(isa)
        product = native_product(packed_copy(weights, packed_format))
        output = torch.cat([product.multiply(rows_RI), product.multiply(rows_RI[:3])])
        assert hashlib.sha256(output.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] == digest, isa


@pytest.mark.parametrize(("packed_format", "dtype"), CASES)
def test_a_value_that_is_not_finite_makes_its_row_nan_or_infinite(
    isa: str, packed_format: PackedFormat, dtype: torch.dtype
) -> None:
    """The engine ends requests with such rows, so no kernel may hide them."""
    product = native_product(packed_copy(make(1, 64, 96, dtype), packed_format))
    for value in (float("nan"), float("inf"), -float("inf")):
        rows_RI = torch.randn(3, 96).to(dtype)
        rows_RI[1, 70] = value
        is_finite_R = product.multiply(rows_RI).isfinite().all(dim=1)
        assert is_finite_R.tolist() == [True, False, True]


def rows_and_counts(counts: list[int], num_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(sum(counts), num_inputs).to(dtype), torch.tensor(counts, dtype=torch.int64)


@pytest.mark.parametrize("counts", [[4, 0, 3, 40], [0, 0, 0, 0], [0, 0, 250, 0]])
@pytest.mark.parametrize(("packed_format", "dtype"), CASES)
def test_each_of_several_weights_has_the_bytes_of_its_own_product(
    packed_format: PackedFormat, dtype: torch.dtype, counts: list[int]
) -> None:
    """Products of rows, of slots, and of an input of each weight."""
    torch.manual_seed(sum(counts))
    weights = make(4, 96, 64, dtype, has_bias=True, activation=SwiGLU())
    packed = packed_copy(weights, packed_format)
    product = native_grouped(packed)
    ones = [
        native_product(packed_copy(OpenWeights(weight[None], bias[None], weights.activation), packed_format))
        for weight, bias in zip(weights.weight_eOI, weights.bias_eO, strict=True)  # type: ignore[arg-type]
    ]
    rows_RI, counts_e = rows_and_counts(counts, 64, dtype)
    expected = [one.multiply(rows) for one, rows in zip(ones, rows_RI.split(counts), strict=True)]
    assert torch.equal(product.multiply(rows_RI, RowGroups(counts_e)), torch.cat(expected))
    with_more_RI = torch.cat([rows_RI, torch.full((3, 64), float("nan"), dtype=dtype)])
    assert torch.equal(product.multiply(with_more_RI, RowGroups(counts_e, True))[: len(rows_RI)], torch.cat(expected))

    slots_eSI = torch.full((4, max(counts) + 1, 64), float("nan"), dtype=dtype)
    for slots, rows in zip(slots_eSI, rows_RI.split(counts), strict=True):
        slots[: len(rows)] = rows
    slotted = product.multiply_slots(slots_eSI, RowGroups(counts_e))
    for given, rows in zip(slotted, expected, strict=True):
        assert torch.equal(given[: len(rows)], rows)

    input_TeI = torch.randn(5, 4, 64).to(dtype)
    each = products_ops.PER_HEAD.of_packed(NATIVE.native, packed).multiply(input_TeI)
    for weight, one in enumerate(ones):
        assert torch.equal(each[:, weight], one.multiply(input_TeI[:, weight].contiguous()))


@pytest.mark.parametrize(("packed_format", "dtype"), CASES)
def test_gathered_rows_have_the_bytes_of_their_copies(packed_format: PackedFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    counts_e, top_k = torch.tensor([3, 0, 9, 2]), 2
    for num_inputs, chunks in [(64, None), (70, None), (256, InputChunks(64, keeps_float32=True))]:
        product = native_grouped(packed_copy(make(4, 66, num_inputs, dtype, chunks=chunks), packed_format))
        source_TI = torch.randn(7, num_inputs + 5).to(dtype)[:, :num_inputs]
        gather = Gather(torch.randint(0, 7 * top_k, (14,)), top_k)
        groups = RowGroups(counts_e)
        expected = product.multiply(source_TI[gather.indices_R // top_k].contiguous(), groups)
        assert same_bytes(product.multiply(source_TI, groups, gather), expected)
    with pytest.raises(ValueError, match="indices are out of range"):
        product.multiply(source_TI, groups, gather._replace(indices_R=gather.indices_R + 14))


def test_one_thread_can_skip_products() -> None:
    """The thread that measures the memory of a step skips them while others serve."""
    product = native_grouped(packed_copy(make(2, 64, 32, torch.float32), "float32"))
    rows_RI, counts_e = rows_and_counts([3, 5], 32, torch.float32)
    groups = RowGroups(counts_e)
    expected = product.multiply(rows_RI, groups)
    of_another: list[Tensor] = []
    with NATIVE.measure_memory_only():
        left_out = product.multiply(rows_RI, groups)
        other = threading.Thread(target=lambda: of_another.append(product.multiply(rows_RI, groups)))
        other.start()
        other.join()
    assert left_out.shape == expected.shape
    assert not left_out.any()
    assert torch.equal(of_another[0], expected)
    assert torch.equal(product.multiply(rows_RI, groups), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_and_kernels_agree(dtype: torch.dtype, activation: Activation | None) -> None:
    torch.manual_seed(5)
    weights = make(3, 64, 48, dtype, has_bias=True, activation=activation)
    packed = packed_copy(weights, _same(dtype))
    rows_RI, counts_e = rows_and_counts([3, 0, 5], 48, dtype)
    slots_eSI, input_TeI = torch.randn(3, 6, 48).to(dtype), torch.randn(4, 3, 48).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    groups = RowGroups(counts_e)
    reference, given = TorchGroupedProduct(weights), native_grouped(packed)
    for one, other in (
        (given.multiply(rows_RI, groups), reference.multiply(rows_RI, groups)),
        (given.multiply_slots(slots_eSI, groups)[0, :3], reference.multiply_slots(slots_eSI, groups)[0, :3]),
        (given.multiply_slots(slots_eSI, groups)[2, :5], reference.multiply_slots(slots_eSI, groups)[2, :5]),
        (
            products_ops.PER_HEAD.of_packed(NATIVE.native, packed).multiply(input_TeI),
            TorchHeadProduct(weights).multiply(input_TeI),
        ),
    ):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def _same(dtype: torch.dtype) -> PackedFormat:
    return "float32" if dtype == torch.float32 else "bfloat16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(input_=torch.zeros(2, 31)), r"input has shape \[2, 31\], expected \[2, 32\]"),
        (dict(input_=torch.zeros(2, 32, dtype=torch.bfloat16)), "input is not of type float32"),
        (dict(input_=torch.zeros(32, 2).T), "input is not contiguous"),
        (dict(output=torch.zeros(2, 63)), r"output has shape \[2, 63\], expected \[2, 64\]"),
        (dict(output=torch.zeros(2, 64, dtype=torch.bfloat16)), "output is not of type input's"),
        (dict(output=torch.zeros(2, 64, dtype=torch.int32)), "output is not of type input's"),
        (dict(counts=torch.tensor([1])), "counts add up to 1, but input has 2 rows"),
        (dict(counts=torch.tensor([3])), "counts do not fit the 2 rows of input"),
        (dict(counts=torch.tensor([-1])), "counts do not fit the 2 rows of input"),
        (dict(counts=torch.tensor([2], dtype=torch.int32)), "counts is not of type int64"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Tensor], message: str) -> None:
    weights = native_weights(NATIVE.native, packed_copy(make(1, 64, 32, torch.float32), "float32"))
    arguments = dict(input_=torch.zeros(2, 32), counts=torch.tensor([2]), output=torch.zeros(2, 64)) | change
    with pytest.raises(ValueError, match=message):
        weights.multiply_rows(arguments["input_"], arguments["counts"], False, arguments["output"])


def test_panels_of_another_size_are_refused() -> None:
    assert kernels is not None
    with pytest.raises(ValueError, match=r"panels has shape \[1, 100\], expected \[1, 8192\]"):
        kernels.PackedWeights("float32", torch.zeros(1, 100, dtype=torch.uint8), 64, 32)
    with pytest.raises(ValueError, match="'int3' is no format"):
        kernels.packed_bytes("int3", 64, 32)
    for chunk_inputs in (0, 3):
        with pytest.raises(ValueError, match=rf"chunk_inputs={chunk_inputs} does not divide 32 inputs into at most 8"):
            kernels.packed_bytes("float32", 64, 32, chunk_inputs=chunk_inputs)
