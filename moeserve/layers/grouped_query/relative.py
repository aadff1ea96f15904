"""Attention scores by the distance of positions. Each token has its own score for each distance (Inkling)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext
from moeserve.layers.grouped_query.lengths import LengthLimit
from moeserve.layers.linear import Linear
from moeserve.layers.rotary import Rotations, TemperatureSpec
from moeserve.layers.rows import At, Row, rows_of_heads, some_rows, whole
from moeserve.layers.weights import QuantizationLimits
from moeserve.ops import rows
from moeserve.ops.rows.interface import Rows

# S size of a state, E distances


@dataclass(frozen=True, kw_only=True)
class RelativeSpec:
    """The shape of a layer's scores by distance."""

    size: int  # size of a head's state, from which the head's scores are computed
    num_distances: int  # number of distances with scores; distance 0 is the token itself
    temperature: TemperatureSpec | None = None  # multiplies the states
    length_limit: float | None = None  # maximum length of the states, after a learned scale


class RelativeScores(nn.Module):
    """Computes a score for each token, head and distance, which is added to attention scores at that distance."""

    def __init__(
        self, config: RelativeSpec, heads: slice, num_heads: int, hidden_size: int, context: BuildContext
    ) -> None:
        """
        Args:
            heads: the heads of this rank.
            num_heads: number of heads of all ranks.
        """
        super().__init__()
        self.config, self.heads, self.num_heads = config, heads, num_heads
        size = (heads.stop - heads.start) * config.size
        self.states = Linear(hidden_size, size, context, limits=QuantizationLimits(8, (heads.start * config.size,)))
        # Never quantised: too narrow for groups of quantised weights.
        self.map = Linear(config.size, config.num_distances, dataclasses.replace(context, quantization=None))
        self.limit = None
        if config.length_limit is not None:
            self.limit = LengthLimit(config.length_limit, heads, num_heads, config.size, context)
        self._apply_rope = rows.make(context.backend).apply_rope

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        share, num_rows = rows_of_heads(self.heads, self.config.size), self.num_heads * self.config.size
        yield at("r_proj.weight"), some_rows(self.states.weight, share, num_rows, self.states.weights)
        if self.limit is not None:
            yield from self.limit.rows(at.under("r_norm"))
        yield at("rel_logits_proj.proj"), whole(self.map.weight.T, self.map.weights)

    def forward(self, hidden_TD: Rows, rotations: Rotations) -> Tensor:
        """Return scores [T, N, E]: for each token and head, one score for each of E distances."""
        num_tokens, num_heads = len(hidden_TD), self.heads.stop - self.heads.start
        state_TX = self.states(self.states.weights.input_of(hidden_TD))
        state_TNS = state_TX.view(num_tokens, num_heads, self.config.size)
        if self.limit is not None:
            state_TNS = self.limit(state_TNS)
        if self.config.temperature is not None:
            state_TNS = self._apply_rope(state_TNS, rotations[self.config.temperature])
        scores: Tensor = self.map(state_TNS.flatten(0, 1))
        return scores.view(num_tokens, num_heads, self.config.num_distances)
