"""The caches of one rank as places of items: what stores behind the KV cache and other engines copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.protocol import CacheKind, CachePlace


@dataclass(frozen=True)
class CachedTensor:
    """A part of all items of a kind: the part of item i is `tensor[i]`."""

    layer: int  # index on this rank
    number: int  # among the tensors of this layer
    kind: CacheKind
    tensor: Tensor


class CachedItems:
    """All tensors of a rank's caches, by the kind of their items."""

    def __init__(self, caches: Sequence[Any], saved_rows: range) -> None:
        """
        Args:
            caches: of the layers; each has `tensors_of_items`.
            saved_rows: rows of state caches that have saved states.
        """
        self.tensors: list[CachedTensor] = []
        for layer, cache in enumerate(caches):
            own = [(kind, tensor) for kind, tensors in cache.tensors_of_items.items() for tensor in tensors]
            for number, (kind, tensor) in enumerate(own):
                if kind == CacheKind.STATE:
                    tensor = tensor[saved_rows.start : saved_rows.stop]
                self.tensors.append(CachedTensor(layer, number, kind, tensor))
        self._stream = torch.cuda.Stream() if any(each.tensor.is_cuda for each in self.tensors) else None

    def of(self, kind: CacheKind) -> list[Tensor]:
        """Return the tensors of a kind."""
        return [each.tensor for each in self.tensors if each.kind == kind]

    def bytes_of(self, kind: CacheKind) -> int:
        """Return the size of an item."""
        return sum(tensor[0].nbytes for tensor in self.of(kind) if len(tensor))

    def num_places(self, kind: CacheKind) -> int:
        """Return the number of items of a kind for which the caches have places; 0 without such layers."""
        return max(map(len, self.of(kind)), default=0)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Run the copies of a `with` block beside the steps, on a CUDA stream of their own if the caches are on a GPU.

        At the end of the block, also by an error, they have ended.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


def indices_by_kind(places: Sequence[CachePlace]) -> dict[CacheKind, list[int]]:
    """Return the numbers of the places of each kind, within the sequence."""
    numbers: dict[CacheKind, list[int]] = {}
    for number, place in enumerate(places):
        numbers.setdefault(place.kind, []).append(number)
    return numbers
