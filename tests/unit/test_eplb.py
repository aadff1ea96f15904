"""Expert placement: against a plain form of the published algorithm, and over drifting loads."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moeserve.distributed.mesh import share_sizes
from moeserve.errors import SettingsError
from moeserve.expert_placement.eplb import (
    Topology,
    eplb,
    imbalance,
    moves,
    place_experts,
    rank_loads,
    rebalance,
    replicate,
)
from moeserve.expert_placement.placement import Placement

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


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int, int, Topology]:
    num_experts, num_ranks, num_slots = draw(sizes())
    topology = Topology(num_nodes=draw(st.integers(1, 4)), num_groups=draw(st.integers(1, 8)))
    one = st.one_of(st.sampled_from([0.0, 1.0, 2.5, 7.0, 1e4]), st.floats(0, 1e30))
    loads = draw(st.lists(one, min_size=num_experts, max_size=num_experts))
    return loads, num_ranks, num_slots, topology


# The published algorithm, from its description, for sizes that divide evenly.


def plain_pack(loads: Sequence[float], num_packs: int) -> list[list[int]]:
    room = len(loads) // num_packs
    if room == 1:
        return [[item] for item in range(len(loads))]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    total = [0.0] * num_packs
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], item)):
        best = min((index for index in range(num_packs) if len(packs[index]) < room), key=total.__getitem__)
        packs[best].append(item)
        total[best] += loads[item]
    return packs


def plain_eplb(
    loads: Sequence[float], num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> list[tuple[int, ...]]:
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    group_size = len(loads) // num_groups
    group_loads = [sum(loads[group * group_size : (group + 1) * group_size]) for group in range(num_groups)]
    ranks = []
    for groups in plain_pack(group_loads, num_nodes):
        experts = [group * group_size + index for group in groups for index in range(group_size)]
        copies, counts = list(experts), dict.fromkeys(experts, 1)
        while len(copies) < num_slots // num_nodes:
            hottest = max(experts, key=lambda expert: loads[expert] / counts[expert])
            copies.append(hottest)
            counts[hottest] += 1
        shares = [loads[expert] / counts[expert] for expert in copies]
        for items in plain_pack(shares, num_ranks // num_nodes):
            ranks.append(tuple(copies[item] for item in items))
    return ranks


def test_published_example() -> None:
    layers = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    topology = Topology(num_nodes=2, num_groups=4)
    assert [eplb(loads, 8, 16, topology).logical_of_physical for loads in layers] == [
        (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
        (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
    ]


@given(st.data())
@settings(derandomize=True, deadline=None)
def test_eplb_equals_the_published_algorithm(data: st.DataObject) -> None:
    num_nodes, ranks_per_node = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    num_groups = data.draw(st.integers(1, 6))
    group_size, slots_per_rank = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    num_experts, num_ranks = num_groups * group_size, num_nodes * ranks_per_node
    num_slots = slots_per_rank * num_ranks
    parts = num_nodes if num_groups % num_nodes == 0 else 1
    assume(num_experts <= num_slots <= num_experts // parts * num_ranks)
    loads = data.draw(st.lists(st.integers(1, 30).map(float), min_size=num_experts, max_size=num_experts))
    topology = Topology(num_nodes=num_nodes, num_groups=num_groups)
    expected = plain_eplb(loads, num_slots, num_groups, num_nodes, num_ranks)
    assert eplb(loads, num_ranks, num_slots, topology).logical_of_slot == tuple(expected)


@given(problems())
@settings(derandomize=True, deadline=None)
def test_eplb_of_any_size(problem: tuple[list[float], int, int, Topology]) -> None:
    loads, num_ranks, num_slots, topology = problem
    placement = eplb(loads, num_ranks, num_slots, topology)
    assert placement.num_logical == len(loads)
    assert placement.num_slots == share_sizes(num_slots, num_ranks)
    assert sum(rank_loads(loads, placement)) == pytest.approx(sum(loads))


@given(sizes(), st.data())
@settings(derandomize=True, deadline=None)
def test_copies_go_to_the_hottest(size: tuple[int, int, int], data: st.DataObject) -> None:
    num_experts, _, num_slots = size
    loads = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0, 1e4]), min_size=num_experts, max_size=num_experts))
    num_copies = Counter(replicate(loads, num_slots))
    assert num_copies.total() == num_slots
    for one, other in itertools.permutations(range(num_experts), 2):
        if num_copies[one] > 1:  # no hotter expert could have had its last copy
            assert loads[one] / (num_copies[one] - 1) >= loads[other] / num_copies[other]


def test_imbalance_by_hand() -> None:
    placement = Placement(((0, 1), (0, 2)), 3)
    assert rank_loads([4, 1, 3], placement) == (3.0, 5.0)
    assert imbalance([4, 1, 3], placement) == 1.25
    assert imbalance([0, 0, 0], placement) == 1.0
    assert imbalance([5e-324, 0, 0], placement) == 1.0  # half of it rounds to zero


def test_zero_loads_are_placed_as_equal_ones() -> None:
    assert eplb([0.0] * 6, 4, 12) == eplb([1.0] * 6, 4, 12)


@given(problems(), st.data())
@settings(derandomize=True, deadline=None)
def test_rebalancing_from_any_placement(problem: tuple[list[float], int, int, Topology], data: st.DataObject) -> None:
    """The result is within two percent of EPLB, kept experts keep their slots, and the moves lead to it."""
    loads, num_ranks, num_slots, topology = problem
    before = eplb(data.draw(st.permutations(loads)), num_ranks, num_slots, topology)
    after = rebalance(loads, before)
    assert after.num_slots == before.num_slots
    assert imbalance(loads, after) <= 1.02 * imbalance(loads, eplb(loads, num_ranks, num_slots)) * ROUNDING
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
    """Three ranks hold expert 0. One of them is the only holder of expert 1, so the others send expert 0."""
    before = Placement(((0, 1), (0, 2), (0, 3), (3, 2), (3, 2), (3, 2)), 4)
    after = Placement(((0, 1), (0, 2), (0, 3), (0, 2), (3, 0), (1, 2)), 4)
    assert [(move.to_rank, move.expert, move.from_rank) for move in moves(before, after)] == [
        (3, 0, 1),
        (4, 0, 2),
        (5, 1, 0),
    ]


def drifted(generator: random.Random, loads: Sequence[float]) -> list[float]:
    """The loads of the next window: all vary a little, and three experts become hot."""
    new = [load * generator.lognormvariate(0, 0.3) for load in loads]
    for expert in generator.sample(range(len(loads)), 3):
        new[expert] *= 4
    return new


def swapped(generator: random.Random, loads: Sequence[float]) -> list[float]:
    """The loads of the next window: up to a fifth of the experts exchange theirs with another one."""
    new = list(loads)
    for _ in range(max(1, len(loads) // 10)):
        one, other = generator.randrange(len(loads)), generator.randrange(len(loads))
        new[one], new[other] = new[other], new[one]
    return new


@pytest.mark.parametrize("drift", [drifted, swapped])
@pytest.mark.parametrize(
    ("num_experts", "num_slots", "num_ranks"),
    [(256, 256, 8), (256, 288, 32), (256, 320, 320), (128, 160, 32)],
)
def test_drifting_loads_move_few_experts(
    num_experts: int, num_slots: int, num_ranks: int, drift: Callable[..., list[float]]
) -> None:
    """Rebalancing moves less than half of what a new EPLB placement would."""
    moved, moved_by_eplb = 0, 0
    for seed in range(3):
        generator = random.Random(seed)
        loads = zipf(seed, num_experts)
        placement = eplb(loads, num_ranks, num_slots)
        for _ in range(3):
            loads = drift(generator, loads)
            full, after = eplb(loads, num_ranks, num_slots), rebalance(loads, placement)
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
    with pytest.raises(SettingsError, match="0 nodes"):
        Topology(num_nodes=0)


def test_each_layer_is_placed_by_its_own_loads() -> None:
    placed = place_experts([[9, 1, 1], [1, 1, 9]], num_layers=2, num_experts=3, num_ranks=2, num_redundant=1)
    assert placed == (eplb([9, 1, 1], 2, 4), eplb([1, 1, 9], 2, 4))
    assert [len(layer.physical_of_logical[expert]) for layer, expert in zip(placed, (0, 2), strict=True)] == [2, 2]
    unknown = place_experts([], num_layers=2, num_experts=3, num_ranks=2, num_redundant=1)
    assert unknown == (Placement.even(3, 2, 1),) * 2
    assert place_experts([], num_layers=0, num_experts=0, num_ranks=2, num_redundant=0) == ()
