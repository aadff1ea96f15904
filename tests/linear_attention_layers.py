"""Random layers that keep states, and steps of their chunks, for tests of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights
from moeserve.ops.linear_attention.interface import LinearAttentionShape, LinearAttentionWeights
from moeserve.ops.selective_scan.reference import SelectiveScanWeights
from moeserve.step_inputs import ChunkSpan, StateRows, StepInputs, decode_step

# T tokens, N value heads, C channels, X = N * values of a head

DELTA = dict(is_delta=True, norm_epsilon=1e-6)
STATE_SPACE = dict(is_delta=False, norm_epsilon=1e-5)
SHAPES: dict[str, dict[str, Any]] = {
    "delta": dict(num_heads=4, num_key_heads=2, key_dim=128, value_dim=128, **DELTA),
    "delta-odd": dict(num_heads=6, num_key_heads=3, key_dim=10, value_dim=37, **DELTA),
    "delta-wide": dict(num_heads=2, num_key_heads=2, key_dim=256, value_dim=256, **DELTA),
    "channels": dict(
        num_heads=2, num_key_heads=2, key_dim=128, value_dim=128, has_channel_decays=True, gate="sigmoid", **DELTA
    ),
    "channels-odd": dict(
        num_heads=4, num_key_heads=2, key_dim=9, value_dim=21, has_channel_decays=True, decay_floor=-5.0, **DELTA
    ),
    "state-space": dict(num_heads=8, num_key_heads=2, key_dim=128, value_dim=64, **STATE_SPACE),
    "delta-tiles": dict(num_heads=2, num_key_heads=1, key_dim=10, value_dim=37, **DELTA),
    "channels-tiles": dict(num_heads=1, num_key_heads=1, key_dim=19, value_dim=7, has_channel_decays=True, **DELTA),
    "state-space-odd": dict(num_heads=3, num_key_heads=1, key_dim=11, value_dim=13, **STATE_SPACE),
}
CONVOLUTIONS = {
    "one-tap": dict(num_channels=70, num_taps=1, is_gated=False),
    "plain": dict(num_channels=600, num_taps=4, is_gated=False),
    "odd": dict(num_channels=37, num_taps=2, is_gated=False),
    "long": dict(num_channels=43, num_taps=16, is_gated=False),
    "linear": dict(num_channels=53, num_taps=4, is_gated=False, is_linear=True),
    "gated": dict(num_channels=530, num_taps=3, is_gated=True),
    "scaled": dict(num_channels=70, num_taps=5, is_gated=False, is_linear=True),
    "taps of tokens": dict(num_channels=60, num_taps=4, is_gated=False, is_linear=True),
    "taps of tokens and wide groups": dict(num_channels=100, num_taps=3, is_gated=False, is_linear=True),
}
LIGHTNING = {"plain": (4, 128), "odd": (3, 37)}  # heads, and values of each
SCANS = {"plain": (200, 16), "odd": (37, 5), "wide": (70, 19)}  # channels, and values of the state of each
NUM_ROWS = 6  # of states
Chunk = tuple[slice, tuple[int, int, int, int]]  # tokens; load, store, save, tokens before the save


@dataclasses.dataclass(frozen=True)
class Layer:
    """The weights of an operation, and the inputs of some tokens."""

    shape: Any
    weights: Any
    inputs: tuple[Tensor | None, ...]  # [T, ...] each, as the operation takes them
    state_shape: tuple[int, ...]
    state_dtype: torch.dtype

    @classmethod
    def linear_attention(cls, name: str, num_tokens: int, dtype: torch.dtype) -> Layer:
        shape, normal = LinearAttentionShape(**SHAPES[name]), _normal(name)
        num_heads, value_size = shape.num_heads, shape.num_heads * shape.value_dim
        weights = LinearAttentionWeights(
            normal(num_heads),
            normal(shape.num_decays),
            normal(shape.value_dim if shape.is_delta else value_size),
            None if shape.is_delta else normal(num_heads),
        )
        # As in the model, some inputs are views of wider projections.
        gates, rates = normal(num_tokens, value_size + 5).to(dtype), normal(num_tokens, 2 * num_heads).to(dtype)
        decays = normal(num_tokens, shape.num_decays).to(dtype)
        mixed = normal(num_tokens, shape.num_channels)
        inputs = mixed, gates[:, 5:], decays, rates[:, num_heads:] if shape.is_delta else None
        return cls(shape, weights, inputs, (num_heads, shape.key_dim, shape.value_dim), torch.float32)

    @classmethod
    def convolution(cls, name: str, num_tokens: int, dtype: torch.dtype) -> Layer:
        shape, normal = ConvolutionShape(**CONVOLUTIONS[name]), _normal(name)
        weights = ConvolutionWeights(
            normal(shape.num_taps, shape.num_channels),
            normal(shape.num_channels) if name != "odd" else None,
            normal(1) if name == "scaled" or name.endswith("wide groups") else None,
        )
        width = shape.num_channels * (3 if shape.is_gated else 1)
        wide = normal(num_tokens, width + 5).to(dtype)
        inputs: tuple[Tensor, ...] = (wide[:, :width],)
        if name.startswith("taps of tokens"):
            num_groups = 2 if name.endswith("wide groups") else 12
            inputs += (normal(num_tokens, num_groups * shape.num_taps).to(dtype),)
        return cls(shape, weights, inputs, (shape.num_taps - 1, shape.num_channels), dtype)

    @classmethod
    def selective_scan(cls, name: str, num_tokens: int, dtype: torch.dtype) -> Layer:
        (num_channels, state_size), normal = SCANS[name], _normal(name)
        weights = SelectiveScanWeights(normal(num_channels, state_size), normal(num_channels))
        selected = normal(num_tokens, 3 + 2 * state_size)
        gates = normal(num_tokens, 2 * num_channels).to(dtype)
        inputs = normal(num_tokens, num_channels), normal(num_tokens, num_channels) - 1
        views = *selected[:, 3:].split(state_size, dim=1), gates[:, num_channels:]
        return cls(None, weights, (*inputs, *views), (num_channels, state_size), torch.float32)

    @classmethod
    def lightning_attention(cls, name: str, num_tokens: int, dtype: torch.dtype) -> Layer:
        (num_heads, size), normal = LIGHTNING[name], _normal(name)
        mixed = normal(num_tokens, 3 * num_heads * size) * size**-0.25
        return cls(dtype, normal(num_heads) - 2, (mixed,), (num_heads, size, size), torch.float32)

    def states(self) -> Tensor:
        """Return states of all rows, which a chunk must not use unless it loads them."""
        return torch.full((NUM_ROWS, *self.state_shape), torch.nan, dtype=self.state_dtype)

    def run(
        self,
        operation: Callable[..., Tensor],
        chunks: Sequence[Chunk],
        states: Tensor,
        starts: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the outputs of a step of chunks, each with its load, store, save and number before the save.

        Args:
            starts: positions of the first token of each chunk in its request; None: 0.
        """
        rows = torch.cat([torch.arange(part.start, part.stop) for part, _ in chunks])
        inputs = [_rows_of(each, rows) for each in self.inputs]
        step = step_of(chunks, starts or [0] * len(chunks))
        if isinstance(self.shape, ConvolutionShape):
            input_TX, *taps_of_tokens = inputs
            taps = (each.unflatten(1, (-1, self.shape.num_taps)) for each in taps_of_tokens if each is not None)
            return operation(input_TX, self.weights, states, step, *taps)
        return operation(*inputs, self.weights, states, step)


def step_of(chunks: Sequence[Chunk], starts: Sequence[int]) -> StepInputs:
    spans, first_row = [], 0
    for (part, _), start in zip(chunks, starts, strict=True):
        num_rows = part.stop - part.start
        spans.append(ChunkSpan(first_row, num_rows, start + num_rows))
        first_row += num_rows
    return dataclasses.replace(
        decode_step(first_row),
        row_starts=torch.tensor([*(span.first_row for span in spans), first_row], dtype=torch.int32),
        context_lens=torch.tensor([span.context_len for span in spans], dtype=torch.int32),
        spans=tuple(spans),
        states=StateRows(*torch.tensor([rows for _, rows in chunks]).T.contiguous()),
    )


def _rows_of(matrix: Tensor | None, rows: Tensor) -> Tensor | None:
    """Return some rows of a matrix with the distance of its rows."""
    if matrix is None:
        return None
    wide = matrix.new_empty(len(rows), matrix.stride(0))
    return wide[:, : matrix.shape[1]].copy_(matrix[rows])


def _normal(name: str) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    return lambda *sizes: torch.randn(sizes, generator=generator)
