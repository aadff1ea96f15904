"""Expert placement: against a plain form of the published algorithm, and over drifting loads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.distributed.mesh import share_sizes
from moeserve.errors import SettingsError
from moeserve.layers.moe.placement.eplb import (
    eplb,
    imbalance,
    moves,
    place_experts,
    rank_loads,
    rebalance,
)
from moeserve.layers.moe.placement.placement import Placement

ROUNDING = 1 + 1e-9


def zipf(seed: int, num_experts: int, exponent: float = 1.0) -> list[float]:
    """Zipf loads in random order."""
    loads = [1 / (index + 1) ** exponent for index in range(num_experts)]
    random.Random(seed).shuffle(loads)
    return loads


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Experts, ranks, slots."""
    num_experts, num_ranks = draw(st.integers(1, 40)), draw(st.integers(1, 24))
    return num_experts, num_ranks, draw(st.integers(num_experts, num_experts * num_ranks))


LOAD = st.one_of(st.sampled_from([0.0, 1.0, 2.5, 7.0, 1e4]), st.floats(0, 1e30))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int, int]:
    num_experts, num_ranks, num_slots = draw(sizes())
    return draw(st.lists(LOAD, min_size=num_experts, max_size=num_experts)), num_ranks, num_slots


@st.composite
def problems_of_nodes(draw: st.DrawFn) -> tuple[list[float], int, int, dict[str, int]]:
    """Loads, ranks and slots; nodes and groups that divide them."""
    num_nodes, ranks_per_node = draw(st.integers(2, 4)), draw(st.integers(1, 6))
    num_groups = num_nodes * draw(st.integers(1, 3))
    num_experts = num_groups * draw(st.integers(1, 6))
    num_slots = draw(st.integers(num_experts, num_experts * ranks_per_node))
    loads = draw(st.lists(LOAD, min_size=num_experts, max_size=num_experts))
    return loads, num_nodes * ranks_per_node, num_slots, {"num_nodes": num_nodes, "num_groups": num_groups}


def plain_eplb(loads: Sequence[float], num_slots: int, num_ranks: int) -> list[tuple[int, ...]]:
    """The published algorithm, from its description, for slots that divide evenly."""
    counts = [1] * len(loads)
    copies = [*range(len(loads))]
    while len(copies) < num_slots:
        hottest = max(range(len(loads)), key=lambda expert: loads[expert] / counts[expert])
        copies.append(hottest)
        counts[hottest] += 1
    room = num_slots // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    total = [0.0] * num_ranks
    # One item for each rank: they keep their order.
    order = sorted(range(num_slots), key=lambda copy: (-loads[copies[copy]] / counts[copies[copy]], copy))
    for copy in range(num_slots) if room == 1 else order:
        best = min((rank for rank in range(num_ranks) if len(ranks[rank]) < room), key=total.__getitem__)
        ranks[best].append(copies[copy])
        total[best] += loads[copies[copy]] / counts[copies[copy]] if room > 1 else 1
    return [tuple(experts) for experts in ranks]


