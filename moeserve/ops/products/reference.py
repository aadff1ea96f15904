"""Products of rows with weights, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.products.interface import Gather, OpenWeights

# T tokens, R rows sorted by weight, S slots of each weight, e weights side by side, I inputs, O outputs, C columns:
# the outputs, or half as many after a gated activation


class TorchProduct:
    """A `Product` that reads open weights."""

    def __init__(self, weights: OpenWeights) -> None:
        self.weights = weights

    def multiply(self, input_TI: Tensor) -> Tensor:
        (weight_OI,), chunks = self.weights.weight_eOI, self.weights.chunks
        output_TO = self._product(input_TI, weight_OI, 0)
        # Kernels with `InputChunks` use this class if this rank has none of the inputs.
        return output_TO.float() if chunks is not None and chunks.keeps_float32 else output_TO

    def multiply_rows(
        self,
        rows_RI: Tensor,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
        out_RC: Tensor | None = None,
    ) -> Tensor:
        if gather is not None:
            rows_RI = rows_RI[gather.indices_R.clamp(min=0) // gather.divisor]
        output_RC = rows_RI.new_empty(len(rows_RI), self._num_columns) if out_RC is None else out_RC
        for weight, rows in _rows_of_each(counts_e):
            output_RC[rows] = self._product(rows_RI[rows], self.weights.weight_eOI[weight], weight)
        return output_RC

    def multiply_slots(self, slots_eSI: Tensor, counts_e: Tensor, expected_rows: int | None = None) -> Tensor:
        if slots_eSI.device.type == "cpu":  # the same bytes as `multiply_rows`
            output_eSC = slots_eSI.new_empty(*slots_eSI.shape[:2], self._num_columns)
            for weight, count in enumerate(counts_e.tolist()):
                rows_SI = slots_eSI[weight, :count]
                output_eSC[weight, :count] = self._product(rows_SI, self.weights.weight_eOI[weight], weight)
            return output_eSC
        output_eSO = torch.bmm(slots_eSI, self.weights.weight_eOI.transpose(1, 2))
        if self.weights.bias_eO is not None:
            output_eSO = output_eSO + self.weights.bias_eO[:, None]
        return self._activated(output_eSO)

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        input_eTI, weight_eIO = input_TeI.transpose(0, 1), self.weights.weight_eOI.transpose(1, 2)
        if out_TeC is None:
            out_TeC = input_TeI.new_empty(*input_TeI.shape[:2], self._num_columns)
        is_plain = self.weights.bias_eO is None and self.weights.activation is None
        if is_plain and input_TeI.device.type != "cpu":  # on a CPU, the order of float32 sums depends on the strides
            torch.bmm(input_eTI, weight_eIO, out=out_TeC.transpose(0, 1))
            return out_TeC
        output_eTO = torch.bmm(input_eTI, weight_eIO)
        if self.weights.bias_eO is not None:
            output_eTO = output_eTO + self.weights.bias_eO[:, None]
        return out_TeC.copy_(self._activated(output_eTO).transpose(0, 1))

    @property
    def _num_columns(self) -> int:
        return self.weights.weight_eOI.shape[1] // self.weights.num_parts

    def _product(self, input_TI: Tensor, weight_OI: Tensor, weight: int) -> Tensor:
        bias_eO = self.weights.bias_eO
        return self._activated(functional.linear(input_TI, weight_OI, None if bias_eO is None else bias_eO[weight]))

    def _activated(self, output: Tensor) -> Tensor:
        activation = self.weights.activation
        return output if activation is None else activation(*output.chunk(self.weights.num_parts, dim=-1))


def _rows_of_each(counts_e: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the index of each weight that has rows, and the slice of its rows."""
    first = 0
    for weight, count in enumerate(counts_e.tolist()):
        if count:
            yield weight, slice(first, first + count)
        first += count
