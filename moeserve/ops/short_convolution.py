"""A causal convolution over the last few tokens, for each channel by itself, as an operation.

A request's state is the last inputs of its convolution: those of the W - 1 tokens before the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moeserve.step_inputs import StepInputs

# T tokens, C channels, W tokens that the convolution spans, its own included; w = W - 1

MAX_TAPS = 8  # of the kernels


@dataclass(frozen=True, kw_only=True)
class ConvolutionShape:
    """One layer's part on one rank."""

    num_channels: int
    num_taps: int  # W
    # Gated: output gates * convolution(input gates * values) (LFM2). Otherwise SiLU(convolution(inputs)).
    is_gated: bool


@dataclass(frozen=True)
class ConvolutionWeights:
    """Both float32."""

    taps_WC: Tensor  # the last one multiplies the token itself
    bias_C: Tensor | None


class ShortConvolution(Protocol):
    """See `ConvolutionShape`."""

    def __call__(self, input_TX: Tensor, weights: ConvolutionWeights, states: Tensor, step: StepInputs, /) -> Tensor:
        """Return [T, C], in float32, or in the dtype of the input if the convolution is gated, and update the states.

        Output rows outside of all chunks have arbitrary finite values.

        Args:
            input_TX: [T, C], or with gates [T, 3 * C]: gates of inputs, gates of outputs, values. Rows may be strided.
            states: [rows, w, C] in the dtype of the input: the last inputs, the oldest first; see `StateRows`.
        """
        ...
