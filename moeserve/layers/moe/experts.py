"""The expert networks of this rank and their weights."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import InputShare
from moeserve.layers.moe.dispatch.base import PackedTokens, SlottedTokens
from moeserve.layers.weights import QuantizationLimits, Weights
from moeserve.ops import products
from moeserve.ops.products.cpu import CpuStoredExperts
from moeserve.ops.rows.activations import Activation, num_parts_of
from moeserve.ops.rows.interface import plain_rows


class Experts(nn.Module):
    """Feed-forward networks: down(activation(gate(x), up(x))) or down(activation(up(x))), each on its own rows.

    If ranks have shares of the width, the caller must sum the outputs of all shares.

    Args:
        num_experts: number of slots of this rank, expert copies included; may be 0.
        share: this rank's share of each expert's inner values.
        has_down_bias: None: as `has_bias`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        share: InputShare,
        activation: Activation,
        context: BuildContext,
        *,
        has_bias: bool,
        has_down_bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.width = width = share.inputs
        gate_up_shape = num_experts, num_parts_of(activation) * (width.stop - width.start), hidden_size
        down_shape = num_experts, hidden_size, width.stop - width.start
        # One rank adds the bias.
        has_down_bias = (has_bias if has_down_bias is None else has_down_bias) and width.start == 0
        kind, limits = products.GROUPED, QuantizationLimits(can_be_mxfp4=True)
        down = Weights(
            kind,
            down_shape,
            context,
            has_bias=has_down_bias,
            limits=replace(limits, min_bits=context.down_bits),
            chunks=share.chunks,
        )
        self.gate_up = Weights(
            kind, gate_up_shape, context, has_bias=has_bias, activation=activation, limits=limits, feeds=down
        )
        self.down = down
        self.stored: CpuStoredExperts | None = None  # computes in place of both, with weights on disk

    @property
    def memory_of_each(self) -> list[Tensor]:
        """The tensors that together have all weights of the experts, each as [e, bytes] uint8; see `Weights`."""
        return [*self.gate_up.memory_of_each, *self.down.memory_of_each]

    def forward(self, tokens: PackedTokens | SlottedTokens) -> Tensor:
        """Return outputs in the layout of the tokens: [R, D] for R rows, or [e, S, D] for e experts of S slots each."""
        gate_up, down, groups = self.gate_up.product, self.down.product, tokens.groups
        output: Tensor
        match tokens:
            case PackedTokens() if self.stored is not None:
                rows_RD = plain_rows(tokens.rows_RD)
                output = self.stored.multiply(rows_RD, groups, tokens.gather, tokens.out_RD)
            case PackedTokens():
                middle = gate_up.multiply(self.gate_up.input_of(tokens.rows_RD), groups, tokens.gather)
                output = down.multiply(middle, groups, out_RC=tokens.out_RD)
            case SlottedTokens():
                middle = gate_up.multiply_slots(self.gate_up.input_of(tokens.slots_eSD), groups)
                output = down.multiply_slots(middle, groups)
        return output
