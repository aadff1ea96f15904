"""The expert networks as one operation: rows grouped by expert in, rows out."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops.activation import GatedActivation
from moeserve.ops.linear import LinearKernel, choose_linear

# R rows sorted by expert, D model width, I expert width, F = 2 * I, e experts


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of the experts that one rank holds, expert by expert."""

    gate_up_eFD: Tensor  # the gate's rows above those of up
    down_eDI: Tensor
    gate_up_bias_eF: Tensor | None = None
    down_bias_eD: Tensor | None = None


class ExpertKernel(Protocol):
    """Computes down(activation(gate(x), up(x))) with each expert's weights on the rows that are its own.

    Args:
        rows_RD: expert 0's rows first, then expert 1's, ...
        counts_e: [e] int64, rows of each expert; they sum to R.

    Returns:
        [R, D] in the dtype of the rows.
    """

    def __call__(self, rows_RD: Tensor, counts_e: Tensor, weights: ExpertWeights) -> Tensor: ...


def choose_experts(device: str, activation: GatedActivation) -> ExpertKernel:
    """The expert kernel for a device type."""
    return functools.partial(experts_in_turn, activation=activation, linear=choose_linear(device))


def experts_in_turn(
    rows_RD: Tensor, counts_e: Tensor, weights: ExpertWeights, *, activation: GatedActivation, linear: LinearKernel
) -> Tensor:
    """One expert after the other, each as two products. See `ExpertKernel`."""
    output_RD = torch.empty_like(rows_RD)
    first = 0
    for expert, count in enumerate(counts_e.tolist()):
        if count == 0:
            continue
        rows = slice(first, first + count)
        gate_up = linear(rows_RD[rows], weights.gate_up_eFD[expert], _of(weights.gate_up_bias_eF, expert))
        gated = activation(*gate_up.chunk(2, dim=-1))
        output_RD[rows] = linear(gated, weights.down_eDI[expert], _of(weights.down_bias_eD, expert))
        first += count
    return output_RD


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
