"""Products of rows with packed weights, computed by C++ kernels, and the packing of weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.native import NATIVE_DTYPES, is_measured
from moeserve.ops.products.interface import (
    PANEL_ROWS,
    Gather,
    InputChunks,
    OpenWeights,
    PackedFormat,
    PackedWeights,
    RowGroups,
    StoredCodes,
    StoredRows,
)
from moeserve.ops.rows.activations import kernel_arguments

# C columns: the outputs, or half as many after a gated activation

LARGE_PAGE_BYTES = 2**21
MIN_LARGE_PAGES_BYTES = 2**22
SHARED_BYTES = 2**25  # size of the memory that smaller weights share
NUM_READERS = 16  # threads that read experts; with fewer, some disks do not reach their rate


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
        self._parts = [
            (native_weights(native, part), start, start + part.num_columns) for start, part in _parts_of(native, packed)
        ]
        self._num_columns, self._keeps_float32 = packed.num_columns, packed.keeps_float32

    def multiply(self, input_TI: Tensor) -> Tensor:
        dtype = torch.float32 if self._keeps_float32 else input_TI.dtype
        output_TC = new_empty(input_TI, len(input_TI), self._num_columns, dtype=dtype)
        if is_measured():
            return output_TC.zero_()
        for weights, start, stop in self._parts:
            weights.multiply(input_TI, output_TC[:, start:stop])
        return output_TC


class CpuGroupedProduct:
    """A `GroupedProduct` in C++."""

    def __init__(self, native: ModuleType, packed: PackedWeights) -> None:
        self.weights = native_weights(native, packed)
        self._num_columns, self._keeps_float32 = packed.num_columns, packed.keeps_float32

    def new_output(self, rows_RI: Tensor, gather: Gather | None) -> Tensor:
        """Return memory for the results, [R, C]."""
        dtype = torch.float32 if self._keeps_float32 else rows_RI.dtype
        return new_empty(rows_RI, len(rows_RI if gather is None else gather.indices_R), self._num_columns, dtype=dtype)

    def multiply(
        self, rows_RI: Tensor, groups: RowGroups, gather: Gather | None = None, out_RC: Tensor | None = None
    ) -> Tensor:
        indices_R, divisor = gather or (None, 1)
        if out_RC is None:
            out_RC = self.new_output(rows_RI, gather)
        if is_measured():
            return out_RC.zero_()
        self.weights.multiply_rows(rows_RI, groups.counts_e, groups.has_spare_rows, out_RC, indices_R, divisor)
        return out_RC

    def multiply_slots(self, slots_eSI: Tensor, groups: RowGroups) -> Tensor:
        is_used_eS = torch.arange(slots_eSI.shape[1]) < groups.counts_e[:, None]
        output_eSC = slots_eSI.new_zeros(*slots_eSI.shape[:2], self._num_columns)
        output_eSC[is_used_eS] = self.multiply(slots_eSI[is_used_eS], groups)
        return output_eSC


class CpuExpertStore:
    """The experts of all layers, which are in a file. Some experts are in memory: see csrc/host/expert_store.h.

    Args:
        path: the file.
    """

    def __init__(self, native: ModuleType, path: str) -> None:
        self._native = native.ExpertStore(path, NUM_READERS)
        self._num_layers = 0

    def add_layer(
        self,
        gate_up: CpuGroupedProduct,
        down: CpuGroupedProduct,
        parts: Sequence[Sequence[tuple[int, int, int]]],
        num_slots: int,
    ) -> CpuStoredExperts:
        """Add the next layer, and return its products.

        Args:
            parts: offset, size in bytes and checksum of the weights of each expert, for gate_up and for down.
            num_slots: number of experts of the layer that are in memory at a time.
        """
        self._native.add_layer(*parts, num_slots)
        self._num_layers += 1
        return CpuStoredExperts(self._native, self._num_layers - 1, gate_up, down)

    def shrink(self, least_slots: int) -> None:
        """Halve the number of experts of each layer that are in memory at a time, but keep at least `least_slots`.

        The experts that were visited most often lately stay. The memory of the others goes back to the system.
        """
        self._native.shrink(least_slots)

    @property
    def num_slots(self) -> list[int]:
        """By layer: experts that are in memory at a time."""
        slots: list[int] = self._native.num_slots
        return slots

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the memory for experts."""
        return int(self._native.num_slot_bytes)

    @property
    def is_direct(self) -> bool:
        """False if the file system makes reads go through the page cache."""
        return bool(self._native.is_direct)

    def counters(self) -> list[tuple[int, int, int, int, int]]:
        """Return, for each layer, five totals.

        They are the experts found in memory, experts read, bytes read, nanoseconds waited for reads, and bytes of
        memory that `shrink` has given back.
        """
        counters: list[tuple[int, int, int, int, int]] = self._native.counters()
        return counters

    def totals(self) -> list[int]:
        """Return `counters` of all layers together."""
        return list(map(sum, zip(*self.counters(), strict=True)))

    def record(self, *, is_on: bool) -> list[tuple[int, list[int]]]:
        """Start or stop recording which experts layers need. Return the recorded layers, each with its experts."""
        numbers, found = iter(self._native.record(is_on)), []
        for layer in numbers:
            size = next(numbers)
            found.append((layer, list(itertools.islice(numbers, size))))
        return found

    def take_errors(self) -> list[str]:
        """Return messages about experts that could not be read since the last call."""
        errors: list[str] = self._native.take_errors()
        return errors


