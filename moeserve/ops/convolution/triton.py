"""Short convolutions with a Triton kernel."""

from __future__ import annotations

from torch import Tensor

from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels.short_convolution import short_convolution


class TritonShortConvolution:
    """A `ShortConvolution` in Triton."""

    def __init__(self, shape: ConvolutionShape) -> None:
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
        assert token_taps_TGW is None
        assert not self._shape.is_linear
        return short_convolution(
            input_TX,
            weights.taps_WC,
            weights.bias_C,
            states,
            step.row_starts,
            step.states,
            max_rows_per_chunk=step.max_rows_per_chunk,
            is_gated=self._shape.is_gated,
        )
