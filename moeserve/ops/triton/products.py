"""Products of rows with weights side by side, in 16 or 32 bits or in 8-bit blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.arguments import activation_arguments
from moeserve.ops.interfaces import ClampedSwiGLU, GatedActivation, Gather, OpenWeights, Product, SwiGLU
from moeserve.ops.torch.products import TorchProduct
from moeserve.triton_kernels.activation import clamped_silu_multiply, silu_multiply
from moeserve.triton_kernels.fp8 import quantize_blocks
from moeserve.triton_kernels.grouped_matmul import grouped_matmul, grouped_matmul_slots

# T tokens, R rows, S slots of each weight, e weights side by side, I inputs, O outputs, C columns, B blocks of inputs


def make_product(weights: OpenWeights) -> Product:
    has_blocks = weights.scales_eGB is not None and not weights.is_mxfp4
    return TritonBlockProduct(weights) if has_blocks else TritonProduct(weights)


def activated(activation: GatedActivation | None, output_TO: Tensor) -> Tensor:
    """Return [T, C]: the activation of gates and ups, or the output itself."""
    match activation:
        case None:
            return output_TO
        case SwiGLU():
            return silu_multiply(output_TO)
        case ClampedSwiGLU(alpha=alpha, limit=limit):
            return clamped_silu_multiply(output_TO, alpha=alpha, limit=limit)
        case other:
            raise AssertionError(f"no kernel has the activation {other}")


class TritonProduct:
    """See `Product`. A single weight, and the small ones of each head, are multiplied by torch.

    Weights in MXFP4 are those of experts: rows, also in slots.
    """

    def __init__(self, weights: OpenWeights) -> None:
        self.weights = weights
        self.reference = TorchProduct(weights)
        self.activation = activation_arguments(weights.activation)

    def multiply(self, input_TI: Tensor) -> Tensor:
        (weight_OI,) = self.weights.weight_eOI
        bias_eO = self.weights.bias_eO
        output_TO = functional.linear(input_TI, weight_OI, None if bias_eO is None else bias_eO[0])
        return activated(self.weights.activation, output_TO)

    def multiply_rows(
        self,
        rows_RI: Tensor,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
        out_RC: Tensor | None = None,
    ) -> Tensor:
        assert out_RC is None, "these kernels allocate their results"
        return grouped_matmul(
            rows_RI,
            self.weights.weight_eOI,
            counts_e,
            weight_scale_eGB=self.weights.scales_eGB,
            indices_R=None if gather is None else gather.indices_R,
            divisor=1 if gather is None else gather.divisor,
            bias_eO=self.weights.bias_eO,
            expected_rows=expected_rows,
            **self.activation,
        )

    def multiply_slots(self, slots_eSI: Tensor, counts_e: Tensor, expected_rows: int | None = None) -> Tensor:
        return grouped_matmul_slots(
            slots_eSI,
            self.weights.weight_eOI,
            counts_e,
            weight_scale_eGB=self.weights.scales_eGB,
            bias_eO=self.weights.bias_eO,
            expected_rows=expected_rows,
            **self.activation,
        )

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        return self.reference.multiply_each(input_TeI, out_TeC)


class TritonBlockProduct:
    """See `Product`. Weights are in 8-bit blocks; rows are quantised before each product, 128 values to a scale."""

    def __init__(self, weights: OpenWeights) -> None:
        assert weights.scales_eGB is not None
        self.weight_eOI = weights.weight_eOI
        self.options: dict[str, Any] = {
            "weight_scale_eGB": weights.scales_eGB,
            "bias_eO": weights.bias_eO,
            **activation_arguments(weights.activation),
        }

    def multiply(self, input_TI: Tensor) -> Tensor:
        return self.multiply_rows(input_TI, input_TI.new_full((1,), len(input_TI), dtype=torch.int64))

    def multiply_rows(
        self,
        rows_RI: Tensor,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
        out_RC: Tensor | None = None,
    ) -> Tensor:
        assert out_RC is None, "these kernels allocate their results"
        codes_RI, scales_RB = quantize_blocks(rows_RI)
        return grouped_matmul(
            codes_RI,
            self.weight_eOI,
            counts_e,
            row_scale_SB=scales_RB,
            indices_R=None if gather is None else gather.indices_R,
            divisor=1 if gather is None else gather.divisor,
            out_dtype=rows_RI.dtype,
            expected_rows=expected_rows,
            **self.options,
        )

    def multiply_slots(self, slots_eSI: Tensor, counts_e: Tensor, expected_rows: int | None = None) -> Tensor:
        """Slots without rows are quantised too, because the host does not read the counts."""
        codes_RI, scales_RB = quantize_blocks(slots_eSI.flatten(0, 1))
        codes_eSI, scales_eSB = (rows.unflatten(0, slots_eSI.shape[:2]) for rows in (codes_RI, scales_RB))
        return grouped_matmul_slots(
            codes_eSI,
            self.weight_eOI,
            counts_e,
            slot_scale_eSB=scales_eSB,
            out_dtype=slots_eSI.dtype,
            expected_rows=expected_rows,
            **self.options,
        )

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        raise AssertionError("weights with an input of their own each are not held in blocks")