class CpuStoredExperts:
    """The two products of a layer's experts, one after the other. A store reads an expert when rows need it.

    Args:
        native: the kernels' `ExpertStore`.
        layer: the layer's number in the store.
    """

    def __init__(self, native: Any, layer: int, gate_up: CpuGroupedProduct, down: CpuGroupedProduct) -> None:
        self._native, self._layer, self._gate_up, self._down = native, layer, gate_up, down

    def multiply(self, rows_RI: Tensor, groups: RowGroups, gather: Gather | None, out_RC: Tensor | None) -> Tensor:
        """Return the results [R, C], with the same bytes as two `GroupedProduct` calls, one after the other.

        The rows of an expert that cannot be read are NaN.
        """
        indices_R, divisor = gather or (None, 1)
        gathered_RI = None if indices_R is None else new_empty(rows_RI, len(indices_R), rows_RI.shape[1])
        middle_RI = self._gate_up.new_output(rows_RI, gather)
        if out_RC is None:
            out_RC = self._down.new_output(middle_RI, None)
        if is_measured():
            for temporary in (gathered_RI, middle_RI):
                if temporary is not None:
                    temporary.zero_()  # so that its memory is counted
            return out_RC.zero_()
        self._native.multiply(
            self._layer,
            self._gate_up.weights,
            self._down.weights,
            rows_RI,
            groups.counts_e,
            groups.has_spare_rows,
            middle_RI,
            out_RC,
            indices_R,
            gathered_RI,
            divisor,
        )
        return out_RC


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


def _parts_of(native: ModuleType, packed: PackedWeights) -> Iterator[tuple[int, PackedWeights]]:
    """Yield the parts of the outputs that have different formats: the first output and the weights of each part."""
    if len({rows.format for rows in packed.stored_rows}) < 2:
        yield 0, packed
        return
    first, packing, panels_eB = 0, CpuPacking(native), packed.panels
    for rows in packed.stored_rows:
        size, end = packing.num_stored_bytes([rows], packed.num_inputs, packed.chunks), first + rows.num_rows
        yield (
            first,
            replace(
                packed,
                format=rows.format,
                panels=panels_eB[:, :size],
                num_outputs=rows.num_rows,
                bias_eO=None if packed.bias_eO is None else packed.bias_eO[:, first:end],
                stored_rows=(rows,),
            ),
        )
        first, panels_eB = end, panels_eB[:, size:]


