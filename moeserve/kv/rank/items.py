"""A view of one rank's caches as places of items, which stores behind the KV cache and other engines copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.cache_kind import CacheKind
from moeserve.kv.layer_cache import CacheDivision, CacheItems
from moeserve.kv.route_store import RouteStore
from moeserve.kv.rules import KeepState
from moeserve.protocol import CachePlace


@dataclass(frozen=True)
class CachedTensor:
    """A tensor with one part of all items of a kind: `tensor[i]` is the part of item i."""

    block: int | None  # index of the tensor's network on this rank; None: the tensor has the routes of tokens
    kind: CacheKind
    tensor: Tensor
    division: CacheDivision


class CachedItems:
    """All tensors of a rank's caches, by the kind of their items."""

    def __init__(
        self,
        items: Sequence[Sequence[CacheItems]],
        caches: Sequence[Any],
        saved_rows: range,
        routes: RouteStore | None = None,
    ) -> None:
        """
        Args:
            items: the items of each network.
            caches: caches of the networks; each has `tensors_of_items`, in the order of the network's items.
            saved_rows: rows of the state caches for saved states.
            routes: the routes of the tokens of each block, which are a part of the block.
        """
        self.tensors: list[CachedTensor] = []
        for block, (own, cache) in enumerate(zip(items, caches, strict=True)):
            for each, tensors in zip(own, cache.tensors_of_items, strict=True):
                divisions = each.divisions or (CacheDivision(0, ()),) * len(tensors)
                for tensor, division in zip(tensors, divisions, strict=True):
                    if isinstance(each.rule, KeepState):
                        tensor = tensor[saved_rows.start : saved_rows.stop]
                    self.tensors.append(CachedTensor(block, each.rule.kind, tensor, division))
        if routes is not None:
            tensor = torch.from_numpy(routes.blocks)
            self.tensors.append(CachedTensor(None, CacheKind.BLOCK, tensor, CacheDivision(0, ())))
        self._stream = torch.cuda.Stream() if any(each.tensor.is_cuda for each in self.tensors) else None

    def of(self, kind: CacheKind) -> list[Tensor]:
        """Return the tensors with items of a kind."""
        return [each.tensor for each in self.tensors if each.kind == kind]

    def bytes_of(self, kind: CacheKind) -> int:
        """Return the size in bytes of an item of a kind."""
        return sum(tensor[0].nbytes for tensor in self.of(kind) if len(tensor))

    def num_places(self, kind: CacheKind) -> int:
        """Return the number of places for items of a kind; 0 if no layer has such items."""
        return max(map(len, self.of(kind)), default=0)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Run the copies of a `with` block asynchronously to steps, on a separate CUDA stream for caches on a GPU.

        The copies have finished at the end of the block, even if it raises an exception.
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
    """Return, for each kind, the indices in `places` of the places of this kind."""
    numbers: dict[CacheKind, list[int]] = {}
    for number, place in enumerate(places):
        numbers.setdefault(place.kind, []).append(number)
    return numbers
