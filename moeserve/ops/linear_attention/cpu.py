"""Linear attention with a C++ kernel."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.linear_attention.interface import LinearAttentionShape, LinearAttentionWeights
from moeserve.ops.native import is_measured
from moeserve.step_inputs import StepInputs

# N value heads, X = N * V, C channels


class CpuLinearAttention:
    """A batch-invariant `LinearAttention`: a token's bytes do not depend on chunks, batch or number of threads."""

    def __init__(self, native: ModuleType, shape: LinearAttentionShape) -> None:
        self._native = native
        self._shape = shape

    def __call__(
        self,
        mixed_TC: Tensor,
        gates_TX: Tensor,
        decays_TX: Tensor,
        rates_TN: Tensor | None,
        weights: LinearAttentionWeights,
        states: Tensor,
        step: StepInputs,
    ) -> Tensor:
        assert step.states is not None
        shape = self._shape
        outputs_TX = torch.empty(gates_TX.shape, dtype=torch.float32)
        out_TX = new_empty(gates_TX, *gates_TX.shape)
        if is_measured():
            outputs_TX.zero_()  # so that its memory is measured
            return out_TX.zero_()
        self._native.linear_attention(
            mixed_TC,
            gates_TX,
            decays_TX,
            rates_TN,
            weights.log_decay_N,
            weights.decay_bias,
            weights.skip_N,
            weights.norm,
            states,
            step.row_starts,
            *step.states,
            outputs_TX,
            out_TX,
            norm_heads=shape.norm_heads,
            norm_epsilon=shape.norm_epsilon,
            decay_floor=shape.decay_floor or 0.0,
            gates_with_sigmoid=shape.gate == "sigmoid",
            gates_before_norm=not shape.is_delta,
        )
        return out_TX