class CpuPacking:
    """The packing of open weights in the order in which the C++ kernels read them."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self.stored_formats: frozenset[PackedFormat] = frozenset(native.stored_formats())  # formats that keep codes
        self._shared_B = torch.empty(0, dtype=torch.uint8)  # unused rest of the memory that small weights share

    def supports(self, weights: OpenWeights) -> bool:
        has_format = weights.weight_eOI.dtype in NATIVE_DTYPES or weights.is_mxfp4
        return has_format and weights.weight_eOI.numel() > 0

    def num_bytes(self, weights: OpenWeights, packed_format: PackedFormat) -> int:
        """Return the size in bytes of each packed weight."""
        num_outputs, num_inputs = weights.weight_eOI.shape[1], weights.num_inputs
        if weights.stored_rows:
            return self.num_stored_bytes(weights.stored_rows, num_inputs, weights.chunks)
        chunk_inputs = None if weights.chunks is None else weights.chunks.size
        return int(self._native.packed_bytes(packed_format, num_outputs, num_inputs, weights.num_parts, chunk_inputs))

    def num_stored_bytes(self, rows: Iterable[StoredRows], num_inputs: int, chunks: InputChunks | None) -> int:
        """Return the size in bytes of rows that keep a checkpoint's codes."""
        size = None if chunks is None else chunks.size
        return sum(int(self._native.packed_bytes(each.format, each.num_rows, num_inputs, 1, size)) for each in rows)

    def pack_rows(
        self, weights: OpenWeights, packed_format: PackedFormat, panels_B: Tensor, row: int, rows_RI: Tensor
    ) -> None:
        """Pack rows of one part of a weight into the part's panels.

        Args:
            row: index of the first row within the part; a multiple of PANEL_ROWS.
        """
        chunk_inputs = None if weights.chunks is None else weights.chunks.size
        panel_bytes = self._native.packed_bytes(packed_format, PANEL_ROWS, weights.num_inputs, 1, chunk_inputs)
        start, num_panels = row // PANEL_ROWS * panel_bytes, -(-len(rows_RI) // PANEL_ROWS)
        own_B = panels_B[start : start + num_panels * panel_bytes]
        self._native.pack_weight(packed_format, rows_RI, own_B, 1, chunk_inputs, None)

    def pack_stored(self, weights: OpenWeights, panels_B: Tensor, row: int, stored: StoredCodes) -> bool:
        """Pack stored rows of one weight into its panels. Return False if a scale is not finite.

        Args:
            row: index of the first row within the weight; a multiple of PANEL_ROWS after the first row of its format.
        """
        start, first = 0, 0
        for rows in weights.stored_rows:
            if row < first + rows.num_rows:
                break
            start += self.num_stored_bytes([rows], weights.num_inputs, weights.chunks)
            first += rows.num_rows
        if row > first:
            start += self.num_stored_bytes([StoredRows(rows.format, row - first)], weights.num_inputs, weights.chunks)
        size = self.num_stored_bytes(
            [StoredRows(rows.format, len(stored.codes_RB))], weights.num_inputs, weights.chunks
        )
        return bool(
            self._native.pack_stored(
                rows.format,
                stored.codes_RB,
                panels_B[start : start + size],
                weights.num_inputs,
                chunk_inputs=None if weights.chunks is None else weights.chunks.size,
                scales=stored.scales_RG,
                first_input=stored.first_input,
            )
        )

    def fits_in_place(self, weights: OpenWeights, packed_format: PackedFormat) -> bool:
        """Return True if packed weights have the size and number format of the open weights."""
        is_same_format = packed_format == str(weights.weight_eOI.dtype).removeprefix("torch.")
        return is_same_format and self.num_bytes(weights, packed_format) == weights.weight_eOI[0].nbytes

    def pack(
        self, weights: OpenWeights, packed_format: PackedFormat, panels: Tensor | None = None, *, in_place: bool
    ) -> PackedWeights:
        """Return the packed weights, in `panels`, in the memory of the open weights if `in_place`, or in new memory."""
        weight_eOI, size = weights.weight_eOI, self.num_bytes(weights, packed_format)
        if in_place:
            assert self.fits_in_place(weights, packed_format)
            panels = weight_eOI.data.view(torch.uint8).view(len(weight_eOI), size)
        elif panels is None:
            panels = self.allocate_weights((len(weight_eOI), size), torch.uint8, weight_eOI.device)
        if weights.is_mxfp4:
            assert weights.scales_eGB is not None
            assert weights.chunks is None, "experts in MXFP4 are never divided by inputs"
            for codes_OI, scales_OG, panel in zip(weight_eOI, weights.scales_eGB, panels, strict=True):
                self._native.pack_stored(
                    packed_format, codes_OI, panel, weights.num_inputs, weights.num_parts, scales=scales_OG
                )
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

    def allocate_sharing_pages(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for weights. Small weights share large pages; a page is freed with its last weight."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or num_bytes >= MIN_LARGE_PAGES_BYTES:
            return self.allocate_weights(shape, dtype, device)
        padded = -(-num_bytes // 64) * 64  # cache lines
        if padded > len(self._shared_B):
            memory = self.allocate_weights((SHARED_BYTES + LARGE_PAGE_BYTES,), torch.uint8, device)
            self._shared_B = memory[-memory.data_ptr() % LARGE_PAGE_BYTES :][:SHARED_BYTES]
        own_B, self._shared_B = self._shared_B[:num_bytes], self._shared_B[padded:]
        return own_B.view(dtype).view(shape)
