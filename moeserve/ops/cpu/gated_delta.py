"""The gated delta rule by C++ kernels.

The bytes of a token's result do not depend on the chunk, the batch or the number of threads. Dtypes outside
`NATIVE_DTYPES` run in plain torch.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.cpu.measured_step import is_measured
from moeserve.ops.cpu.native import NATIVE_DTYPES
from moeserve.ops.gated_delta import GatedDeltaCache, GatedDeltaShape, GatedDeltaWeights
from moeserve.ops.torch.gated_delta import TorchGatedDelta
from moeserve.step_inputs import StepInputs

# T tokens, N value heads, V values of a head, X = N * V, C channels


class CpuGatedDelta:
    """See `GatedDelta`."""

    def __init__(self, native: ModuleType, shape: GatedDeltaShape) -> None:
        self._native = native
        self._reference = TorchGatedDelta(shape)

    def __call__(
        self,
        input_TC: Tensor,
        gates_TX: Tensor,
        rates_T2N: Tensor,
        weights: GatedDeltaWeights,
        cache: GatedDeltaCache,
        step: StepInputs,
    ) -> Tensor:
        if input_TC.dtype not in NATIVE_DTYPES:
            return self._reference(input_TC, gates_TX, rates_T2N, weights, cache, step)
        assert step.states is not None
        mixed_TC = torch.empty(input_TC.shape, dtype=torch.float32)
        out_TX = new_empty(gates_TX, *gates_TX.shape)
        if is_measured():
            mixed_TC.zero_()  # takes the memory
            return out_TX.zero_()
        self._native.convolve(input_TC, weights.taps_WC, cache.inputs, step.row_starts, *step.states, mixed_TC)
        self._native.gated_delta(
            mixed_TC,
            gates_TX,
            rates_T2N,
            weights.log_decay_N,
            weights.decay_bias_N,
            weights.norm_V,
            cache.states,
            step.row_starts,
            *step.states,
            out_TX,
            norm_epsilon=self._reference.shape.norm_epsilon,
        )
        return out_TX
