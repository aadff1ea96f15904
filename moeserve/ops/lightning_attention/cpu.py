"""Lightning attention with the C++ kernel of linear attention."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.native import is_measured
from moeserve.step_inputs import StepInputs

# N heads, X = N * V, C = 3 * X


class CpuLightningAttention:
    """A batch-invariant `LightningAttention`: a token's bytes do not depend on chunks, batch or number of threads."""

    def __init__(self, native: ModuleType, dtype: torch.dtype) -> None:
        self._attend = native.lightning_attention
        self._dtype = dtype

    def __call__(self, mixed_TC: Tensor, log_decay_N: Tensor, states: Tensor, step: StepInputs) -> Tensor:
        assert step.states is not None
        sizes = len(mixed_TC), mixed_TC.shape[1] // 3
        outputs_TX = torch.empty(sizes, dtype=torch.float32)
        out_TX = new_empty(mixed_TC, *sizes, dtype=self._dtype)
        if is_measured():
            outputs_TX.zero_()  # so that its memory is measured
            return out_TX.zero_()
        self._attend(mixed_TC, log_decay_N, states, step.row_starts, *step.states, outputs_TX, out_TX)
        return out_TX
