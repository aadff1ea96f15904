"""A layer's weights: open while a checkpoint fills them, then packed for the kernels. Knows no checkpoint."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from moeserve.config import QuantizationName
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

# e weights side by side, I inputs, O outputs

# Of less, the bytes do not matter.
MIN_QUANTIZED_OUTPUTS = 32


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for a weight that a checkpoint will fill."""
    return nn.Parameter(allocate(*shape, dtype=dtype, device=device), requires_grad=False)


class Weights(nn.Module):
    """Weights of one shape side by side, and how rows are multiplied with them.

    `memory` is there until they are packed, `panels` from then on. Where there are no kernels for packed weights, they
    stay open.

    Args:
        least_bits: of a quantised weight.
        borrowed: someone else's memory [e, O, I] to begin with, which is left as it is.
    """

    memory: nn.Parameter | None  # [e, O, I]
    panels: Tensor | None  # [e, bytes] uint8

    def __init__(
        self,
        num_weights: int,
        num_outputs: int,
        num_inputs: int,
        *,
        has_bias: bool = False,
        activation: GatedActivation | None = None,
        least_bits: Literal[4, 8] = 4,
        borrowed: Tensor | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.is_borrowed = borrowed is not None
        if borrowed is None:
            self.memory = parameter(num_weights, num_outputs, num_inputs, dtype=dtype, device=device)
        else:
            self.memory = nn.Parameter(borrowed, requires_grad=False)
        self.bias = parameter(num_weights, num_outputs, dtype=dtype, device=device) if has_bias else None
        self.register_buffer("panels", None)
        self.activation = activation
        self.least_bits = least_bits
        self.num_weights = num_weights
        self.product: Product = open_product(self.open)

    @property
    def open(self) -> OpenWeights:
        """While they are."""
        assert self.memory is not None, "packed already"
        return OpenWeights(self.memory, self.bias, self.activation)

    @property
    def memory_of_each(self) -> list[Tensor]:
        """[e, bytes] uint8 each, together all of every weight. What is written there is what rows meet from then on."""
        held = self.panels if self.memory is None else self.memory.data
        assert held is not None
        whole = [held] if self.bias is None else [held, self.bias.data]
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
