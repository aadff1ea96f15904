"""Short convolutions with a C++ kernel."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights
from moeserve.ops.native import is_measured
from moeserve.step_inputs import StepInputs


class CpuShortConvolution:
    """A batch-invariant `ShortConvolution`: a token's bytes do not depend on chunks, batch or number of threads."""

    def __init__(self, native: ModuleType, shape: ConvolutionShape) -> None:
        self._native = native
        self._shape = shape

    def __call__(
        self,
        input_TX: Tensor,
        weights: ConvolutionWeights,
        states: Tensor,
        step: StepInputs,
        token_taps_TGW: Tensor | None = None,
    ) -> Tensor:
        assert step.states is not None
        sizes = len(input_TX), self._shape.num_channels
        keeps_dtype = self._shape.is_gated or self._shape.is_linear
        out_TC = new_empty(input_TX, *sizes) if keeps_dtype else torch.empty(sizes, dtype=torch.float32)
        if is_measured():
            return out_TC.zero_()  # so that its memory is measured
        self._native.short_convolution(
            input_TX,
            weights.taps_WC,
            weights.bias_C,
            states,
            step.row_starts,
            *step.states,
            out_TC,
            is_gated=self._shape.is_gated,
            is_linear=self._shape.is_linear,
            scale=weights.scale_1,
            token_taps=token_taps_TGW,
        )
        return out_TC
