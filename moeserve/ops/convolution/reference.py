"""Short convolutions in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights
from moeserve.ops.state_pieces import run_pieces
from moeserve.step_inputs import StepInputs

# C channels, W taps, w = W - 1


class TorchShortConvolution:
    """A `ShortConvolution` in plain torch."""

    def __init__(self, shape: ConvolutionShape) -> None:
        self.shape = shape

    def __call__(
        self,
        input_TX: Tensor,
        weights: ConvolutionWeights,
        states: Tensor,
        step: StepInputs,
        token_taps_TGW: Tensor | None = None,
    ) -> Tensor:
        num_channels, is_gated = self.shape.num_channels, self.shape.is_gated
        input_TC, gates_TC = input_TX, None
        if is_gated:
            input_gates_TC, gates_TC, values_TC = input_TX.split(num_channels, dim=1)
            input_TC = input_gates_TC * values_TC
        dtype = input_TX.dtype if is_gated or self.shape.is_linear else torch.float32
        out_TC = torch.zeros(len(input_TX), num_channels, dtype=dtype, device=input_TX.device)
        taps_C1W = weights.taps_WC.T[:, None]
        num_groups = 1 if token_taps_TGW is None else token_taps_TGW.shape[1]

        def run(rows: slice, before_wC: Tensor) -> Tensor:
            joined = torch.cat([before_wC, input_TC[rows]])
            mixed_RC = functional.conv1d(joined.float().T[None], taps_C1W, weights.bias_C, groups=num_channels)[0].T
            if token_taps_TGW is not None:
                taps_RCW = token_taps_TGW[rows].float().flip(2).repeat_interleave(num_channels // num_groups, dim=1)
                mixed_RC = mixed_RC + (joined.float().unfold(0, taps_RCW.shape[2], 1) * taps_RCW).sum(dim=2)
            if gates_TC is not None:
                mixed_RC = mixed_RC * gates_TC[rows]
            elif not self.shape.is_linear:
                mixed_RC = functional.silu(mixed_RC)
            elif weights.scale_1 is not None:
                mixed_RC = mixed_RC * weights.scale_1
            out_TC[rows] = mixed_RC.to(dtype)
            return joined[len(joined) - len(before_wC) :]

        run_pieces(step, states, run)
        return out_TC
