"""Products of weights in 8-bit blocks with DeepGEMM (https://github.com/deepseek-ai/DeepGEMM).

No other module imports the package `deep_gemm`, which `pip install sgl-deep-gemm` installs. DeepGEMM multiplies E4M3
codes and rounds the results to bfloat16. Rows have a float32 scale for each 128 values; weights have a float32 scale
for each block of 128 x 128:

- One weight: `fp8_gemm_nt`.
- Slots: `m_grouped_fp8_gemm_nt_masked`, which reads the number of rows of each weight on the GPU.
- Contiguous rows: `m_grouped_fp8_gemm_nt_contiguous`, where the rows of each weight begin at a multiple of an
  alignment. Rows are padded to this alignment while they are gathered, without copying the counts to the host.

DeepGEMM supports neither biases nor activations. A kernel of our own applies the activation afterwards, and also
quantises the results if another FP8 product reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moeserve.errors import SettingsError
from moeserve.ops.backend import Backend
from moeserve.ops.libraries import LibraryUnusable, capability, import_library, missing_part
from moeserve.ops.measured import FastestGroupedProduct, FastestProduct, is_ever_fastest, measured_on, product_key
from moeserve.ops.products.interface import Gather, GroupedProduct, OpenWeights, Product, RowGroups
from moeserve.ops.products.triton import activated
from moeserve.ops.rows.activations import kernel_arguments
from moeserve.ops.rows.interface import Rows
from moeserve.ops.rows.triton import quantize_rows

# Q padded rows, C columns, B blocks of inputs

logger = logging.getLogger(__name__)

MAJOR_CAPABILITY = 9  # on later GPUs, DeepGEMM rounds scales to powers of two, which our scales are not
BLOCK = 128  # values that share a scale, along rows and both dimensions of a weight
OUTPUT_MULTIPLE = 64  # numbers of outputs in DeepGEMM's own tests are multiples of this
NEEDS = {
    "fp8_gemm_nt": {"a", "b", "d"},
    "m_grouped_fp8_gemm_nt_contiguous": {"a", "b", "d", "grouped_layout"},
    "m_grouped_fp8_gemm_nt_masked": {"a", "b", "d", "masked_m", "expected_m"},
    "get_mk_alignment_for_contiguous_layout": set[str](),
}


@dataclass(frozen=True)
class DeepGemm:
    """The opened DeepGEMM library.

    Args:
        measured: the fastest implementation by product and number of rows. DeepGEMM runs only where it is the fastest.
            None: DeepGEMM runs all products.
    """

    package: ModuleType
    measured: Mapping[str, Mapping[int, str]] | None

    def product(self, weights: OpenWeights, make_own: Callable[[], Product]) -> Product:
        """Return the product with one weight of a supported shape."""
        if self.measured is None:
            return DeepGemmProduct(self.package, weights)
        if of_rows := self.measured.get(product_key(weights)):
            return FastestProduct({"triton": make_own(), "deep_gemm": DeepGemmProduct(self.package, weights)}, of_rows)
        return make_own()

    def grouped_product(self, weights: OpenWeights, make_own: Callable[[], GroupedProduct]) -> GroupedProduct:
        """Return the grouped product of weights of a supported shape."""
        theirs = DeepGemmGroupedProduct(self.package, weights)
        if self.measured is None:
            return theirs
        if of_rows := self.measured.get(product_key(weights)):
            return FastestGroupedProduct({"triton": make_own(), "deep_gemm": theirs}, of_rows)
        return make_own()


def with_deep_gemm(own: Backend, device: torch.device, dtype: torch.dtype, *, only_fastest: bool = False) -> Backend:
    """Return the backend, changed to compute products of 8-bit blocks with DeepGEMM where it supports their shapes.

    Args:
        only_fastest: use DeepGEMM only where it was measured to be the fastest on this GPU, and return `own` instead of
            raising an error if it cannot be used.

    Raises:
        SettingsError: DeepGEMM cannot be used on this machine.
    """
    if only_fastest and not is_ever_fastest("deep_gemm", device):
        return own
    try:
        if dtype != torch.bfloat16:
            raise LibraryUnusable(f"its results are in bfloat16, not in {dtype}")
        package = open_deep_gemm(device)
    except LibraryUnusable as error:
        if only_fastest:
            logger.info("products run on our kernels, although DeepGEMM was measured to be faster: %s", error)
            return own
        raise SettingsError(f"product_backend='deep_gemm' cannot be used: {error}. Use 'triton'") from None
    library = DeepGemm(package, measured_on(device) if only_fastest else None)
    return own.with_library("deep_gemm", library)


def open_deep_gemm(device: torch.device) -> ModuleType:
    """Return the package, if it is installed and supports this GPU.

    Raises:
        LibraryUnusable: DeepGEMM is not installed or does not support this GPU.
    """
    library = import_library("deep_gemm", "sgl-deep-gemm")
    if missing := missing_part(library, NEEDS):
        raise LibraryUnusable(f"this deep_gemm has no {missing}; pip install sgl-deep-gemm")
    found = capability(device)
    if found and found[0] != MAJOR_CAPABILITY:
        raise LibraryUnusable(f"it multiplies float32 scales on GPUs of capability 9.0, not {found[0]}.{found[1]}")
    return library


def why_unavailable(weights: OpenWeights) -> str | None:
    """Return why DeepGEMM cannot multiply these weights, as a clause; None if it can."""
    if weights.scales_eGB is None or weights.weight_eOI.dtype != torch.float8_e4m3fn:
        return "its weights are in 8-bit blocks"
    if weights.bias_eO is not None:
        return "it adds no bias"
    _, num_outputs, num_inputs = weights.weight_eOI.shape
    if num_inputs % BLOCK:
        return f"its rows have multiples of {BLOCK} values, not {num_inputs}"
    if num_outputs % OUTPUT_MULTIPLE:
        return f"its weights have multiples of {OUTPUT_MULTIPLE} outputs, not {num_outputs}"
    if weights.num_parts > 1 and num_outputs // weights.num_parts % BLOCK:
        return f"a block of its weights would hold gates and ups: {num_outputs // weights.num_parts} of each"
    return None


class DeepGemmProduct:
    """A `Product` with DeepGEMM."""

    def __init__(self, library: ModuleType, weights: OpenWeights) -> None:
        assert weights.scales_eGB is not None
        self._library = library
        self._weights = weights
        self._weight_and_scales = weights.weight_eOI[0], weights.scales_eGB[0]

    def multiply(self, input_TI: Rows) -> Any:
        rows = quantize_rows(input_TI)
        output_TO = rows.codes.new_empty(len(rows), self._weights.weight_eOI.shape[1], dtype=rows.dtype)
        if len(rows):
            self._library.fp8_gemm_nt(a=(rows.codes, rows.scales), b=self._weight_and_scales, d=output_TO)
        return _finished(self._weights, output_TO, None)


class DeepGemmGroupedProduct:
    """A `GroupedProduct` with DeepGEMM."""

    def __init__(self, library: ModuleType, weights: OpenWeights) -> None:
        self._library = library
        self._alignment = int(library.get_mk_alignment_for_contiguous_layout())
        self._weights = weights
        self._weights_and_scales = weights.weight_eOI, weights.scales_eGB
        self._num_outputs = weights.weight_eOI.shape[1]

    def multiply(
        self, rows_RI: Rows, groups: RowGroups, gather: Gather | None = None, out_RC: Tensor | None = None
    ) -> Any:
        assert out_RC is None, "these kernels allocate their results"
        counts_e = groups.counts_e
        rows = quantize_rows(rows_RI, counts_e if groups.has_spare_rows and gather is None else None)
        num_rows = len(rows) if gather is None else len(gather.indices_R)
        if not num_rows:
            return _finished(self._weights, rows.codes.new_empty(0, self._num_outputs, dtype=rows.dtype), counts_e)
        padded = pad_rows(counts_e, num_rows, self._alignment)
        sources_Q = padded.row_Q
        if gather is not None:  # indices of spare rows are -1
            sources_Q = gather.indices_R[sources_Q].clamp(min=0) // gather.divisor
        codes_QI = rows.codes.view(torch.uint8)[sources_Q].view(rows.codes.dtype)
        output_QO = rows.codes.new_empty(len(sources_Q), self._num_outputs, dtype=rows.dtype)
        self._library.m_grouped_fp8_gemm_nt_contiguous(
            a=(codes_QI, rows.scales[sources_Q]),
            b=self._weights_and_scales,
            d=output_QO,
            grouped_layout=padded.weight_Q,
        )
        return _finished(self._weights, output_QO[padded.place_R], counts_e)

    def multiply_slots(self, slots_eSI: Rows, groups: RowGroups) -> Any:
        counts_e = groups.counts_e
        slots = quantize_rows(slots_eSI, counts_e)
        num_weights, num_slots, _ = slots.codes.shape
        output_eSO = slots.codes.new_empty(num_weights, num_slots, self._num_outputs, dtype=slots.dtype)
        if output_eSO.numel():
            rows = num_weights * num_slots if groups.expected_rows is None else groups.expected_rows
            self._library.m_grouped_fp8_gemm_nt_masked(
                a=(slots.codes, slots.scales),
                b=self._weights_and_scales,
                d=output_eSO,
                masked_m=counts_e.to(torch.int32),
                expected_m=min(num_slots, max(1, -(-rows // num_weights))),
            )
        return _finished(self._weights, output_eSO, counts_e)


def _finished(weights: OpenWeights, output: Tensor, counts_e: Tensor | None) -> Any:
    """Apply the activation to outputs [R, O] or [e, S, O], and quantise them if an FP8 product reads them."""
    if weights.feeds_blocks:
        return quantize_rows(output, counts_e, **kernel_arguments(weights.activation))
    return activated(weights.activation, output)


@dataclass(frozen=True)
class PaddedRows:
    """The layout of rows ordered by weight, in which the rows of each weight begin at a multiple of an alignment."""

    weight_Q: Tensor  # int32: index of the weight of each padded row; -1: padding
    row_Q: Tensor  # int64: index of the row that is copied to each padded row; 0 for padding
    place_R: Tensor  # int64: index of the padded row of each row; arbitrary for spare rows


def pad_rows(counts_e: Tensor, num_rows: int, alignment: int) -> PaddedRows:
    """Return the padded layout of rows, without reading the counts on the host.

    Args:
        counts_e: number of rows of each weight, at most `num_rows` in all.
    """
    num_weights = len(counts_e)
    most = num_rows + min(num_weights, num_rows) * (alignment - 1)
    places_Q = torch.arange(-(-most // alignment) * alignment, device=counts_e.device)
    ends_e = counts_e.cumsum(0)
    aligned_e = (counts_e + alignment - 1) // alignment * alignment
    aligned_ends_e = aligned_e.cumsum(0)
    shift_e = (aligned_ends_e - aligned_e) - (ends_e - counts_e)  # index of the padded row minus index of the row
    weight_Q = torch.searchsorted(aligned_ends_e, places_Q, right=True).clamp(max=num_weights - 1)
    row_Q = places_Q - shift_e[weight_Q]
    is_row_Q = row_Q < ends_e[weight_Q]
    rows_R = torch.arange(num_rows, device=counts_e.device)
    weight_R = torch.searchsorted(ends_e, rows_R, right=True).clamp(max=num_weights - 1)
    return PaddedRows(
        weight_Q=torch.where(is_row_Q, weight_Q, -1).to(torch.int32),
        row_Q=torch.where(is_row_Q, row_Q, 0),
        place_R=(rows_R + shift_e[weight_R]).clamp(max=len(places_Q) - 1),
    )
