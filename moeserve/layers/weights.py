"""The weights of a layer: open while a checkpoint fills them, then packed for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext, MinBits
from moeserve.ops.products import AnyProduct, Kind
from moeserve.ops.products.interface import (
    INT4_GROUP,
    MXFP4_GROUP,
    InputChunks,
    OpenWeights,
    PackedFormat,
    PackedWeights,
    StoredCodes,
    StoredRows,
)
from moeserve.ops.products.weight_blocks import BLOCK, CODES, num_blocks
from moeserve.ops.rows.activations import Activation, num_parts_of
from moeserve.ops.rows.interface import Rows, plain_rows

# G blocks of outputs, B blocks of inputs

# The formats of quantization="int4": weights whose errors matter more have more bits.
FORMATS_OF_INT4: dict[MinBits, PackedFormat] = {4: "q4_k", 5: "q5_k", 6: "q6_k", 8: "int8"}
MIN_QUANTIZED_OUTPUTS = 2  # a gate of one output takes too few bytes to matter


@dataclass(frozen=True)
class QuantizationLimits:
    """The limits up to which a weight may be quantised."""

    min_bits: MinBits = 4  # minimum number of bits with quantization="int4"
    # Rows and columns, in memory and in a checkpoint, at which published tensors are cut or joined. A block of 8-bit
    # floats must begin at each cut. None: the weight is never in 8-bit floats.
    cuts: tuple[int, ...] | None = ()
    can_be_mxfp4: bool = False  # checkpoints in MXFP4 store this weight in MXFP4


DEFAULT_LIMITS = QuantizationLimits()


class Weights(nn.Module, Generic[AnyProduct]):
    """Weights [e, O, I] of one shape side by side, and their product with rows.

    `memory` exists from `allocate` until the weights are packed, `panels` from then on. With `fills_panels`, rows are
    packed as they are read, and only the panels get memory. If the kernels read open weights, the weights stay open,
    and may be 8-bit floats with `scales` (see `weight_blocks`). In MXFP4, `memory` and `scales` have codes and
    exponents (see `OpenWeights`) until the weights are packed.

    In the weight mapping, this module is the owner of the destinations that a checkpoint fills.

    Args:
        kind: the kind of product, such as `products.SINGLE`.
        shape: e, O and I.
        borrow: returns the memory [e, O, I] of another module, which is read but never changed.
        feeds: the weights whose product is the only reader of this product's results.
        chunks: the chunks in which inputs are added, if tp ranks divide the inputs.
    """

    memory: nn.Parameter | None  # [e, O, I]; in MXFP4 [e, O, I / 2]
    scales: nn.Parameter | None  # [e, G, B] float32; in MXFP4 [e, O, I / MXFP4_GROUP] uint8
    panels: Tensor | None  # [e, bytes] uint8
    int4_scales: Tensor | None  # exists from `keep_int4` until the weights are packed: see OpenWeights
    product: AnyProduct  # exists from `allocate` on

    def __init__(
        self,
        kind: Kind[AnyProduct],
        shape: tuple[int, int, int],
        context: BuildContext,
        *,
        has_bias: bool = False,
        activation: Activation | None = None,
        limits: QuantizationLimits = DEFAULT_LIMITS,
        borrow: Callable[[], Tensor] | None = None,
        chunks: InputChunks | None = None,
        feeds: AnyWeights | None = None,
    ) -> None:
        super().__init__()
        self._kind = kind
        self.shape = shape
        self.chunks = chunks
        self.context = context
        self._packing = context.backend.packing
        self.activation = activation
        self.limits = limits
        self.borrow = borrow
        # True: the weights are 8-bit floats with a scale for each block, and their product takes `Float8Rows`.
        self.is_in_blocks = context.quantization == "fp8" and self.fits_blocks
        self.feeds_blocks = feeds is not None and feeds.is_in_blocks
        num_weights, num_outputs, _ = shape
        self.register_parameter("memory", None)
        self.register_parameter("scales", None)
        self.bias = context.parameter(num_weights, num_outputs) if has_bias else None
        self.register_buffer("panels", None)
        self.int4_scales = None
        self.stored_rows: tuple[StoredRows, ...] = ()  # formats of rows that stay as stored; empty: none
        self.fills_panels = False
        self.is_on_disk = False  # packed into a file; kernels read copies in memory: see models/expert_store

    def allocate(self) -> None:
        """Allocate the memory that a checkpoint fills. Called once."""
        num_weights, num_outputs, num_inputs = self.shape
        if self.is_mxfp4:
            num_groups = -(-num_inputs // MXFP4_GROUP)
            codes_shape = num_weights, num_outputs, num_groups * MXFP4_GROUP // 2
            self.memory = self.context.parameter(*codes_shape, dtype=torch.uint8)
            self.scales = self.context.parameter(num_weights, num_outputs, num_groups, dtype=torch.uint8)
        elif self.is_in_blocks:
            num_parts = num_parts_of(self.activation)
            groups = num_parts * num_blocks(num_outputs // num_parts)
            self.memory = self.context.parameter(*self.shape, dtype=CODES)
            self.scales = self.context.parameter(num_weights, groups, num_blocks(num_inputs), dtype=torch.float32)
        elif not self.is_borrowed:
            self.memory = self.context.parameter(*self.shape)
        self.use_memory()

    def use_memory(self) -> None:
        """Make the product read the open memory, which must be allocated or borrowed by now."""
        if self.borrow is not None:
            self.memory = nn.Parameter(self.borrow(), requires_grad=False)
        self.product = self._kind.make(self.context.backend, self.open)

    def input_of(self, rows: Rows) -> Rows:
        """Return `rows` in the form that the product takes."""
        return rows if self.is_in_blocks else plain_rows(rows)

    @property
    def is_borrowed(self) -> bool:
        """True if the memory belongs to another module."""
        return self.borrow is not None

    @property
    def is_mxfp4(self) -> bool:
        """True if the weights stay in MXFP4, as the checkpoint stores them."""
        return self.context.quantization == "mxfp4" and self.limits.can_be_mxfp4

    @property
    def fits_blocks(self) -> bool:
        """True if the weights can be 8-bit floats with a scale for each block."""
        cuts = self.limits.cuts
        has_whole_blocks = cuts is not None and not any(cut % BLOCK for cut in cuts)
        return has_whole_blocks and not self.is_borrowed and self.shape[1] >= MIN_QUANTIZED_OUTPUTS

    def keep_int4(self) -> None:
        """Pack the weights as int4, with scales that a checkpoint fills. Called before the weights are filled."""
        num_weights, num_outputs, num_inputs = self.shape
        self.int4_scales = torch.empty(num_weights, num_outputs, -(-num_inputs // INT4_GROUP), dtype=torch.float16)

    def fill_panels(self, stored_rows: tuple[StoredRows, ...] = ()) -> None:
        """Pack rows as soon as `fill_rows` receives them, or `fill_stored` in the formats of `stored_rows`.

        Called for weights without memory.
        """
        assert self.memory is not None
        assert self.memory.is_meta
        self.fills_panels, self.stored_rows = True, stored_rows

    def fill_rows(self, row: int, rows_RI: Tensor) -> None:
        """Pack contiguous rows. The first has index `row`, counted over all weights.

        In each part of a weight, the rows begin at a multiple of PANEL_ROWS. They end at a multiple of PANEL_ROWS or at
        the end of the part.
        """
        packing, packed_format = self._packing, self.packed_format
        assert packing is not None
        assert packed_format is not None
        part_rows = self.shape[1] // self.num_parts
        panels_of_parts = self._allocated_panels().view(self.shape[0] * self.num_parts, -1)
        while len(rows_RI):
            part, first = divmod(row, part_rows)
            size = min(len(rows_RI), part_rows - first)
            packing.pack_rows(self.open, packed_format, panels_of_parts[part], first, rows_RI[:size])
            row, rows_RI = row + size, rows_RI[size:]

    def fill_stored(self, row: int, stored: StoredCodes) -> bool:
        """Pack stored rows, the first with index `row` over all weights. Return False if a scale is not finite."""
        packing = self._packing
        assert packing is not None
        slot, row = divmod(row, self.shape[1])
        return packing.pack_stored(self.open, self._allocated_panels()[slot], row, stored)

    @property
    def stored_formats(self) -> frozenset[PackedFormat]:
        """The formats in which the weights can keep a checkpoint's codes."""
        return frozenset() if self._packing is None else self._packing.stored_formats

    def is_kind(self, kind: Kind[Any]) -> bool:
        """Return True if the product is of kind `kind`."""
        return self._kind is kind

    @property
    def num_parts(self) -> int:
        """Number of parts of a weight's outputs: 2 (gates and ups) or 1."""
        return num_parts_of(self.activation)

    @property
    def open(self) -> OpenWeights:
        """The weights in plain memory, until they are packed."""
        assert self.memory is not None, "packed already, or not allocated"
        return OpenWeights(
            self.memory,
            self.bias,
            self.activation,
            self.scales,
            self.chunks,
            self.feeds_blocks,
            self.int4_scales,
            self.stored_rows,
        )

    @property
    def open_tensors(self) -> list[Tensor]:
        """The memory of open weights and of their scales, which packing replaces."""
        return [tensor for tensor in (self.memory, self.scales) if tensor is not None]

    @property
    def num_open_bytes(self) -> int:
        """Size in bytes before packing."""
        return 0 if self.fills_panels else sum(tensor.nbytes for tensor in self.open_tensors)

    @property
    def memory_of_each(self) -> list[Tensor]:
        """All tensors of the weights, each as [e, bytes] uint8. Writing to these tensors changes the products."""
        held = self.panels if self.memory is None else self.memory.data
        assert held is not None
        tensors = [held, *(other.data for other in (self.scales, self.bias) if other is not None)]
        return [tensor.view(torch.uint8).view(len(tensor), tensor[:1].nbytes) for tensor in tensors]

    @property
    def packs(self) -> bool:
        """True if there are kernels that read these weights in packed form."""
        packing = self._packing
        return self.memory is None or (packing is not None and packing.supports(self.open))

    @property
    def packed_format(self) -> PackedFormat | None:
        """The format in which the weights are packed; None if the weights stay open."""
        weights, quantization = self.open, self.context.quantization
        if not self.packs:
            return None
        if self.stored_rows:
            return self.stored_rows[0].format
        if self.int4_scales is not None:
            return "int4"
        if self.is_mxfp4:
            return "mxfp4"
        if quantization in (None, "mxfp4") or self.shape[1] < MIN_QUANTIZED_OUTPUTS:
            return "float32" if weights.weight_eOI.dtype == torch.float32 else "bfloat16"
        assert quantization in ("int8", "int4"), "8-bit floats are not packed"
        return "int8" if quantization == "int8" else FORMATS_OF_INT4[self.limits.min_bits]

    def pack(self) -> None:
        """Pack the filled weights, in place if possible. Otherwise the open memory is released. Called once."""
        packed_format, packing = self.packed_format, self._packing
        if packed_format is None or packing is None:
            return
        if self.fills_panels:
            return self.adopt(self._allocated_panels())
        self._use(packing.pack(self.open, packed_format, self.panels, in_place=self.packs_in_place))

    def fill_on_disk(self, panels: Tensor) -> None:
        """Make `pack` write to `panels`, the [e, bytes] uint8 memory of a file. Called before weights are filled."""
        assert self.is_on_disk
        self.panels = panels

    def pack_into(self, panels: Tensor) -> None:
        """Pack the filled weights into `panels` of other weights of the same form, and release the open memory.

        The weights can be filled again afterwards, once memory is allocated for them.
        """
        packed_format, packing = self.packed_format, self._packing
        assert packed_format is not None
        assert packing is not None
        packing.pack(self.open, packed_format, panels, in_place=False)
        self.memory = nn.Parameter(
            torch.empty(self.shape, dtype=self.context.dtype, device="meta"), requires_grad=False
        )

    def adopt(self, panels: Tensor) -> None:
        """Use panels that an earlier start packed from the same weights, instead of `pack`."""
        packed_format = self.packed_format
        assert packed_format is not None
        self._use(PackedWeights.from_panels(self.open, packed_format, panels))

    @property
    def packs_in_place(self) -> bool:
        """True if packing needs no memory besides the memory of the open weights."""
        packed_format, packing = self.packed_format, self._packing
        fits = packed_format is not None and packing is not None and packing.fits_in_place(self.open, packed_format)
        return fits and not self.is_borrowed and not self.is_on_disk

    @property
    def num_packed_bytes(self) -> int:
        """Size in bytes after packing. Weights that are never packed count with their open size."""
        packed_format, packing = self.packed_format, self._packing
        if packed_format is None or packing is None:
            return self.num_open_bytes
        return self.shape[0] * packing.num_bytes(self.open, packed_format)

    def _allocated_panels(self) -> Tensor:
        if self.panels is None:
            shape = self.shape[0], self.num_packed_bytes // self.shape[0]
            self.panels = self.context.backend.allocate_weights(shape, torch.uint8, self.context.device)
        return self.panels

    def _use(self, packed: PackedWeights) -> None:
        self.panels, self.memory, self.scales, self.int4_scales = packed.panels, None, None, None
        self.product = self._kind.of_packed(self.context.backend.native, packed)


AnyWeights = Weights[Any]


def allocate_weights(module: nn.Module) -> None:
    """Allocate all weights of a module, in the form in which they will be filled."""
    for weights in module.modules():
        if isinstance(weights, Weights):
            weights.allocate()


def allocate_parameters(module: nn.Module, context: BuildContext) -> None:
    """Allocate memory for all parameters of a module that was built from a context without memory."""
    for part in module.modules():
        if isinstance(part, Weights) and part.is_borrowed:
            part.memory = None
        for name, parameter in list(part.named_parameters(recurse=False)):
            if name == "memory" and isinstance(part, Weights) and part.fills_panels:
                continue
            own = part.context.with_memory() if isinstance(part, Weights) else context
            setattr(part, name, own.parameter(*parameter.shape, dtype=parameter.dtype))
    for part in module.modules():
        if isinstance(part, Weights):
            part.use_memory()
