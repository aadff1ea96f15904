"""Random layers of gated delta networks and steps of their chunks, for tests of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.ops.gated_delta import GatedDelta, GatedDeltaCache, GatedDeltaShape, GatedDeltaWeights
from moeserve.step_inputs import ChunkSpan, StateRows, decode_step

# T tokens, N value heads, C channels, X = N * values of a head

SHAPES = {
    "published": dict(num_heads=4, num_key_heads=2, key_dim=128, value_dim=128, num_taps=4),
    "odd": dict(num_heads=6, num_key_heads=3, key_dim=10, value_dim=37, num_taps=3),
    "wide": dict(num_heads=2, num_key_heads=2, key_dim=256, value_dim=256, num_taps=2),
}
NUM_ROWS = 6  # of states
Chunk = tuple[slice, tuple[int, int, int, int]]  # tokens; load, store, save, tokens before the save


@dataclasses.dataclass(frozen=True)
class Layer:
    """The weights of a layer, and the inputs of some tokens."""

    shape: GatedDeltaShape
    weights: GatedDeltaWeights
    input_TC: Tensor
    gates_TX: Tensor
    rates_T2N: Tensor

    @classmethod
    def random(cls, name: str, num_tokens: int, dtype: torch.dtype) -> Layer:
        shape = GatedDeltaShape(**SHAPES[name], norm_epsilon=1e-6)
        generator = torch.Generator().manual_seed(len(name))

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator)

        value_size = shape.num_heads * shape.value_dim
        weights = GatedDeltaWeights(
            normal(shape.num_taps, shape.num_channels),
            normal(shape.num_heads),
            normal(shape.num_heads),
            normal(shape.value_dim),
        )
        both = normal(num_tokens, shape.num_channels + value_size).to(dtype)  # views of one projection
        return cls(
            shape,
            weights,
            both[:, : shape.num_channels],
            both[:, shape.num_channels :],
            normal(num_tokens, 2 * shape.num_heads).to(dtype),
        )

    def cache(self) -> GatedDeltaCache:
        """Return states of all rows, which a chunk must not use unless it loads them."""
        inputs_shape = (NUM_ROWS, self.shape.num_taps - 1, self.shape.num_channels)
        states_shape = (NUM_ROWS, self.shape.num_heads, self.shape.key_dim, self.shape.value_dim)
        return GatedDeltaCache(
            torch.full(inputs_shape, torch.nan, dtype=self.input_TC.dtype), torch.full(states_shape, torch.nan)
        )

    def run(
        self, mix: GatedDelta, chunks: Sequence[tuple[slice, tuple[int, int, int, int]]], cache: GatedDeltaCache
    ) -> Tensor:
        """Return the outputs of a step of chunks, each with its load, store, save and number before the save."""
        spans, first_row = [], 0
        for part, _ in chunks:
            spans.append(ChunkSpan(first_row, part.stop - part.start, part.stop - part.start))
            first_row += part.stop - part.start
        step = dataclasses.replace(
            decode_step(first_row),
            row_starts=torch.tensor([*(span.first_row for span in spans), first_row], dtype=torch.int32),
            spans=tuple(spans),
            states=StateRows(*torch.tensor([rows for _, rows in chunks]).T.contiguous()),
        )
        rows = torch.cat([torch.arange(part.start, part.stop) for part, _ in chunks])
        # As in the model, inputs and gates are views of one projection.
        both = torch.cat([self.input_TC, self.gates_TX], dim=1)[rows]
        num_channels = self.shape.num_channels
        return mix(both[:, :num_channels], both[:, num_channels:], self.rates_T2N[rows], self.weights, cache, step)
