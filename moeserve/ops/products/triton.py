"""Products of rows with weights in 16 or 32 bits or MXFP4, computed by Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.products.interface import Gather, OpenWeights, RowGroups
from moeserve.ops.rows.activations import Activation, kernel_arguments
from moeserve.triton_kernels.activation import activate
from moeserve.triton_kernels.chunked_matmul import chunked_matmul
from moeserve.triton_kernels.grouped_matmul import check_weights, grouped_matmul, grouped_matmul_slots

# C columns: the outputs, or half as many after a gated activation


def activated(activation: Activation | None, output_TO: Tensor) -> Tensor:
    """Return [T, C]: the outputs after the activation, or unchanged if there is none."""
    return output_TO if activation is None else activate(output_TO, **kernel_arguments(activation))


def checked_options(weights: OpenWeights) -> dict[str, Any]:
    """Return the arguments of grouped products that depend only on the weights."""
    check_weights(weights.weight_eOI, weights.scales_eGB, weights.bias_eO, weights.num_parts)
    scales_and_bias = {"weight_scale_eGB": weights.scales_eGB, "bias_eO": weights.bias_eO}
    return scales_and_bias | kernel_arguments(weights.activation)


class TritonProduct:
    """A `Product` by torch, with its activation in Triton."""

    def __init__(self, weights: OpenWeights) -> None:
        self._weight_OI = weights.weight_eOI[0]
        self._bias_O = None if weights.bias_eO is None else weights.bias_eO[0]
        self._activation = weights.activation

    def multiply(self, input_TI: Tensor) -> Tensor:
        return activated(self._activation, functional.linear(input_TI, self._weight_OI, self._bias_O))


class OrderedProduct:
    """A batch-invariant `Product`, which adds in `InputChunks` and never uses products of torch."""

    def __init__(self, weights: OpenWeights) -> None:
        chunks = weights.chunks
        self._weight_OI = weights.weight_eOI[0]
        self._bias_O = None if weights.bias_eO is None else weights.bias_eO[0]
        self._activation = weights.activation
        self._chunk_inputs = None if chunks is None else chunks.size
        self._keeps_float32 = chunks is not None and chunks.keeps_float32

    def multiply(self, input_TI: Tensor) -> Tensor:
        output_TO = chunked_matmul(
            input_TI,
            self._weight_OI,
            chunk_inputs=self._chunk_inputs,
            bias_O=self._bias_O,
            out_dtype=torch.float32 if self._keeps_float32 else input_TI.dtype,
        )
        return activated(self._activation, output_TO)


class TritonGroupedProduct:
    """A batch-invariant `GroupedProduct` in Triton."""

    def __init__(self, weights: OpenWeights) -> None:
        self._weight_eOI = weights.weight_eOI
        self._options = checked_options(weights)

    def multiply(
        self, rows_RI: Tensor, groups: RowGroups, gather: Gather | None = None, out_RC: Tensor | None = None
    ) -> Tensor:
        assert out_RC is None, "these kernels allocate their results"
        return grouped_matmul(
            rows_RI,
            self._weight_eOI,
            groups.counts_e,
            indices_R=None if gather is None else gather.indices_R,
            divisor=1 if gather is None else gather.divisor,
            expected_rows=groups.expected_rows,
            **self._options,
        )

    def multiply_slots(self, slots_eSI: Tensor, groups: RowGroups) -> Tensor:
        return grouped_matmul_slots(
            slots_eSI, self._weight_eOI, groups.counts_e, expected_rows=groups.expected_rows, **self._options
        )


class OrderedHeadProduct:
    """A batch-invariant `HeadProduct` in Triton."""

    def __init__(self, weights: OpenWeights) -> None:
        self._weight_eOI = weights.weight_eOI
        self._options = checked_options(weights)

    def multiply(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        slots_eTI = input_TeI.transpose(0, 1).contiguous()
        counts_e = torch.full(slots_eTI.shape[:1], len(input_TeI), device=input_TeI.device)
        output_TeC = grouped_matmul_slots(slots_eTI, self._weight_eOI, counts_e, **self._options).transpose(0, 1)
        return output_TeC.contiguous() if out_TeC is None else out_TeC.copy_(output_TeC)
