"""Products of rows with packed weights by C++ kernels, and the packing of weights."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.measured_step import is_measured
from moeserve.ops.native import NATIVE_DTYPES
from moeserve.ops.products.interface import Gather, OpenWeights, PackedFormat, PackedWeights
from moeserve.ops.rows.activations import kernel_arguments

# T tokens, R rows sorted by weight, S slots of each weight, e weights side by side, I inputs, O outputs, C columns:
# the outputs, or half as many after a gated activation

MIN_LARGE_PAGES_BYTES = 2**22


class CpuProduct:
    """A batch-invariant `Product` in C++.

    A result's bytes depend only on its row, its weight and the instruction set: not on other rows, their number, or
    the number of threads.
    """

    def __init__(self, native: ModuleType, packed: PackedWeights) -> None:
        self.num_columns = packed.num_outputs // packed.num_parts
        self.keeps_float32 = packed.chunks is not None and packed.chunks.keeps_float32
        self.weights = native.PackedWeights(
            packed.format,
            packed.panels,
            packed.num_outputs,
            packed.num_inputs,
            packed.bias_eO,
            **kernel_arguments(packed.activation),
            chunk_inputs=None if packed.chunks is None else packed.chunks.size,
        )

    def multiply(self, input_TI: Tensor) -> Tensor:
        dtype = torch.float32 if self.keeps_float32 else input_TI.dtype
        output_TC = new_empty(input_TI, len(input_TI), self.num_columns, dtype=dtype)
        if is_measured():
            return output_TC.zero_()
        self.weights.multiply(input_TI, output_TC)
        return output_TC

    def multiply_rows(
        self,
        rows_RI: Tensor,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
        out_RC: Tensor | None = None,
    ) -> Tensor:
        assert gather is None, "these kernels take gathered rows"
        dtype = torch.float32 if self.keeps_float32 else rows_RI.dtype
        output_RC = new_empty(rows_RI, len(rows_RI), self.num_columns, dtype=dtype) if out_RC is None else out_RC
        if is_measured():
            return output_RC.zero_()
        self.weights.multiply_rows(rows_RI, counts_e, has_spare_rows, output_RC)
        return output_RC

    def multiply_slots(self, slots_eSI: Tensor, counts_e: Tensor, expected_rows: int | None = None) -> Tensor:
        is_used_eS = torch.arange(slots_eSI.shape[1]) < counts_e[:, None]
        output_eSC = slots_eSI.new_zeros(*slots_eSI.shape[:2], self.num_columns)
        output_eSC[is_used_eS] = self.multiply_rows(slots_eSI[is_used_eS], counts_e)
        return output_eSC

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        if out_TeC is None:
            out_TeC = new_empty(input_TeI, *input_TeI.shape[:2], self.num_columns)
        if is_measured():
            return out_TeC.zero_()
        self.weights.multiply_each(input_TeI, out_TeC)
        return out_TeC


class CpuPacking:
    """A `WeightPacking` in C++. It also allocates weights, in large pages if the system supports them."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native

    def supports(self, weights: OpenWeights) -> bool:
        has_format = weights.weight_eOI.dtype in NATIVE_DTYPES or weights.is_mxfp4
        return has_format and weights.weight_eOI.numel() > 0

    def num_bytes(self, weights: OpenWeights, packed_format: PackedFormat) -> int:
        num_outputs, num_inputs = weights.weight_eOI.shape[1], weights.num_inputs
        chunk_inputs = None if weights.chunks is None else weights.chunks.size
        return int(self._native.packed_bytes(packed_format, num_outputs, num_inputs, weights.num_parts, chunk_inputs))

    def fits_in_place(self, weights: OpenWeights, packed_format: PackedFormat) -> bool:
        is_same_format = packed_format == str(weights.weight_eOI.dtype).removeprefix("torch.")
        return is_same_format and self.num_bytes(weights, packed_format) == weights.weight_eOI[0].nbytes

    def pack(self, weights: OpenWeights, packed_format: PackedFormat, *, in_place: bool) -> PackedWeights:
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

    def product(self, packed: PackedWeights) -> CpuProduct:
        return CpuProduct(self._native, packed)

    def allocate_weights(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = torch.empty(shape, dtype=dtype, device=device)
        if memory.nbytes >= MIN_LARGE_PAGES_BYTES:
            self._native.advise_large_pages(memory)
        return memory
