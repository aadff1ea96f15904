"""The expert networks as one operation: rows grouped by expert in, rows out."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.linear import LinearKernel, choose_linear

# R rows sorted by expert, D model width, I expert width, e experts


class ExpertKernel(Protocol):
    """Computes down(silu(gate(x)) * up(x)) with each expert's weights on the rows that are its own.

    Args:
        rows_RD: expert 0's rows first, then expert 1's, ...
        counts_e: [e] int64, rows of each expert; they sum to R.
        gate_up_eFD: [e, 2 * I, D], the gate's weights above those of up.
        down_eDI: [e, D, I].

    Returns:
        [R, D] in the dtype of the rows.
    """

    def __call__(self, rows_RD: Tensor, counts_e: Tensor, gate_up_eFD: Tensor, down_eDI: Tensor) -> Tensor: ...


def choose_experts(device: str) -> ExpertKernel:
    """The expert kernel for a device type."""
    return functools.partial(experts_in_turn, linear=choose_linear(device))


def experts_in_turn(
    rows_RD: Tensor, counts_e: Tensor, gate_up_eFD: Tensor, down_eDI: Tensor, *, linear: LinearKernel
) -> Tensor:
    """One expert after the other, each as two products. See `ExpertKernel`."""
    output_RD = torch.empty_like(rows_RD)
    first = 0
    for expert, count in enumerate(counts_e.tolist()):
        if count == 0:
            continue
        rows = slice(first, first + count)
        gate, up = linear(rows_RD[rows], gate_up_eFD[expert]).chunk(2, dim=-1)
        output_RD[rows] = linear(functional.silu(gate) * up, down_eDI[expert])
        first += count
    return output_RD
