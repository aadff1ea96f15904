"""A layer's weights: open while a checkpoint fills them, then packed for the kernels. Knows no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from moeserve.config.settings import QuantizationName
from moeserve.ops.activation import GatedActivation
from moeserve.ops.products import (
    OpenWeights,
    PackedFormat,
    Product,
    adopt,
    allocate,
    can_pack,
    native_product,
    open_product,
    pack,
    packed_bytes,
)
from moeserve.ops.weight_blocks import BLOCK, CODES, num_blocks

# e weights side by side, I inputs, O outputs, G blocks of outputs, B blocks of inputs

# Of less, the bytes do not matter.
MIN_QUANTIZED_OUTPUTS = 32


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for a weight that a checkpoint will fill."""
    return nn.Parameter(allocate(*shape, dtype=dtype, device=device), requires_grad=False)


class Weights(nn.Module):
    """Weights of one shape side by side, and how rows are multiplied with them.

    `memory` is there from `allocate` until they are packed, `panels` from then on. Where there are no kernels for
    packed weights, they stay open; there, they may be 8-bit floats, which `scales` belong to: see ops/weight_blocks.py.

    Args:
        least_bits: of a quantised weight.
        cuts: rows and columns, here and in a checkpoint, where what it publishes is cut or joined to make these. Blocks
            with a scale begin there too, or there are none. None: there are none in any case.
        borrowed: someone else's memory [e, O, I] to begin with, which is left as it is.
    """

    memory: nn.Parameter | None  # [e, O, I]
    scales: nn.Parameter | None  # [e, G, B] float32
    panels: Tensor | None  # [e, bytes] uint8
    product: Product  # once there is memory

    def __init__(
        self,
        num_weights: int,
        num_outputs: int,
        num_inputs: int,
        *,
        has_bias: bool = False,
        activation: GatedActivation | None = None,
        least_bits: Literal[4, 8] = 4,
        cuts: Sequence[int] | None = (),
        borrowed: Tensor | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.is_borrowed = borrowed is not None
        self.register_parameter("memory", None if borrowed is None else nn.Parameter(borrowed, requires_grad=False))
        self.register_parameter("scales", None)
        self.bias = parameter(num_weights, num_outputs, dtype=dtype, device=device) if has_bias else None
        self.register_buffer("panels", None)
        self.activation = activation
        self.least_bits = least_bits
        self.cuts = cuts
        self.num_weights, self.num_outputs, self.num_inputs = num_weights, num_outputs, num_inputs
        self.dtype, self.device = dtype, device

    def allocate(self, quantization: QuantizationName | None = None) -> None:
        """To be called once, before they are filled."""
        shape = self.num_weights, self.num_outputs, self.num_inputs
        if quantization == "fp8" and self.fits_blocks:
            num_parts = 1 if self.activation is None else 2
            groups = num_parts * num_blocks(self.num_outputs // num_parts)
            self.memory = parameter(*shape, dtype=CODES, device=self.device)
            self.scales = parameter(
                self.num_weights, groups, num_blocks(self.num_inputs), dtype=torch.float32, device=self.device
            )
        elif not self.is_borrowed:
            self.memory = parameter(*shape, dtype=self.dtype, device=self.device)
        self.product = open_product(self.open)

    @property
    def fits_blocks(self) -> bool:
        """Whether they can be 8-bit floats with a scale for each block."""
        are_blocks_whole = self.cuts is not None and not any(cut % BLOCK for cut in self.cuts)
        return are_blocks_whole and not self.is_borrowed and self.num_outputs >= MIN_QUANTIZED_OUTPUTS

    @property
    def open(self) -> OpenWeights:
        """While they are."""
        assert self.memory is not None, "packed already, or not allocated"
        return OpenWeights(self.memory, self.bias, self.activation, self.scales)

    @property
    def memory_of_each(self) -> list[Tensor]:
        """[e, bytes] uint8 each, together all of every weight. What is written there is what rows meet from then on."""
        held = self.panels if self.memory is None else self.memory.data
        assert held is not None
        whole = [held, *(other.data for other in (self.scales, self.bias) if other is not None)]
        return [memory.view(torch.uint8).view(self.num_weights, memory[:1].nbytes) for memory in whole]

    @property
    def packs(self) -> bool:
        """Whether there are kernels for them packed."""
        return self.memory is None or can_pack(self.open)

    def format(self, quantization: QuantizationName | None) -> PackedFormat | None:
        """What they are packed as; None: they stay open."""
        weights = self.open
        if not can_pack(weights):
            return None
        if quantization is None or weights.weight_eOI.shape[1] < MIN_QUANTIZED_OUTPUTS:
            return "float32" if weights.weight_eOI.dtype == torch.float32 else "bfloat16"
        assert quantization != "fp8", "8-bit floats are not packed"
        return "int8" if self.least_bits == 8 else quantization

    def pack(self, quantization: QuantizationName | None) -> None:
        """To be called once, when `memory` is filled, which is given back or reused."""
        packed_format = self.format(quantization)
        if packed_format is not None:
            packed = pack(self.open, packed_format, in_place=not self.is_borrowed)
            self.panels, self.memory = packed.panels, None
            self.product = native_product(packed)

    def adopt(self, panels: Tensor, quantization: QuantizationName | None) -> None:
        """Instead of `pack`: panels that were packed from the same weights before."""
        packed_format = self.format(quantization)
        assert packed_format is not None
        packed = adopt(self.open, packed_format, panels)
        self.panels, self.memory = panels, None
        self.product = native_product(packed)

    def num_packed_bytes(self, quantization: QuantizationName | None) -> int:
        packed_format = self.format(quantization)
        weights = self.open
        if packed_format is None:
            return weights.weight_eOI.nbytes
        return len(weights.weight_eOI) * packed_bytes(weights, packed_format)


def allocate_weights(module: nn.Module, quantization: QuantizationName | None = None) -> None:
    """Memory for all weights of a module, in the form in which they are to be filled."""
    for weights in module.modules():
        if isinstance(weights, Weights):
            weights.allocate(quantization)
