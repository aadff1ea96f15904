"""Products of rows with weights that stay put: what projections, experts and the output head are made of.

A weight is first open: plain memory that a checkpoint fills. Packed, it is in the order in which the C++ kernels read
it, or quantised. Knows no layers and no checkpoints.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.memory import new_empty
from moeserve.ops import backend
from moeserve.ops.activation import ClampedSwiGLU, GatedActivation, SwiGLU
from moeserve.ops.native import NATIVE_DTYPES, native_kernels, require_native

# T tokens, R rows sorted by weight, S slots of each weight, e weights side by side, I inputs, O outputs, C columns: the
# outputs, or half as many after an activation, to which the first half are gates and the second are ups

PackedFormat = Literal["float32", "bfloat16", "int8", "int4"]

MIN_LARGE_PAGES_BYTES = 2**22

_thread = threading.local()


@contextlib.contextmanager
def without_rows() -> Iterator[None]:
    """Inside, the C++ kernels' `multiply_rows` gives zeros, in as much memory: nearly all of a large step's arithmetic,
    left out of one that is run only to see what memory it takes. For this thread.
    """
    _thread.is_without_rows = True
    try:
        yield
    finally:
        _thread.is_without_rows = False


@dataclass(frozen=True)
class Gather:
    """Rows that are still where they came from: row r is row indices_R[r] // divisor of a source."""

    indices_R: Tensor
    divisor: int


class Product(Protocol):
    """activation(input @ weight.T + bias) for e weights of one shape.

    Results are in the dtype of the input, and rows are contiguous.
    """

    def multiply(self, input_TI: Tensor) -> Tensor:
        """[T, C], with the only weight."""
        ...

    def multiply_rows(
        self,
        rows_RI: Tensor,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
    ) -> Tensor:
        """[R, C]: the first counts_e[0] rows with the first weight, and so on.

        Args:
            rows_RI: with `gather`, the source.
            counts_e: int64, in all R; with spare rows R or less, and results of those are not to be read.
            gather: where rows are fetched from, by a kernel of the same backend as that which gave the indices.
            expected_rows: about how many count, where most are spare; None: all. Decides how the work is cut, at most.
        """
        ...

    def multiply_slots(self, slots_eSI: Tensor, counts_e: Tensor, expected_rows: int | None = None) -> Tensor:
        """[e, S, C]: the first counts_e[i] slots of weight i hold its rows; the others' results are not to be read.

        Args:
            expected_rows: about how many rows there are in all; None: as many as slots.
        """
        ...

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        """[T, e, C]: every token with every weight, each on an input of its own.

        Args:
            out_TeC: where the results go, which may be a part of something wider; None: into memory of their own.
        """
        ...


@dataclass(frozen=True)
class OpenWeights:
    """Weights as a checkpoint fills them."""

    weight_eOI: Tensor
    bias_eO: Tensor | None = None
    activation: GatedActivation | None = None
    scales_eGB: Tensor | None = None  # where the weights are codes: of the blocks of each part; see weight_blocks.py

    @property
    def num_parts(self) -> int:
        """Of a weight, each of which has outputs of its own kind."""
        return 1 if self.activation is None else 2


