"""The residual between the networks of a decoder: one stream, or several with hyper-connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.layers.context import ModelContext
from moeserve.layers.norm import RMSNorm, RowsForm
from moeserve.ops.streams.interface import StreamsConfig, StreamsWeights

# T tokens, D model width, S streams, X = S * D, C coefficients


@dataclass(frozen=True)
class Streams:
    """Several residual streams, and the coefficients of the network that runs on them."""

    values_TX: Tensor
    coefficients_TC: Tensor | None = None  # float32; None: no network is running


class HyperConnection(nn.Module):
    """The place of a network between streams. It has the interface of `RMSNorm`, which it ends with.

    Args:
        num_kinds: 3 around a network; 1 for the last place, whose normalised streams are the model's output.
    """

    def __init__(
        self,
        config: StreamsConfig,
        hidden_size: int,
        norm_epsilon: float,
        context: ModelContext,
        form: RowsForm = "plain",
        *,
        num_kinds: int = 3,
    ) -> None:
        super().__init__()
        num_coefficients = config.num_coefficients if num_kinds == 3 else config.num_streams
        wide = torch.float32
        self.map = context.parameter(num_coefficients, config.num_streams * hidden_size, dtype=wide)
        self.base = context.parameter(num_coefficients, dtype=wide)
        self.scales = context.parameter(num_kinds, dtype=wide)
        self.norm = RMSNorm(hidden_size, norm_epsilon, context, form)
        self.kernels = context.kernels.make_streams(config, norm_epsilon)

    @property
    def weight(self) -> Tensor:
        """The weight of the norm."""
        return self.norm.weight

    def after_adding(self, update_TD: Tensor | None, streams: Streams) -> tuple[Streams, Any]:
        """Return the streams behind a network with this output, and the normalised input of the next one.

        Args:
            update_TD: None: no network ran before.
        """
        values_TX = self.add(streams, update_TD)
        weights = StreamsWeights(self.map, self.base, self.scales)
        collapsed_TD, coefficients_TC = self.kernels.collapse(values_TX, weights)
        _, normed = self.norm.after_adding(None, collapsed_TD)
        return Streams(values_TX, coefficients_TC), normed

    def add(self, streams: Streams, update_TD: Tensor | None) -> Tensor:
        """Return the values of the streams behind a network with this output."""
        if update_TD is None:
            return streams.values_TX
        assert streams.coefficients_TC is not None
        return self.kernels.expand(streams.values_TX, update_TD, streams.coefficients_TC)
