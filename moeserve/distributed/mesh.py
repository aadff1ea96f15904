"""Rank arithmetic: the groups of a mesh, and even division of items."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from moeserve.errors import SettingsError

Axis = Literal["tp", "dp", "pp", "ep"]


def share_of(num_items: int, part: int, num_parts: int) -> slice:
    """Return the slice of the items of one part, if items are divided in order and as evenly as possible."""
    assert 0 <= part < num_parts
    return slice(num_items * part // num_parts, num_items * (part + 1) // num_parts)


def share_sizes(num_items: int, num_parts: int) -> tuple[int, ...]:
    """Return the number of items in each part of `share_of`. The numbers differ by at most one."""
    bounds = [num_items * part // num_parts for part in range(num_parts + 1)]
    return tuple(end - start for start, end in pairwise(bounds))


@dataclass(frozen=True)
class Coordinates:
    """The index of a rank on each axis."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All ranks: `dp` replicas of `pp` stages of `tp` ranks. With rising rank, tp varies fastest and dp slowest.

    The ep group of a rank consists of all ranks of its stage. Raises SettingsError if a size is less than one.
    """

    tp: int
    dp: int
    pp: int = 1

    def __post_init__(self) -> None:
        for axis, size in dict(tp=self.tp, dp=self.dp, pp=self.pp).items():
            if size < 1:
                raise SettingsError(f"{axis} = {size}: each axis needs at least 1 rank")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world_size
        stage, tp = divmod(rank, self.tp)
        dp, pp = divmod(stage, self.pp)
        return Coordinates(dp=dp, pp=pp, tp=tp)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group along `axis` that contains `rank`, ascending."""
        key = self._group_key(axis, rank)
        return tuple(other for other in range(self.world_size) if self._group_key(axis, other) == key)

    def neighbour(self, rank: int, distance: Literal[-1, 1]) -> tuple[int, int] | None:
        """Return the rank and its counterpart in the previous (-1) or next (1) stage, ascending.

        None if there is no such stage.
        """
        stage = self.coordinates(rank).pp + distance
        if not 0 <= stage < self.pp:
            return None
        other = rank + distance * self.tp
        return min(rank, other), max(rank, other)

    def _group_key(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the coordinates that all ranks of the rank's group along `axis` have in common."""
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
