"""Rank arithmetic, for every mesh of up to 24 ranks, against a table of ranks made by counting."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from moeserve.distributed.mesh import Axis, Mesh, share_of, share_sizes
from moeserve.errors import SettingsError

SIZES = [
    (dp, pp, tp)
    for dp, pp, tp in product(range(1, 25), range(1, 25), range(1, 25))
    if dp * pp * tp <= 24  # with pp > 1 as well: the axis exists
]

# Axis: which of the table's axes (dp, pp, tp) run within a group.
WITHIN: dict[Axis, tuple[int, ...]] = {"dp": (0,), "pp": (1,), "tp": (2,), "ep": (0, 2)}


def groups_of_table(table: np.ndarray, within: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Return all groups. The axes that vary within a group are moved to the end; then each row is one group."""
    others = [axis for axis in range(3) if axis not in within]
    size = int(np.prod([table.shape[axis] for axis in within]))
    return {tuple(row) for row in table.transpose(*others, *within).reshape(-1, size).tolist()}


@pytest.mark.parametrize("axis", WITHIN)
def test_groups_are_rows_of_the_table_of_ranks(axis: Axis) -> None:
    for dp, pp, tp in SIZES:
        mesh = Mesh(tp=tp, dp=dp, pp=pp)
        groups = groups_of_table(np.arange(dp * pp * tp).reshape(dp, pp, tp), WITHIN[axis])
        assert all({mesh.group(axis, rank) for rank in group} == {group} for group in groups)


def test_neighbours_have_the_same_place_in_consecutive_stages() -> None:
    for dp, pp, tp in SIZES:
        mesh, table = Mesh(tp=tp, dp=dp, pp=pp), np.arange(dp * pp * tp).reshape(dp, pp, tp)
        for (replica, stage, place), rank in np.ndenumerate(table):
            after = (rank, table[replica, stage + 1, place]) if stage + 1 < pp else None
            assert mesh.neighbour(int(rank), 1) == after
            if after is not None:
                assert mesh.neighbour(int(after[1]), -1) == after
        assert all(mesh.neighbour(int(rank), -1) is None for rank in table[:, 0].flat)


def test_coordinates_are_indices_into_the_table_of_ranks() -> None:
    for dp, pp, tp in SIZES:
        mesh = Mesh(tp=tp, dp=dp, pp=pp)
        found = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
        assert [(at.dp, at.pp, at.tp) for at in found] == list(np.ndindex(dp, pp, tp))


def test_shares_are_contiguous_and_even() -> None:
    for num_items, num_parts in product(range(60), range(1, 25)):
        items = list(range(num_items))
        shares = [items[share_of(num_items, part, num_parts)] for part in range(num_parts)]
        assert [item for share in shares for item in share] == items
        assert share_sizes(num_items, num_parts) == tuple(map(len, shares))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("sizes", [dict(tp=0, dp=1), dict(tp=1, dp=-2), dict(tp=1, dp=1, pp=0)])
def test_an_axis_without_ranks_is_refused(sizes: dict[str, int]) -> None:
    name, size = min(sizes.items(), key=lambda item: item[1])
    with pytest.raises(SettingsError, match=f"{name} = {size}"):
        Mesh(**sizes)
