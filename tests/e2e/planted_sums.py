"""Plants another order of one sum in the ranks of an engine: see tests/sitecustomize.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def plant(name: str, place: str) -> None:
    {"chunks": plant_in_chunks, "ranks": plant_in_ranks}[place]()


def plant_in_chunks() -> None:
    """Make products add two chunks as one."""
    from moeserve.ops.products import cpu

    native_weights = cpu.native_weights

    def with_longer_chunks(native: Any, packed: Any) -> Any:
        if packed.chunks is not None:
            packed = dataclasses.replace(packed, chunks=dataclasses.replace(packed.chunks, size=2 * packed.chunks.size))
        return native_weights(native, packed)

    cpu.native_weights = with_longer_chunks


def plant_in_ranks() -> None:
    """Add the partial sums of ranks in rank order instead of in a tree."""
    from moeserve.distributed.coordinator import GroupCoordinator

    reduce_scatter = GroupCoordinator.reduce_scatter

    def in_rank_order(
        self: GroupCoordinator, x: Tensor, sizes: Sequence[int], dtype: torch.dtype | None = None
    ) -> Tensor:
        if dtype is None:
            return reduce_scatter(self, x, sizes)
        own = sizes[self.rank_in_group]
        parts = self.all_to_all(x, sizes, [own] * len(sizes)).wait().view(len(sizes), own, *x.shape[1:])
        return functools.reduce(torch.add, parts).to(dtype)

    GroupCoordinator.reduce_scatter = in_rank_order  # type: ignore[method-assign]
