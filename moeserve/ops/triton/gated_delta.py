"""The gated delta rule by Triton kernels."""

from __future__ import annotations

from torch import Tensor

from moeserve.ops.gated_delta import GatedDeltaCache, GatedDeltaShape, GatedDeltaWeights
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels.gated_delta import convolve, gated_delta

# T tokens, N value heads, V values of a head, X = N * V, C channels


class TritonGatedDelta:
    """See `GatedDelta`."""

    def __init__(self, shape: GatedDeltaShape) -> None:
        self._shape = shape

    def __call__(
        self,
        input_TC: Tensor,
        gates_TX: Tensor,
        rates_T2N: Tensor,
        weights: GatedDeltaWeights,
        cache: GatedDeltaCache,
        step: StepInputs,
    ) -> Tensor:
        assert step.states is not None
        mixed_TC = convolve(input_TC, weights.taps_WC, cache.inputs, step.row_starts, step.states)
        return gated_delta(
            mixed_TC,
            gates_TX,
            rates_T2N,
            weights.log_decay_N,
            weights.decay_bias_N,
            weights.norm_V,
            cache.states,
            step.row_starts,
            step.states,
            self._shape.norm_epsilon,
        )
