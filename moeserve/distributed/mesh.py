"""Arithmetic of ranks: who shares a group with whom, and who gets which share. Knows numbers alone, no processes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from moeserve.errors import SettingsError

Axis = Literal["tp", "dp", "pp", "ep"]


def share_of(num_items: int, part: int, num_parts: int) -> slice:
    """The items of one part, when items are divided in order and as evenly as can be."""
    assert 0 <= part < num_parts
    return slice(num_items * part // num_parts, num_items * (part + 1) // num_parts)


def share_sizes(num_items: int, num_parts: int) -> tuple[int, ...]:
    """How many items each part has; the sizes differ by one at most."""
    bounds = [num_items * part // num_parts for part in range(num_parts + 1)]
    return tuple(end - start for start, end in pairwise(bounds))


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on each axis."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All ranks: `dp` replicas of `pp` stages of `tp` ranks. tp varies fastest with the rank, dp slowest.

    SettingsError when a size is less than one.
    """

    tp: int
    dp: int
    pp: int = 1

    def __post_init__(self) -> None:
        for axis, size in dict(tp=self.tp, dp=self.dp, pp=self.pp).items():
            if size < 1:
                raise SettingsError(f"{axis} = {size} ranks cannot be: every axis has at least 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world_size
        stage, tp = divmod(rank, self.tp)
        dp, pp = divmod(stage, self.pp)
        return Coordinates(dp=dp, pp=pp, tp=tp)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that share the axis' group with `rank`, ascending, itself included."""
        fixed = self._fixed(axis, rank)
        return tuple(other for other in range(self.world_size) if self._fixed(axis, other) == fixed)

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of an axis, by their first ranks. Each rank is in one of them."""
        members = defaultdict(list)
        for rank in range(self.world_size):
            members[self._fixed(axis, rank)].append(rank)
        return tuple(map(tuple, members.values()))

    def _fixed(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """What the ranks of one group have in common."""
        at = self.coordinates(rank)
        match axis:
            case "tp":
                return at.dp, at.pp
            case "dp":
                return at.pp, at.tp
            case "pp":
                return at.dp, at.tp
            case "ep":
                return (at.pp,)
