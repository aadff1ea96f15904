"""Products of rows with open weights, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.products.interface import Gather, OpenWeights, RowGroups

# C columns: the outputs, or half as many after a gated activation


class TorchProduct:
    """A `Product` in plain torch, which is also used for `InputChunks` if this rank has none of the inputs."""

    def __init__(self, weights: OpenWeights) -> None:
        self.weights = weights

    def multiply(self, input_TI: Tensor) -> Tensor:
        output_TC, chunks = _product(self.weights, 0, input_TI), self.weights.chunks
        return output_TC.float() if chunks is not None and chunks.keeps_float32 else output_TC


class TorchGroupedProduct:
    """A `GroupedProduct` in plain torch."""

    def __init__(self, weights: OpenWeights) -> None:
        self.weights = weights

    def multiply(
        self, rows_RI: Tensor, groups: RowGroups, gather: Gather | None = None, out_RC: Tensor | None = None
    ) -> Tensor:
        if gather is not None:
            rows_RI = rows_RI[gather.indices_R.clamp(min=0) // gather.divisor]
        output_RC = rows_RI.new_empty(len(rows_RI), self.weights.num_columns) if out_RC is None else out_RC
        for weight, rows in _rows_of_each(groups.counts_e):
            output_RC[rows] = _product(self.weights, weight, rows_RI[rows])
        return output_RC

    def multiply_slots(self, slots_eSI: Tensor, groups: RowGroups) -> Tensor:
        if slots_eSI.device.type == "cpu":  # the same bytes as `multiply`
            output_eSC = slots_eSI.new_empty(*slots_eSI.shape[:2], self.weights.num_columns)
            for weight, count in enumerate(groups.counts_e.tolist()):
                output_eSC[weight, :count] = _product(self.weights, weight, slots_eSI[weight, :count])
            return output_eSC
        return _products_of_each(self.weights, slots_eSI)


class TorchHeadProduct:
    """A `HeadProduct` in plain torch."""

    def __init__(self, weights: OpenWeights) -> None:
        self.weights = weights

    def multiply(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        weights, input_eTI = self.weights, input_TeI.transpose(0, 1)
        if out_TeC is None:
            out_TeC = input_TeI.new_empty(*input_TeI.shape[:2], weights.num_columns)
        is_plain = weights.bias_eO is None and weights.activation is None
        if is_plain and input_TeI.device.type != "cpu":  # on a CPU, the order of float32 sums depends on the strides
            torch.bmm(input_eTI, weights.weight_eOI.transpose(1, 2), out=out_TeC.transpose(0, 1))
            return out_TeC
        return out_TeC.copy_(_products_of_each(weights, input_eTI).transpose(0, 1))


def _product(weights: OpenWeights, weight: int, input_TI: Tensor) -> Tensor:
    bias_O = None if weights.bias_eO is None else weights.bias_eO[weight]
    return _activated(weights, functional.linear(input_TI, weights.weight_eOI[weight], bias_O))


def _products_of_each(weights: OpenWeights, input_eTI: Tensor) -> Tensor:
    output_eTO = torch.bmm(input_eTI, weights.weight_eOI.transpose(1, 2))
    return _activated(weights, output_eTO if weights.bias_eO is None else output_eTO + weights.bias_eO[:, None])


def _activated(weights: OpenWeights, output: Tensor) -> Tensor:
    return output if weights.activation is None else weights.activation(*output.chunk(weights.num_parts, dim=-1))


def _rows_of_each(counts_e: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the index of each weight that has rows, and the slice of its rows."""
    first = 0
    for weight, count in enumerate(counts_e.tolist()):
        if count:
            yield weight, slice(first, first + count)
        first += count
