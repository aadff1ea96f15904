"""The expert networks as one operation: rows grouped by expert in, rows out, packed or in slots."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops.activation import GatedActivation
from moeserve.ops.linear import LinearKernel, choose_linear

# R rows sorted by expert, S slots of each expert, D model width, I expert width, F = 2 * I, e experts


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


class SlottedExpertKernel(Protocol):
    """The same for rows in slots.

    Args:
        slots_eSD: each expert's rows in its first slots.
        counts_e: [e] int64, rows of each expert, at most S.

    Returns:
        [e, S, D] in the dtype of the rows; what is in slots without a row is not to be read.
    """

    def __call__(self, slots_eSD: Tensor, counts_e: Tensor, weights: ExpertWeights) -> Tensor: ...


def choose_experts(device: str, activation: GatedActivation) -> ExpertKernel:
    """The expert kernel for a device type."""
    return functools.partial(experts_in_turn, activation=activation, linear=choose_linear(device))


def choose_slotted_experts(device: str, activation: GatedActivation) -> SlottedExpertKernel:
    """The expert kernel for rows in slots, for a device type."""
    if device == "cpu":
        return functools.partial(slotted_experts_in_turn, activation=activation, linear=choose_linear(device))
    return functools.partial(slotted_experts_at_once, activation=activation)


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
        output_RD[rows] = _one_expert(rows_RD[rows], weights, expert, activation, linear)
        first += count
    return output_RD


def slotted_experts_in_turn(
    slots_eSD: Tensor, counts_e: Tensor, weights: ExpertWeights, *, activation: GatedActivation, linear: LinearKernel
) -> Tensor:
    """One expert after the other, its rows alone: the bytes of `experts_in_turn`. See `SlottedExpertKernel`."""
    output_eSD = torch.empty_like(slots_eSD)
    for expert, count in enumerate(counts_e.tolist()):
        if count:
            output_eSD[expert, :count] = _one_expert(slots_eSD[expert, :count], weights, expert, activation, linear)
    return output_eSD


def slotted_experts_at_once(
    slots_eSD: Tensor, counts_e: Tensor, weights: ExpertWeights, *, activation: GatedActivation
) -> Tensor:
    """The reference, of fixed shapes: all slots of all experts, with a row or without. See `SlottedExpertKernel`."""
    gate_up_eSF = torch.bmm(slots_eSD, weights.gate_up_eFD.transpose(1, 2))
    if weights.gate_up_bias_eF is not None:
        gate_up_eSF = gate_up_eSF + weights.gate_up_bias_eF[:, None]
    output_eSD = torch.bmm(activation(*gate_up_eSF.chunk(2, dim=-1)), weights.down_eDI.transpose(1, 2))
    return output_eSD if weights.down_bias_eD is None else output_eSD + weights.down_bias_eD[:, None]


def _one_expert(
    rows_RD: Tensor, weights: ExpertWeights, expert: int, activation: GatedActivation, linear: LinearKernel
) -> Tensor:
    gate_up_RF = linear(rows_RD, weights.gate_up_eFD[expert], _of(weights.gate_up_bias_eF, expert))
    gated_RI = activation(*gate_up_RF.chunk(2, dim=-1))
    return linear(gated_RI, weights.down_eDI[expert], _of(weights.down_bias_eD, expert))


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
