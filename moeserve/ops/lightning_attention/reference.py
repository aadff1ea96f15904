"""Lightning attention (arXiv 2401.04658) as an operation, and in plain torch.

Each head of a request has a state S [V, V]. A token has a query q, a key k and a value v for each head. The decay a
of a head is the same for all tokens. The update of the state and the output are:

    a = exp(-exp(log_decay))
    S <- a S + k v^T
    o  = S^T q
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops.state_pieces import run_pieces
from moeserve.step_inputs import StepInputs

# N heads, X = N * V, C = 3 * X


class LightningAttention(Protocol):
    """The recurrence of one layer, between activation and output norm: updates and reads the states of requests."""

    def __call__(self, mixed_TC: Tensor, log_decay_N: Tensor, states: Tensor, step: StepInputs, /) -> Tensor:
        """Return the outputs [T, X], and update the states.

        Output rows outside all chunks, and of chunks that store no state, have arbitrary finite values.

        Args:
            mixed_TC: float32, contiguous: the queries of all heads, then all keys, then all values.
            log_decay_N: float32.
            states: [rows, N, V, V] float32; see `StateRows`.
        """
        ...


class TorchLightningAttention:
    """A `LightningAttention` in plain torch, token by token."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, mixed_TC: Tensor, log_decay_N: Tensor, states: Tensor, step: StepInputs) -> Tensor:
        parts = mixed_TC.unflatten(1, (3, len(log_decay_N), -1))
        query_TNV, key_TNV, value_TNV = parts.unbind(1)
        out_TNV = torch.zeros_like(value_TNV)
        decay_N11 = (-log_decay_N.exp()).exp()[:, None, None]

        def run(rows: slice, state_NVV: Tensor) -> Tensor:
            for t in range(rows.start, rows.stop):
                state_NVV = state_NVV * decay_N11 + key_TNV[t][:, :, None] * value_TNV[t][:, None]
                out_TNV[t] = torch.einsum("NKV, NK -> NV", state_NVV, query_TNV[t])
            return state_NVV

        run_pieces(step, states, run)
        return out_TNV.flatten(1).to(self._dtype)
