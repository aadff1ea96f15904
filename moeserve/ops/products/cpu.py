"""Products of rows with packed weights by C++ kernels, and the packing of weights."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.native import NATIVE_DTYPES, is_measured
from moeserve.ops.products.interface import Gather, OpenWeights, PackedFormat, PackedWeights, RowGroups
from moeserve.ops.rows.activations import kernel_arguments

# C columns: the outputs, or half as many after a gated activation

MIN_LARGE_PAGES_BYTES = 2**22


def native_weights(native: ModuleType, packed: PackedWeights) -> Any:
    """Return packed weights as an object of the C++ kernels.

    A result's bytes depend only on its row, its weight and the instruction set: not on other rows, their number, or
    the number of threads.
    """
    return native.PackedWeights(
        packed.format,
        packed.panels,
        packed.num_outputs,
        packed.num_inputs,
        packed.bias_eO,
        **kernel_arguments(packed.activation),
        chunk_inputs=None if packed.chunks is None else packed.chunks.size,
    )


class CpuProduct:
    """A `Product` in C++."""

    def __init__(self, native: ModuleType, packed: PackedWeights) -> None:
        self._weights = native_weights(native, packed)
        self._num_columns, self._keeps_float32 = packed.num_columns, packed.keeps_float32

    def multiply(self, input_TI: Tensor) -> Tensor:
        dtype = torch.float32 if self._keeps_float32 else input_TI.dtype
        output_TC = new_empty(input_TI, len(input_TI), self._num_columns, dtype=dtype)
        if is_measured():
            return output_TC.zero_()
        self._weights.multiply(input_TI, output_TC)
        return output_TC


class CpuGroupedProduct:
    """A `GroupedProduct` in C++."""

    def __init__(self, native: ModuleType, packed: PackedWeights) -> None:
        self._weights = native_weights(native, packed)
        self._num_columns, self._keeps_float32 = packed.num_columns, packed.keeps_float32

    def multiply(
        self, rows_RI: Tensor, groups: RowGroups, gather: Gather | None = None, out_RC: Tensor | None = None
    ) -> Tensor:
        assert gather is None, "these kernels take gathered rows"
        if out_RC is None:
            dtype = torch.float32 if self._keeps_float32 else rows_RI.dtype
            out_RC = new_empty(rows_RI, len(rows_RI), self._num_columns, dtype=dtype)
        if is_measured():
            return out_RC.zero_()
        self._weights.multiply_rows(rows_RI, groups.counts_e, groups.has_spare_rows, out_RC)
        return out_RC

    def multiply_slots(self, slots_eSI: Tensor, groups: RowGroups) -> Tensor:
        is_used_eS = torch.arange(slots_eSI.shape[1]) < groups.counts_e[:, None]
        output_eSC = slots_eSI.new_zeros(*slots_eSI.shape[:2], self._num_columns)
        output_eSC[is_used_eS] = self.multiply(slots_eSI[is_used_eS], groups)
        return output_eSC


class CpuHeadProduct:
    """A `HeadProduct` in C++."""

    def __init__(self, native: ModuleType, packed: PackedWeights) -> None:
        self._weights = native_weights(native, packed)
        self._num_columns = packed.num_columns

    def multiply(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        if out_TeC is None:
            out_TeC = new_empty(input_TeI, *input_TeI.shape[:2], self._num_columns)
        if is_measured():
            return out_TeC.zero_()
        self._weights.multiply_each(input_TeI, out_TeC)
        return out_TeC


class CpuPacking:
    """The packing of open weights in the order in which the C++ kernels read them."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native

    def supports(self, weights: OpenWeights) -> bool:
        has_format = weights.weight_eOI.dtype in NATIVE_DTYPES or weights.is_mxfp4
        return has_format and weights.weight_eOI.numel() > 0

    def num_bytes(self, weights: OpenWeights, packed_format: PackedFormat) -> int:
        """Return the bytes of each packed weight."""
        num_outputs, num_inputs = weights.weight_eOI.shape[1], weights.num_inputs
        chunk_inputs = None if weights.chunks is None else weights.chunks.size
        return int(self._native.packed_bytes(packed_format, num_outputs, num_inputs, weights.num_parts, chunk_inputs))

    def fits_in_place(self, weights: OpenWeights, packed_format: PackedFormat) -> bool:
        """Return True if packed weights have the size and number format of the open ones."""
        is_same_format = packed_format == str(weights.weight_eOI.dtype).removeprefix("torch.")
        return is_same_format and self.num_bytes(weights, packed_format) == weights.weight_eOI[0].nbytes

    def pack(self, weights: OpenWeights, packed_format: PackedFormat, *, in_place: bool) -> PackedWeights:
        """Return the packed weights, in new memory or, if `in_place`, in the memory of the open weights."""
        weight_eOI, size = weights.weight_eOI, self.num_bytes(weights, packed_format)
        if in_place:
            assert self.fits_in_place(weights, packed_format)
            panels = weight_eOI.data.view(torch.uint8).view(len(weight_eOI), size)
        else:
            panels = self.allocate_weights((len(weight_eOI), size), torch.uint8, weight_eOI.device)
        if weights.is_mxfp4:
            assert weights.scales_eGB is not None
            assert weights.chunks is None, "experts in MXFP4 are never divided by inputs"
            for codes_OI, scales_OG, panel in zip(weight_eOI, weights.scales_eGB, panels, strict=True):
                self._native.pack_mxfp4(codes_OI, scales_OG, panel, weights.num_parts)
            return PackedWeights.from_panels(weights, packed_format, panels)
        chunk_inputs = None if weights.chunks is None else weights.chunks.size
        scales_eOG = weights.int4_scales_eOG if packed_format == "int4" else None
        for index, (weight_OI, panel) in enumerate(zip(weight_eOI, panels, strict=True)):
            scales_OG = None if scales_eOG is None else scales_eOG[index]
            self._native.pack_weight(packed_format, weight_OI, panel, weights.num_parts, chunk_inputs, scales_OG)
        return PackedWeights.from_panels(weights, packed_format, panels)

    def allocate_weights(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for weights, in large pages if the system supports them."""
        memory = torch.empty(shape, dtype=dtype, device=device)
        if memory.nbytes >= MIN_LARGE_PAGES_BYTES:
            self._native.advise_large_pages(memory)
        return memory
