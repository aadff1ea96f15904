"""Placements of any size, and files of expert loads, valid and not."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_windows import of_counts

from moeserve.errors import SettingsError
from moeserve.layers.moe.placement.placement import Placement, read_loads
from moeserve.telemetry.expert_load import write_window


def check(placement: Placement, num_experts: int, num_ranks: int, num_slots: int) -> None:
    """Check the properties of every even placement."""
    slots = placement.logical_of_slot
    sizes = [len(of_rank) for of_rank in slots]
    assert len(slots) == num_ranks == placement.num_ranks
    assert sum(sizes) == num_slots
    assert max(sizes) - min(sizes) <= 1
    assert set(itertools.chain(*slots)) == set(range(num_experts)) == set(range(placement.num_logical))
    for of_rank in slots:
        assert len(set(of_rank)) == len(of_rank), "two copies on one rank"
    physical = [(rank, slot) for rank, size in enumerate(sizes) for slot in range(size)]
    assert tuple(sizes) == placement.num_slots
    for rank, first in enumerate(placement.first_physical):
        assert first == sum(sizes[:rank])
    for logical, copies in enumerate(placement.physical_of_logical):
        assert [slots[rank][slot] for rank, slot in (physical[copy] for copy in copies)] == [logical] * len(copies)
        assert placement.logical_of_physical.count(logical) == len(copies)
    assert Placement.from_json(placement.to_json()) == placement


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Experts, ranks, slots."""
    num_experts, num_ranks = draw(st.integers(1, 40)), draw(st.integers(1, 24))
    return num_experts, num_ranks, draw(st.integers(num_experts, num_experts * num_ranks))


@given(sizes())
@settings(derandomize=True, deadline=None)
def test_even(size: tuple[int, int, int]) -> None:
    num_experts, num_ranks, num_slots = size
    placement = Placement.even(num_experts, num_ranks, num_slots - num_experts)
    check(placement, num_experts, num_ranks, num_slots)
    num_copies = [len(copies) for copies in placement.physical_of_logical]
    assert max(num_copies) - min(num_copies) <= 1


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_redundant", "expected"),
    [
        (10, 4, 0, ((0, 1), (2, 3, 4), (5, 6), (7, 8, 9))),
        (5, 8, 0, ((), (0,), (), (1,), (2,), (), (3,), (4,))),
        (4, 3, 2, ((0, 1), (2, 3), (0, 1))),
    ],
)
def test_even_by_hand(
    num_experts: int, num_ranks: int, num_redundant: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert Placement.even(num_experts, num_ranks, num_redundant).logical_of_slot == expected


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_redundant", "message"),
    [
        (4, 0, 0, "4 experts on 0 ranks"),
        (4, 2, -1, "from 4 slots .* to 8 .* not 3"),
        (4, 2, 5, "from 4 slots .* to 8 .* not 9"),
    ],
)
def test_even_refuses(num_experts: int, num_ranks: int, num_redundant: int, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Placement.even(num_experts, num_ranks, num_redundant)


def write(folder: Path, content: object) -> Path:
    path = folder / "loads.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_loads_by_layer_or_for_all_layers(tmp_path: Path) -> None:
    each = write(tmp_path, {"loads": [[5, 1, 0.5], [3, 3, 1]]})
    assert read_loads(each, num_layers=2, num_experts=3) == ((5.0, 1.0, 0.5), (3.0, 3.0, 1.0))
    one = write(tmp_path, {"loads": [[5, 1, 0]]})
    assert read_loads(one, num_layers=3, num_experts=3) == ((5.0, 1.0, 0.0),) * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "must hold"),
        ({"load": [[1, 2]]}, "must hold"),
        ({"loads": [[1, "2"]]}, "must hold"),
        ({"loads": [[1, -2]]}, ">= 0"),
        ('{"loads": [[1, 1e999]]}', "must hold"),
        ({"loads": [[1, 2], [1, 2]]}, "loads of 2 layers; give one list, or one for each of the 3 layers"),
        ({"loads": [[1, 2, 3]]}, r"loads\[0\] has 3 experts; the model has 2"),
    ],
)
def test_invalid_loads(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        read_loads(write(tmp_path, content), num_layers=3, num_experts=2)
    assert "loads.json" in str(caught.value)


def test_unreadable_loads(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the expert loads in .*nothing\.json: No such file"):
        read_loads(tmp_path / "nothing.json", num_layers=1, num_experts=1)
    with pytest.raises(SettingsError, match=r"loads\.json holds loads of experts, but the model has no experts"):
        read_loads(write(tmp_path, {"loads": [[1]]}), num_layers=0, num_experts=0)


def test_loads_from_windows(tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    with path.open("wb") as file:
        for first_step, counts in ((0, [[1, 2, 3], [4, 0, 2]]), (10, [[10, 0, 0], [0, 10, 0]])):
            write_window(file, of_counts(counts, [[sum(of_layer)] for of_layer in counts], first_step=first_step))
    assert read_loads(path, num_layers=2, num_experts=3) == ((11, 2, 3), (4, 10, 2))
