"""Products by Triton kernels of rows with weights in 16 or 32 bits, MXFP4, or 8-bit blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.products.interface import Gather, OpenWeights
from moeserve.ops.products.reference import TorchProduct
from moeserve.ops.rows.activations import Activation, kernel_arguments
from moeserve.ops.rows.interface import Float8Rows, Rows
from moeserve.ops.rows.triton import quantize_rows
from moeserve.triton_kernels.activation import activate
from moeserve.triton_kernels.chunked_matmul import chunked_matmul
from moeserve.triton_kernels.grouped_matmul import NUM_ARRIVALS, check_weights, grouped_matmul, grouped_matmul_slots
from moeserve.triton_kernels.tuning import FP8_BLOCK

# T tokens, R rows, S slots of each weight, e weights side by side, I inputs, O outputs, C columns, B blocks of inputs


def activated(activation: Activation | None, output_TO: Tensor) -> Tensor:
    """Return [T, C]: the outputs after the activation, or unchanged if there is none."""
    return output_TO if activation is None else activate(output_TO, **kernel_arguments(activation))


class TritonProduct:
    """A `Product` in Triton. A single weight, and the small weights of each head, are multiplied by torch.

    Weights in MXFP4 belong to experts, so they are multiplied only with rows or slots.
    """

    def __init__(self, weights: OpenWeights) -> None:
        weight_eOI, bias_eO = weights.weight_eOI, weights.bias_eO
        self.weights = weights
        self.reference = TorchProduct(weights)
        self.options: dict[str, Any] = {
            "weight_scale_eGB": weights.scales_eGB,
            "bias_eO": bias_eO,
            **kernel_arguments(weights.activation),
        }
        check_weights(weight_eOI, weights.scales_eGB, bias_eO, weights.num_parts)
        # The only weight and its bias, for `multiply`.
        self.weight_OI = weight_eOI[0] if len(weight_eOI) == 1 else None
        self.bias_O = bias_eO[0] if bias_eO is not None and len(weight_eOI) == 1 else None

    def multiply(self, input_TI: Tensor) -> Tensor:
        assert self.weight_OI is not None
        return activated(self.weights.activation, functional.linear(input_TI, self.weight_OI, self.bias_O))

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
            indices_R=None if gather is None else gather.indices_R,
            divisor=1 if gather is None else gather.divisor,
            expected_rows=expected_rows,
            **self.options,
        )

    def multiply_slots(self, slots_eSI: Tensor, counts_e: Tensor, expected_rows: int | None = None) -> Tensor:
        return grouped_matmul_slots(
            slots_eSI, self.weights.weight_eOI, counts_e, expected_rows=expected_rows, **self.options
        )

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        return self.reference.multiply_each(input_TeI, out_TeC)


class TritonBlockProduct:
    """A `Product` in Triton of weights in 8-bit blocks. Rows are first quantised, with a scale for each 128 values.

    Programs of a single weight's kernel count arrivals in memory of this object, so its calls must not overlap.
    """

    def __init__(self, weights: OpenWeights) -> None:
        assert weights.scales_eGB is not None
        weight_eOI = weights.weight_eOI
        self.weight_eOI = weight_eOI
        # Number of scales of a row of results, if these are quantised for the next product.
        self.num_out_blocks = -(-weight_eOI.shape[1] // weights.num_parts // FP8_BLOCK) if weights.feeds_blocks else 0
        is_single = len(weight_eOI) == 1
        self.arrivals = weight_eOI.new_zeros(NUM_ARRIVALS, dtype=torch.int32) if is_single else None
        check_weights(weight_eOI, weights.scales_eGB, weights.bias_eO, weights.num_parts)
        self.options: dict[str, Any] = {
            "weight_scale_eGB": weights.scales_eGB,
            "bias_eO": weights.bias_eO,
            **kernel_arguments(weights.activation),
        }

    def multiply(self, input_TI: Rows) -> Any:
        rows = quantize_rows(input_TI)
        scale_TF = self._new_scales(rows.codes, len(rows))
        output_TC = grouped_matmul(
            rows.codes,
            self.weight_eOI,
            None,
            row_scale_SB=rows.scales,
            out_dtype=rows.dtype,
            out_scale_RF=scale_TF,
            arrivals=self.arrivals,
            **self.options,
        )
        return output_TC if scale_TF is None else Float8Rows(output_TC, scale_TF, rows.dtype)

    def multiply_rows(
        self,
        rows_RI: Rows,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
        out_RC: Tensor | None = None,
    ) -> Any:
        assert out_RC is None, "these kernels allocate their results"
        rows = quantize_rows(rows_RI, counts_e if has_spare_rows and gather is None else None)
        scale_RF = self._new_scales(rows.codes, len(rows) if gather is None else len(gather.indices_R))
        output_RC = grouped_matmul(
            rows.codes,
            self.weight_eOI,
            counts_e,
            row_scale_SB=rows.scales,
            indices_R=None if gather is None else gather.indices_R,
            divisor=1 if gather is None else gather.divisor,
            out_dtype=rows.dtype,
            out_scale_RF=scale_RF,
            expected_rows=expected_rows,
            **self.options,
        )
        return output_RC if scale_RF is None else Float8Rows(output_RC, scale_RF, rows.dtype)

    def multiply_slots(self, slots_eSI: Rows, counts_e: Tensor, expected_rows: int | None = None) -> Any:
        slots = quantize_rows(slots_eSI, counts_e)
        scale_eSF = self._new_scales(slots.codes, *slots.codes.shape[:2])
        output_eSC = grouped_matmul_slots(
            slots.codes,
            self.weight_eOI,
            counts_e,
            slot_scale_eSB=slots.scales,
            out_dtype=slots.dtype,
            out_scale_eSF=scale_eSF,
            expected_rows=expected_rows,
            **self.options,
        )
        return output_eSC if scale_eSF is None else Float8Rows(output_eSC, scale_eSF, slots.dtype)

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        raise AssertionError("weights with an input of their own each are not held in blocks")

    def _new_scales(self, codes: Tensor, *sizes: int) -> Tensor | None:
        """Return memory for the scales of results; None if results are not quantised."""
        if not self.num_out_blocks:
            return None
        return codes.new_empty(*sizes, self.num_out_blocks, dtype=torch.float32)


class OrderedProduct(TritonProduct):
    """A `TritonProduct` that adds in `InputChunks`, and never uses products of torch."""

    def __init__(self, weights: OpenWeights) -> None:
        assert weights.scales_eGB is None or weights.is_mxfp4, "8-bit floats are refused with batch_invariant"
        super().__init__(weights)

    def multiply(self, input_TI: Tensor) -> Tensor:
        (weight_OI,), bias_eO, chunks = self.weights.weight_eOI, self.weights.bias_eO, self.weights.chunks
        output_TO = chunked_matmul(
            input_TI,
            weight_OI,
            chunk_inputs=None if chunks is None else chunks.size,
            bias_O=None if bias_eO is None else bias_eO[0],
            out_dtype=torch.float32 if chunks is not None and chunks.keeps_float32 else input_TI.dtype,
        )
        return activated(self.weights.activation, output_TO)

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        slots_eTI = input_TeI.transpose(0, 1).contiguous()
        counts_e = torch.full(slots_eTI.shape[:1], len(input_TeI), device=input_TeI.device)
        output_TeC = self.multiply_slots(slots_eTI, counts_e).transpose(0, 1)
        return output_TeC.contiguous() if out_TeC is None else out_TeC.copy_(output_TeC)
