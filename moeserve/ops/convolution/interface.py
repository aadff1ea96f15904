"""A causal depthwise convolution over the last few tokens, as an operation.

A request's state consists of the last W - 1 inputs of its convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moeserve.step_inputs import StepInputs

# C channels, W taps: tokens that the convolution spans, including the current one; w = W - 1

MAX_TAPS = 16  # maximum number of taps that the kernels support


@dataclass(frozen=True, kw_only=True)
class ConvolutionShape:
    """One layer's convolution on one rank."""

    num_channels: int
    num_taps: int  # W
    # Gated: output gates * convolution(input gates * values) (LFM2). Otherwise SiLU(convolution(inputs)).
    is_gated: bool
    is_linear: bool = False  # the convolution alone, in the dtype of the inputs


@dataclass(frozen=True)
class ConvolutionWeights:
    """The weights of a convolution, all float32."""

    taps_WC: Tensor  # the last tap multiplies the current token
    bias_C: Tensor | None
    scale_1: Tensor | None = None  # multiplies the outputs of a linear convolution (Inkling); None: no factor


class ShortConvolution(Protocol):
    """The convolution of one layer, with its activation or its gates."""

    def __call__(
        self,
        input_TX: Tensor,
        weights: ConvolutionWeights,
        states: Tensor,
        step: StepInputs,
        token_taps_TGW: Tensor | None = None,
        /,
    ) -> Tensor:
        """Return the results [T, C], and update the states.

        The results of a gated or linear convolution have the dtype of the input, all others float32. Rows outside all
        chunks have arbitrary finite values.

        Args:
            input_TX: [T, C], or [T, 3 * C] if gated: input gates, output gates, values. Rows may be strided.
            states: [rows, w, C] in the dtype of the input: the last inputs, the oldest first; see `StateRows`.
            token_taps_TGW: in the dtype of the input; each token's numbers, which are added to the taps of each of G
                groups of channels. The first number is for the current token. Linear convolutions only; not on GPUs.
        """
        ...
