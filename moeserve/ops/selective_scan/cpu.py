"""The selective scan with a C++ kernel."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.native import is_measured
from moeserve.ops.selective_scan.reference import SelectiveScanWeights
from moeserve.step_inputs import StepInputs

# C channels, N values of a channel's state


class CpuSelectiveScan:
    """A batch-invariant `SelectiveScan`: a token's bytes do not depend on chunks, batch or number of threads."""

    def __init__(self, native: ModuleType) -> None:
        self._scan = native.selective_scan

    def __call__(
        self,
        values_TC: Tensor,
        steps_TC: Tensor,
        inputs_TN: Tensor,
        outputs_TN: Tensor,
        gates_TC: Tensor,
        weights: SelectiveScanWeights,
        states: Tensor,
        step: StepInputs,
    ) -> Tensor:
        inputs = values_TC, steps_TC, inputs_TN, outputs_TN, gates_TC
        assert step.states is not None
        out_TC = new_empty(gates_TC, *gates_TC.shape)
        if is_measured():
            return out_TC.zero_()  # so that its memory is measured
        self._scan(*inputs, weights.log_decay_CN, weights.skip_C, states, step.row_starts, *step.states, out_TC)
        return out_TC