@given(st.data())
@settings(derandomize=True, deadline=None)
def test_eplb_equals_the_published_algorithm(data: st.DataObject) -> None:
    num_experts, num_ranks = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 12))
    slots_per_rank = data.draw(st.integers(-(-num_experts // num_ranks), num_experts))
    loads = data.draw(st.lists(st.integers(1, 30).map(float), min_size=num_experts, max_size=num_experts))
    expected = plain_eplb(loads, slots_per_rank * num_ranks, num_ranks)
    assert eplb(loads, num_ranks, slots_per_rank * num_ranks).logical_of_slot == tuple(expected)


@given(problems())
@settings(derandomize=True, deadline=None)
def test_eplb_of_any_size(problem: tuple[list[float], int, int]) -> None:
    loads, num_ranks, num_slots = problem
    placement = eplb(loads, num_ranks, num_slots)
    assert placement.num_logical == len(loads)
    assert placement.num_slots == share_sizes(num_slots, num_ranks)
    assert sum(rank_loads(loads, placement)) == pytest.approx(sum(loads))


def test_the_published_example_of_two_nodes() -> None:
    """From the README of https://github.com/deepseek-ai/EPLB."""
    loads = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    expected = [
        (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
        (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
    ]
    assert [eplb(each, 8, 16, num_nodes=2, num_groups=4).logical_of_physical for each in loads] == expected


def check_nodes(placement: Placement, num_nodes: int, num_groups: int) -> None:
    """Check that each node holds whole groups, equally many, which no other node holds."""
    ranks_per_node, group_size = placement.num_ranks // num_nodes, placement.num_logical // num_groups
    held: list[int] = []
    for first in range(0, placement.num_ranks, ranks_per_node):
        slots = placement.logical_of_slot[first : first + ranks_per_node]
        experts = {expert for of_rank in slots for expert in of_rank}
        assert len(experts) == placement.num_logical // num_nodes
        held += sorted({expert // group_size for expert in experts})
    assert sorted(held) == list(range(num_groups))


@given(problems_of_nodes())
def test_nodes_hold_whole_groups(problem: tuple[list[float], int, int, dict[str, int]]) -> None:
    loads, num_ranks, num_slots, nodes = problem
    placement = eplb(loads, num_ranks, num_slots, **nodes)
    check_nodes(placement, **nodes)
    assert placement.num_slots == share_sizes(num_slots, num_ranks)
    assert sum(rank_loads(loads, placement)) == pytest.approx(sum(loads))


@pytest.mark.parametrize(
    ("num_ranks", "num_slots", "num_nodes", "num_groups"),
    [(4, 16, 2, 3), (4, 16, 2, 1), (4, 16, 4, 2), (3, 16, 2, 4), (4, 16, 2, 8), (4, 25, 2, 4), (4, 16, 1, 4)],
)
def test_the_policy_is_global_if_groups_do_not_fit_on_nodes(
    num_ranks: int, num_slots: int, num_nodes: int, num_groups: int
) -> None:
    loads = zipf(0, 12)
    placement = eplb(loads, num_ranks, num_slots, num_nodes=num_nodes, num_groups=num_groups)
    assert placement == eplb(loads, num_ranks, num_slots)


def test_imbalance_by_hand() -> None:
    placement = Placement(((0, 1), (0, 2)), 3)
    assert rank_loads([4, 1, 3], placement) == (3.0, 5.0)
    assert imbalance([4, 1, 3], placement) == 1.25
    assert imbalance([0, 0, 0], placement) == 1.0
    assert imbalance([5e-324, 0, 0], placement) == 1.0  # half of it rounds to zero


def test_zero_loads_are_placed_as_equal_ones() -> None:
    assert eplb([0.0] * 6, 4, 12) == eplb([1.0] * 6, 4, 12)


@given(problems().map(lambda problem: (*problem, {})) | problems_of_nodes(), st.data())
def test_rebalancing_from_any_placement(
    problem: tuple[list[float], int, int, dict[str, int]], data: st.DataObject
) -> None:
    """The result is within one percent of EPLB, kept experts keep their slots, and the moves lead to it."""
    loads, num_ranks, num_slots, nodes = problem
    before = eplb(data.draw(st.permutations(loads)), num_ranks, num_slots, **nodes)
    after = rebalance(loads, before)
    assert after.num_slots == before.num_slots
    check_nodes(after, **nodes or {"num_nodes": 1, "num_groups": 1})
    assert imbalance(loads, after) <= 1.01 * imbalance(loads, eplb(loads, num_ranks, num_slots, **nodes)) * ROUNDING
    for old, new in zip(before.logical_of_slot, after.logical_of_slot, strict=True):
        kept = sum(one == other for one, other in zip(old, new, strict=True))
        assert kept == (Counter(old) & Counter(new)).total()

    slots = [list(of_rank) for of_rank in before.logical_of_slot]
    node_of_rank = data.draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    found = moves(before, after, node_of_rank)
    for move in found:
        holders = [rank for rank, held in enumerate(before.logical_of_slot) if move.expert in held]
        nodes = {node_of_rank[holder] for holder in holders}
        assert node_of_rank[move.from_rank] == node_of_rank[move.to_rank] or node_of_rank[move.to_rank] not in nodes
        assert before.logical_of_slot[move.to_rank][move.slot] != move.expert
        assert move.from_rank in holders
        slots[move.to_rank][move.slot] = move.expert
    assert tuple(map(tuple, slots)) == after.logical_of_slot
    assert len({(move.to_rank, move.slot) for move in found}) == len(found)
    assert rebalance(loads, after) == after, "a placement that is good enough stays"


def test_moves_by_hand() -> None:
    before = Placement(((0, 1), (2, 3), (0, 4), (5, 6)), 7)
    after = Placement(((0, 1), (2, 0), (3, 4), (5, 6)), 7)
    near = moves(before, after, (0, 0, 1, 1))
    assert [(move.to_rank, move.slot, move.expert, move.from_rank) for move in near] == [(1, 1, 0, 0), (2, 0, 3, 1)]
    swapped = moves(before, Placement(((1, 0), (2, 3), (0, 4), (5, 6)), 7))
    assert [(move.to_rank, move.slot, move.from_rank) for move in swapped] == [(0, 0, 0), (0, 1, 0)]


def test_senders_are_spread() -> None:
    before = Placement(((0, 1), (0, 2), (1, 3), (1, 4)), 5)
    after = Placement(((0, 1), (0, 2), (0, 3), (0, 4)), 5)
    assert [move.from_rank for move in moves(before, after)] == [0, 1]


def drifted(generator: random.Random, loads: Sequence[float]) -> list[float]:
    """The loads of the next window: all vary a little, and three experts become hot."""
    new = [load * generator.lognormvariate(0, 0.3) for load in loads]
    for expert in generator.sample(range(len(loads)), 3):
        new[expert] *= 4
    return new


@pytest.mark.parametrize(
    ("num_slots", "num_ranks", "nodes"),
    [
        (256, 8, {}),
        (288, 32, {}),
        (320, 320, {}),
        (288, 32, {"num_nodes": 2, "num_groups": 8}),
        (288, 16, {"num_nodes": 4, "num_groups": 8}),
    ],
)
def test_drifting_loads_move_few_experts(num_slots: int, num_ranks: int, nodes: dict[str, int]) -> None:
    """Rebalancing moves less than half of what a new EPLB placement would."""
    moved, moved_by_eplb = 0, 0
    for seed in range(2):
        generator = random.Random(seed)
        loads = zipf(seed, 256)
        placement = eplb(loads, num_ranks, num_slots, **nodes)
        for _ in range(3):
            loads = drifted(generator, loads)
            full, after = eplb(loads, num_ranks, num_slots, **nodes), rebalance(loads, placement)
            assert imbalance(loads, after) <= 1.01 * imbalance(loads, full) * ROUNDING
            moved += len(moves(placement, after))
            moved_by_eplb += len(moves(placement, full))
            placement = after
    assert moved <= 0.5 * moved_by_eplb


@pytest.mark.parametrize("load", [-1.0, float("nan"), float("inf"), 10**400])
def test_invalid_loads(load: float) -> None:
    with pytest.raises(SettingsError, match="expert 1"):
        eplb([1.0, load], 2, 2)
    with pytest.raises(SettingsError, match="expert 1"):
        rebalance([1.0, load], Placement.even(2, 2))


def test_invalid_sizes() -> None:
    with pytest.raises(SettingsError, match="not 5"):
        eplb([1.0, 2.0], 2, 5)
    with pytest.raises(SettingsError, match="0 experts"):
        eplb([], 2, 2)


def test_each_layer_is_placed_by_its_own_loads() -> None:
    placed = place_experts([[9, 1, 1], [1, 1, 9]], num_layers=2, num_experts=3, num_ranks=2, num_redundant=1)
    assert placed == (eplb([9, 1, 1], 2, 4), eplb([1, 1, 9], 2, 4))
    assert [len(layer.physical_of_logical[expert]) for layer, expert in zip(placed, (0, 2), strict=True)] == [2, 2]
    unknown = place_experts([], num_layers=2, num_experts=3, num_ranks=2, num_redundant=1)
    assert unknown == (Placement.even(3, 2, 1),) * 2
    assert place_experts([], num_layers=0, num_experts=0, num_ranks=2, num_redundant=0) == ()


def test_the_policy_follows_from_nodes_and_groups() -> None:
    loads = [zipf(0, 12), zipf(1, 12)]
    shape: dict[str, int] = dict(num_layers=2, num_experts=12, num_ranks=4, num_redundant=4)
    placed = place_experts(loads, **shape, node_of_rank=(0, 0, 2, 2), num_groups=4)
    assert placed == tuple(eplb(each, 4, 16, num_nodes=2, num_groups=4) for each in loads)
    (unknown, _) = place_experts([], **shape, node_of_rank=(0, 0, 2, 2), num_groups=4)
    assert unknown.logical_of_slot == ((0, 1, 2, 3), (4, 5, 0, 1), (6, 7, 8, 9), (10, 11, 6, 7))
    check_nodes(rebalance(loads[0], unknown), num_nodes=2, num_groups=4)
    for nodes in ((), (0, 0, 0, 0), (0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 1, 2)):
        assert place_experts(loads, **shape, node_of_rank=nodes, num_groups=4) == place_experts(loads, **shape)
        assert place_experts([], **shape, node_of_rank=nodes, num_groups=4) == (Placement.even(12, 4, 4),) * 2