class TorchProduct:
    """The reference, on any device."""

    def __init__(self, weights: OpenWeights) -> None:
        self.weights = weights

    def multiply(self, input_TI: Tensor) -> Tensor:
        (weight_OI,) = self.weights.weight_eOI
        return self._product(input_TI, weight_OI, 0)

    def multiply_rows(
        self,
        rows_RI: Tensor,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
    ) -> Tensor:
        if gather is not None:
            rows_RI = rows_RI[gather.indices_R.clamp(min=0) // gather.divisor]
        output_RC = rows_RI.new_empty(len(rows_RI), self._num_columns)
        for weight, rows in _rows_of_each(counts_e):
            output_RC[rows] = self._product(rows_RI[rows], self.weights.weight_eOI[weight], weight)
        return output_RC

    def multiply_slots(self, slots_eSI: Tensor, counts_e: Tensor, expected_rows: int | None = None) -> Tensor:
        if slots_eSI.device.type == "cpu":  # the bytes of `multiply_rows`
            output_eSC = slots_eSI.new_empty(*slots_eSI.shape[:2], self._num_columns)
            for weight, count in enumerate(counts_e.tolist()):
                rows_SI = slots_eSI[weight, :count]
                output_eSC[weight, :count] = self._product(rows_SI, self.weights.weight_eOI[weight], weight)
            return output_eSC
        output_eSO = torch.bmm(slots_eSI, self.weights.weight_eOI.transpose(1, 2))  # of fixed shapes
        if self.weights.bias_eO is not None:
            output_eSO = output_eSO + self.weights.bias_eO[:, None]
        return self._activated(output_eSO)

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        output_eTO = torch.bmm(input_TeI.transpose(0, 1), self.weights.weight_eOI.transpose(1, 2))
        if self.weights.bias_eO is not None:
            output_eTO = output_eTO + self.weights.bias_eO[:, None]
        output_TeC = self._activated(output_eTO).transpose(0, 1)
        return output_TeC.contiguous() if out_TeC is None else out_TeC.copy_(output_TeC)

    @property
    def _num_columns(self) -> int:
        return self.weights.weight_eOI.shape[1] // self.weights.num_parts

    def _product(self, input_TI: Tensor, weight_OI: Tensor, weight: int) -> Tensor:
        bias_eO = self.weights.bias_eO
        return self._activated(functional.linear(input_TI, weight_OI, None if bias_eO is None else bias_eO[weight]))

    def _activated(self, output: Tensor) -> Tensor:
        activation = self.weights.activation
        return output if activation is None else activation(*output.chunk(2, dim=-1))


class NativeProduct:
    """The C++ kernels, on packed weights.

    A result's bytes depend on its row, its weight and the instruction set alone: not on the rows beside it, not on
    their number, and not on the number of threads.
    """

    def __init__(self, kernels: ModuleType, packed: PackedWeights) -> None:
        self.num_columns = packed.num_outputs // packed.num_parts
        self.weights = kernels.PackedWeights(
            packed.format,
            packed.panels,
            packed.num_outputs,
            packed.num_inputs,
            packed.bias_eO,
            **activation_arguments(packed.activation),
        )

    def multiply(self, input_TI: Tensor) -> Tensor:
        output_TC = new_empty(input_TI, len(input_TI), self.num_columns)
        self.weights.multiply(input_TI, output_TC)
        return output_TC

    def multiply_rows(
        self,
        rows_RI: Tensor,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
    ) -> Tensor:
        assert gather is None, "rows for these kernels are gathered before"
        output_RC = new_empty(rows_RI, len(rows_RI), self.num_columns)
        if getattr(_thread, "is_without_rows", False):
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
        self.weights.multiply_each(input_TeI, out_TeC)
        return out_TeC


@dataclass(frozen=True)
class PackedWeights:
    """Weights in the order in which the C++ kernels read them: see csrc/cpu/packed_weight.h."""

    format: PackedFormat
    panels: Tensor  # [e, bytes] uint8
    num_outputs: int
    num_inputs: int
    bias_eO: Tensor | None
    activation: GatedActivation | None

    @property
    def num_parts(self) -> int:
        return 1 if self.activation is None else 2


def allocate(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for weights, in large pages where the system has them."""
    memory = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and memory.nbytes >= MIN_LARGE_PAGES_BYTES and (kernels := native_kernels()):
        kernels.advise_large_pages(memory)
    return memory


def open_product(weights: OpenWeights) -> Product:
    """The product with weights as they are."""
    if backend.of(weights.weight_eOI.device.type) == "triton":
        from moeserve.ops.gpu import GpuBlockProduct, GpuProduct

        return GpuProduct(weights) if weights.scales_eGB is None else GpuBlockProduct(weights)
    return TorchProduct(weights)


def can_pack(weights: OpenWeights) -> bool:
    """Whether there are kernels that read these weights packed."""
    weight_eOI = weights.weight_eOI
    is_known = weight_eOI.dtype in NATIVE_DTYPES and weight_eOI.numel() > 0
    return is_known and backend.of(weight_eOI.device.type) == "native"


def packed_bytes(weights: OpenWeights, packed_format: PackedFormat) -> int:
    """Of each of the weights."""
    _, num_outputs, num_inputs = weights.weight_eOI.shape
    return int(require_native().packed_bytes(packed_format, num_outputs, num_inputs, weights.num_parts))


def pack(weights: OpenWeights, packed_format: PackedFormat, *, in_place: bool = True) -> PackedWeights:
    """The weights packed: where they lie, if they may be and the packed ones are of the same size and type.

    They are then not to be used unpacked any more.
    """
    kernels = require_native()
    weight_eOI = weights.weight_eOI
    size = packed_bytes(weights, packed_format)
    own_bytes = weight_eOI[0].nbytes
    if in_place and size == own_bytes and packed_format == str(weight_eOI.dtype).removeprefix("torch."):
        panels = weight_eOI.data.view(torch.uint8).view(len(weight_eOI), size)
    else:
        panels = allocate(len(weight_eOI), size, dtype=torch.uint8, device=weight_eOI.device)
    for weight_OI, of_one in zip(weight_eOI, panels, strict=True):
        kernels.pack_weight(packed_format, weight_OI, of_one, weights.num_parts)
    return adopt(weights, packed_format, panels)


def adopt(weights: OpenWeights, packed_format: PackedFormat, panels: Tensor) -> PackedWeights:
    """Panels that were packed before, of weights of this shape; the bias is the weights' own."""
    _, num_outputs, num_inputs = weights.weight_eOI.shape
    return PackedWeights(packed_format, panels, num_outputs, num_inputs, weights.bias_eO, weights.activation)


def native_product(packed: PackedWeights) -> NativeProduct:
    return NativeProduct(require_native(), packed)


def activation_arguments(activation: GatedActivation | None) -> dict[str, Any]:
    """As kernels take it."""
    match activation:
        case None:
            return {}
        case SwiGLU():
            return {"activation": "swiglu"}
        case ClampedSwiGLU(alpha=alpha, limit=limit):
            return {"activation": "clamped_swiglu", "alpha": alpha, "limit": limit}
        case _:
            raise AssertionError(f"no kernel has the activation {activation}")


def _rows_of_each(counts_e: Tensor) -> Iterator[tuple[int, slice]]:
    """Each weight that has rows, and which."""
    first = 0
    for weight, count in enumerate(counts_e.tolist()):
        if count:
            yield weight, slice(first, first + count)
        first += count
