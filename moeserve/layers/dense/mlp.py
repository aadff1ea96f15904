"""The feed-forward network of dense layers and of shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import InputShare
from moeserve.layers.linear import Linear
from moeserve.layers.rows import At, Destination, Row, rows_of_heads, some_columns, some_rows
from moeserve.layers.weights import QuantizationLimits, Weights
from moeserve.ops import products
from moeserve.ops.rows.activations import Activation, num_parts_of
from moeserve.ops.rows.interface import Rows


class MLP(nn.Module):
    """down(activation(gate(x), up(x))), or down(activation(up(x))).

    If ranks have shares of the width, the caller must sum the outputs of all shares.
    """

    def __init__(
        self,
        hidden_size: int,
        share: InputShare,
        context: BuildContext,
        activation: Activation,
    ) -> None:
        """
        Args:
            share: this rank's share of the network's inner values.
        """
        super().__init__()
        self.width = width = share.inputs
        num_inner, limits = width.stop - width.start, QuantizationLimits(cuts=(width.start,))
        down_limits = replace(limits, min_bits=context.down_bits)
        down = Linear(num_inner, hidden_size, context, limits=down_limits, chunks=share.chunks)
        self.gate_up = Weights(
            products.SINGLE,
            (1, num_parts_of(activation) * num_inner, hidden_size),
            context,
            activation=activation,
            limits=limits,
            feeds=down.weights,
        )
        self.down = down

    def rows(self, at: At, width: int) -> Iterator[Row]:
        """Yield the weight mapping of this module.

        Args:
            width: number of inner values of all shares together.
        """
        num_parts, share = self.gate_up.open.num_parts, self.width
        if at.has("in_turns.gate_up_proj.weight"):  # rows of gate and up alternate (Inkling)
            memory = self.gate_up.open.weight_eOI[0].unflatten(0, (2, -1)).transpose(0, 1)
            shape, own = (2 * width, memory.shape[2]), rows_of_heads(share, 2)
            yield at("in_turns.gate_up_proj.weight"), Destination(memory, shape, (own,), self.gate_up)
            yield at("down_proj.weight"), some_columns(self.down.weight, share, width, self.down.weights)
            return
        inner = self.gate_up.open.weight_eOI[0].chunk(num_parts)
        for part, (name, memory) in enumerate(zip(("gate_proj", "up_proj")[-num_parts:], inner, strict=True)):
            if at.has("gate_up_proj.weight"):  # gates before ups
                own = slice(part * width + share.start, part * width + share.stop)
                yield at("gate_up_proj.weight"), some_rows(memory, own, num_parts * width, self.gate_up)
            else:
                yield at(f"{name}.weight"), some_rows(memory, share, width, self.gate_up)
        yield at("down_proj.weight"), some_columns(self.down.weight, self.width, width, self.down.weights)

    def forward(self, hidden_TD: Rows) -> Tensor:
        return self.down(self.gate_up.product.multiply(self.gate_up.input_of(hidden_TD)))
