"""The selective scan of Mamba-1 (arXiv 2312.00752) as an operation, and in plain torch.

Each channel of a request has a state h of N values. A token has a value x, a step size d and a gate z for each channel,
and vectors B and C [N] for all channels. The update of the state and the output are:

    d <- softplus(d)
    h <- exp(-exp(log_decay) d) h + d x B
    o  = (C^T h + skip x) SiLU(z)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.state_pieces import run_pieces
from moeserve.step_inputs import StepInputs

# C channels, N values of a channel's state

MAX_STATE = 256  # maximum number of values of a channel's state that the kernels support


@dataclass(frozen=True)
class SelectiveScanWeights:
    """The weights of a layer except its projections and its convolution, both float32."""

    log_decay_CN: Tensor
    skip_C: Tensor


class SelectiveScan(Protocol):
    """The scan of one layer: updates the states of requests, and reads each token's output from the states."""

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
        /,
    ) -> Tensor:
        """Return the gated outputs [T, C] in the dtype of the gates, and update the states.

        Output rows outside all chunks have arbitrary finite values.

        Args:
            values_TC: the values x, float32, contiguous.
            steps_TC: the step sizes d, float32, contiguous.
            inputs_TN: the vectors B, float32; this argument and the next two may be views of a wider projection.
            outputs_TN: the vectors C, float32.
            states: [rows, C, N] float32; see `StateRows`.
        """
        ...


def torch_selective_scan(
    values_TC: Tensor,
    steps_TC: Tensor,
    inputs_TN: Tensor,
    outputs_TN: Tensor,
    gates_TC: Tensor,
    weights: SelectiveScanWeights,
    states: Tensor,
    step: StepInputs,
) -> Tensor:
    """Compute a `SelectiveScan` in plain torch, token by token."""
    results_TC = torch.zeros_like(values_TC)
    steps_TC = functional.softplus(steps_TC)
    rates_CN = -weights.log_decay_CN.exp()

    def run(rows: slice, state_CN: Tensor) -> Tensor:
        for t in range(rows.start, rows.stop):
            change_C1, inputs_N = (steps_TC[t] * values_TC[t])[:, None], inputs_TN[t]
            state_CN = state_CN * (rates_CN * steps_TC[t][:, None]).exp() + change_C1 * inputs_N
            results_TC[t] = state_CN @ outputs_TN[t]
        return state_CN

    run_pieces(step, states, run)
    return ((results_TC + weights.skip_C * values_TC) * functional.silu(gates_TC.float())).to(gates_TC.dtype)
