"""The cache of a layer that keeps one state per request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# W tokens of a convolution, w = W - 1, C channels, N value heads, K values of a key


@dataclass(frozen=True)
class StateCache:
    """The states of one layer, a row for each running request and each saved state; see `StateRows`."""

    inputs: Tensor  # [rows, w, C] in the model's dtype: the last inputs of the convolution, oldest first
    states: Tensor | None = None  # recurrent states in float32; linear attention: [rows, N, K, V]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the cache; their first dimension is the row."""
        return (self.inputs,) if self.states is None else (self.inputs, self.states)

    @property
    def tensors_of_items(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors of each of the layer's `cache_items`."""
        return (self.tensors,)

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()
