"""Plans of experts on ranks: against the published algorithm written plainly, against bounds, and over drift."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moeserve.distributed.mesh import share_sizes
from moeserve.errors import SettingsError
from moeserve.expert_placement.eplb import (
    Topology,
    balance,
    eplb,
    imbalance,
    moves,
    pack,
    place_experts,
    rank_loads,
    rebalance,
    replicate,
)
from moeserve.expert_placement.placement import Placement

ROUNDING = 1 + 1e-9


def check(placement: Placement, num_experts: int, num_ranks: int, num_slots: int) -> None:
    """What holds for every plan: its size, all experts, and none twice on a rank."""
    assert placement.num_logical == num_experts
    assert placement.num_slots == share_sizes(num_slots, num_ranks)
    assert set(placement.logical_of_physical) == set(range(num_experts))
    assert not has_twice(placement)


def has_twice(placement: Placement) -> bool:
    return any(len(set(slots)) < len(slots) for slots in placement.logical_of_slot)


def lognormal(seed: int, num_experts: int, sigma: float = 1.0) -> list[float]:
    generator = random.Random(seed)
    return [generator.lognormvariate(0, sigma) for _ in range(num_experts)]


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Experts, ranks, slots."""
    num_experts, num_ranks = draw(st.integers(1, 40)), draw(st.integers(1, 24))
    return num_experts, num_ranks, draw(st.integers(num_experts, num_experts * num_ranks))


def some_loads(draw: st.DrawFn, num_experts: int) -> list[float]:
    """Few different ones, many different ones, and such as are measured."""
    if draw(st.booleans()):
        return lognormal(draw(st.integers(0, 10**6)), num_experts, draw(st.sampled_from([0.3, 1.0, 2.0])))
    one = st.one_of(st.sampled_from([0.0, 1.0, 2.5, 7.0, 1e4]), st.floats(0, 1e30))
    return draw(st.lists(one, min_size=num_experts, max_size=num_experts))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int, int, Topology]:
    num_experts, num_ranks, num_slots = draw(sizes())
    topology = Topology(num_nodes=draw(st.integers(1, 4)), num_groups=draw(st.integers(1, 8)))
    return some_loads(draw, num_experts), num_ranks, num_slots, topology


# The published algorithm, from its description, for sizes that divide.


def plain_pack(loads: Sequence[float], num_packs: int) -> list[list[int]]:
    room = len(loads) // num_packs
    if room == 1:
        return [[item] for item in range(len(loads))]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    total = [0.0] * num_packs
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], item)):
        best = None
        for index in range(num_packs):
            if len(packs[index]) < room and (best is None or total[index] < total[best]):
                best = index
        assert best is not None
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
            hottest = experts[0]
            for expert in experts:
                if loads[expert] / counts[expert] > loads[hottest] / counts[hottest]:
                    hottest = expert
            copies.append(hottest)
            counts[hottest] += 1
        shares = [loads[expert] / counts[expert] for expert in copies]
        for items in plain_pack(shares, num_ranks // num_nodes):
            ranks.append(tuple(copies[item] for item in items))
    return ranks


def test_the_published_example() -> None:
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
def test_eplb_is_the_published_algorithm(data: st.DataObject) -> None:
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
def test_plans_of_any_size(problem: tuple[list[float], int, int, Topology]) -> None:
    loads, num_ranks, num_slots, topology = problem
    published = eplb(loads, num_ranks, num_slots, topology)
    assert published.num_slots == share_sizes(num_slots, num_ranks)
    plan = balance(loads, num_ranks, num_slots, topology)
    check(plan, len(loads), num_ranks, num_slots)
    of_rank = rank_loads(loads, plan)
    assert sum(of_rank) == pytest.approx(sum(loads))
    if not has_twice(published):
        assert imbalance(loads, plan) <= imbalance(loads, published) * ROUNDING


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 2.0])
def test_never_worse_than_published(sigma: float) -> None:
    """Also where the published algorithm puts two copies on a rank. With a sigma of 0: uniform loads."""
    generator = random.Random(int(sigma * 10))
    num_with_twice = 0
    for num_ranks, num_redundant in [
        *itertools.product([8, 32, 64, 128, 320], [0, 8, 64]),
        *some_sizes(generator, 150),
    ]:
        loads = [generator.lognormvariate(0, sigma) if sigma else generator.random() for _ in range(256)]
        published, plan = (make(loads, num_ranks, 256 + num_redundant) for make in (eplb, balance))
        check(plan, 256, num_ranks, 256 + num_redundant)
        assert imbalance(loads, plan) <= imbalance(loads, published) * ROUNDING, (num_ranks, num_redundant)
        num_with_twice += has_twice(published)
    assert num_with_twice >= 10


def some_sizes(generator: random.Random, number: int) -> Iterator[tuple[int, int]]:
    """Ranks and redundant slots; most ranks have one slot more than others. Some have none."""
    for _ in range(number):
        yield generator.randint(8, 320), generator.randint(0, 64)


@pytest.mark.parametrize(("num_ranks", "num_slots"), [(64, 319), (16, 276), (256, 284)])
def test_equal_loads_are_spread_like_the_published(num_ranks: int, num_slots: int) -> None:
    """The published algorithm gives ranks two halves of an expert; a rank as good has halves of two experts."""
    loads = [1.0] * 256
    assert has_twice(eplb(loads, num_ranks, num_slots))
    plan = balance(loads, num_ranks, num_slots)
    check(plan, 256, num_ranks, num_slots)
    assert imbalance(loads, plan) <= imbalance(loads, eplb(loads, num_ranks, num_slots)) * ROUNDING


def test_where_no_plan_without_second_copies_is_as_good() -> None:
    """The halves of one expert are on two ranks, which carry halves; the published algorithm has both on one."""
    loads = [1.0] * 256
    assert imbalance(loads, eplb(loads, 8, 257)) == 1.0
    assert imbalance(loads, balance(loads, 8, 257)) == 32.5 / 32


def test_small_plans_against_all_there_are() -> None:
    """With three ranks: most are as good as any plan without second copies, to 1 %. The search is not complete."""
    generator = random.Random(0)
    num_best, num_all = 0, 200
    for _ in range(num_all):
        num_experts = generator.randint(3, 5)
        num_slots = generator.randint(num_experts, min(8, 3 * num_experts))
        loads = [generator.lognormvariate(0, 1) for _ in range(num_experts)]
        choices = [itertools.combinations(range(num_experts), size) for size in share_sizes(num_slots, 3)]
        complete = (slots for slots in itertools.product(*choices) if len(set().union(*slots)) == num_experts)
        least = min(imbalance(loads, Placement(slots, num_experts)) for slots in complete)
        found = imbalance(loads, balance(loads, 3, num_slots))
        assert least <= found * ROUNDING
        num_best += found <= 1.01 * least
    assert num_best >= 0.6 * num_all


@pytest.mark.parametrize(("num_experts", "num_ranks", "num_slots"), [(256, 32, 300), (160, 16, 179), (64, 7, 75)])
def test_uneven_slots_come_close_to_the_bound(num_experts: int, num_ranks: int, num_slots: int) -> None:
    """No rank carries less than the mean, nor less than the heaviest copy with the lightest others around it."""
    for seed in range(5):
        loads = lognormal(seed, num_experts)
        plan = balance(loads, num_ranks, num_slots)
        check(plan, num_experts, num_ranks, num_slots)
        assert imbalance(loads, plan) < 1.003


@given(sizes(), st.data())
def test_copies_go_to_the_hottest(size: tuple[int, int, int], data: st.DataObject) -> None:
    num_experts, num_ranks, num_slots = size
    loads = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0, 1e4]), min_size=num_experts, max_size=num_experts))
    num_copies = Counter(replicate(loads, num_slots, num_ranks))
    assert num_copies.total() == num_slots
    for one, other in itertools.permutations(range(num_experts), 2):
        # Nobody has a copy to spare that a hotter expert could have had.
        if num_copies[one] > 1 and num_copies[other] < num_ranks:
            assert loads[one] / (num_copies[one] - 1) >= loads[other] / num_copies[other]


def test_a_full_pack_makes_room() -> None:
    """Pack 0 is full with kind 1, and pack 1 has a kind 0, when the other kind 0 comes."""
    assert pack([5.0, 9.0, 5.0], [1, 2], [0, 1, 0]) == [[2], [0, 1]]


def test_zipf_loads_are_spread() -> None:
    loads = [1.0 / (rank + 1) for rank in range(64)]
    random.Random(0).shuffle(loads)
    assert imbalance(loads, balance(loads, 8, 72)) < 1.002
    assert imbalance(loads, Placement.even(64, 8, 8)) > 1.3


def test_imbalance_by_hand() -> None:
    placement = Placement(((0, 1), (0, 2)), 3)
    assert rank_loads([4, 1, 3], placement) == (3.0, 5.0)
    assert imbalance([4, 1, 3], placement) == 1.25
    assert imbalance([0, 0, 0], placement) == 1.0
    assert imbalance([5e-324, 0, 0], placement) == 1.0  # half of it is nothing


def test_loads_of_nothing_are_spread_like_equal_ones() -> None:
    assert balance([0.0] * 6, 4, 12) == balance([1.0] * 6, 4, 12)


def test_groups_stay_on_their_nodes() -> None:
    topology = Topology(num_nodes=4, num_groups=8)
    loads = lognormal(0, 256)
    plan = balance(loads, 32, 288, topology)
    for after in (plan, rebalance(drifted(random.Random(1), loads), plan, topology)):
        check(after, 256, 32, 288)
        assert all(len(nodes) == 1 for nodes in nodes_of_groups(after))
    assert any(len(nodes) > 1 for nodes in nodes_of_groups(balance(loads, 32, 288, Topology(num_nodes=4))))
    ungrouped = rebalance(loads, balance(loads, 32, 288), topology)
    assert all(len(nodes) == 1 for nodes in nodes_of_groups(ungrouped))


def nodes_of_groups(placement: Placement) -> list[set[int]]:
    """256 experts in 8 groups, 32 ranks on 4 nodes."""
    nodes: list[set[int]] = [set() for _ in range(8)]
    for rank, slots in enumerate(placement.logical_of_slot):
        for expert in slots:
            nodes[expert // 32].add(rank // 8)
    return nodes


@given(problems(), st.data())
def test_rebalanced_from_anything(problem: tuple[list[float], int, int, Topology], data: st.DataObject) -> None:
    """Within two percent of a plan from nothing; moves lead from one to the other; who stays keeps the slot."""
    loads, num_ranks, num_slots, topology = problem
    make: Callable[..., Placement] = data.draw(st.sampled_from([balance, eplb]))
    old_loads = data.draw(st.permutations(loads))
    before = make(old_loads, num_ranks, num_slots, data.draw(st.sampled_from([topology, Topology()])))
    after = rebalance(loads, before, topology)
    check(after, len(loads), num_ranks, num_slots)
    assert imbalance(loads, after) <= 1.02 * imbalance(loads, balance(loads, num_ranks, num_slots, topology)) * ROUNDING
    for old, new in zip(before.logical_of_slot, after.logical_of_slot, strict=True):
        for expert in set(old) & set(new):
            assert old[new.index(expert)] == expert

    slots = [list(of_rank) for of_rank in before.logical_of_slot]
    node_of_rank = data.draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    found = moves(before, after, node_of_rank)
    for move in found:
        holders = [rank for rank, held in enumerate(before.logical_of_slot) if move.expert in held]
        nodes = {node_of_rank[holder] for holder in holders}
        assert node_of_rank[move.from_rank] == node_of_rank[move.to_rank] or node_of_rank[move.to_rank] not in nodes
        assert before.logical_of_slot[move.to_rank][move.slot] != move.expert
        assert move.expert in before.logical_of_slot[move.from_rank]
        slots[move.to_rank][move.slot] = move.expert
    assert tuple(map(tuple, slots)) == after.logical_of_slot
    assert len({(move.to_rank, move.slot) for move in found}) == len(found)
    assert rebalance(loads, after, topology) == after, "what is good enough stays"


def test_moves_by_hand() -> None:
    before = Placement(((0, 1), (2, 3), (0, 4), (5, 6)), 7)
    after = Placement(((0, 1), (2, 0), (3, 4), (5, 6)), 7)
    near = moves(before, after, (0, 0, 1, 1))
    assert [(move.to_rank, move.slot, move.expert, move.from_rank) for move in near] == [(1, 1, 0, 0), (2, 0, 3, 1)]
    turned = moves(before, Placement(((1, 0), (2, 3), (0, 4), (5, 6)), 7))
    assert [(move.to_rank, move.slot, move.from_rank) for move in turned] == [(0, 0, 0), (0, 1, 0)]


def test_sources_are_spread() -> None:
    """Expert 0 is on three ranks, of which one alone can send expert 1: the two that want expert 0 spare it."""
    before = Placement(((0, 1), (0, 2), (0, 3), (3, 2), (3, 2), (3, 2)), 4)
    after = Placement(((0, 1), (0, 2), (0, 3), (0, 2), (3, 0), (1, 2)), 4)
    assert [(move.to_rank, move.expert, move.from_rank) for move in moves(before, after)] == [
        (3, 0, 1),
        (4, 0, 2),
        (5, 1, 0),
    ]


def drifted(generator: random.Random, loads: Sequence[float]) -> list[float]:
    """The loads of the next window: all a little different, and three experts become hot."""
    new = [load * generator.lognormvariate(0, 0.3) for load in loads]
    for expert in generator.sample(range(len(loads)), 3):
        new[expert] *= 4
    return new


def num_moved(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> int:
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def relabelled(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Ranks in an order in which little moves, for a plan that does not care: most in common first."""
    pairs = itertools.product(range(len(before)), range(len(after)))
    ordered = sorted(pairs, key=lambda pair: -len(set(before[pair[0]]) & set(after[pair[1]])))
    chosen: dict[int, int] = {}
    for old, new in ordered:
        if old not in chosen and new not in chosen.values() and len(before[old]) == len(after[new]):
            chosen[old] = new
    return [after[chosen[rank]] for rank in range(len(before))]


def swapped(generator: random.Random, loads: Sequence[float]) -> list[float]:
    """The loads of the next window: as before, but pairs of experts have exchanged theirs, for up to a fifth of all."""
    new = list(loads)
    for _ in range(max(1, len(loads) // 10)):
        one, other = generator.randrange(len(loads)), generator.randrange(len(loads))
        new[one], new[other] = new[other], new[one]
    return new


MOST_SHAPES = [
    (256, 256, 8),
    (256, 288, 32),
    (256, 288, 144),
    (256, 320, 64),
    (160, 176, 16),
    (128, 160, 32),
    (64, 72, 8),
    (16, 18, 2),
]


@pytest.mark.parametrize(
    ("num_experts", "num_slots", "num_ranks", "drift", "share"),
    [
        *[(*shape, drift, 0.3) for shape in MOST_SHAPES for drift in (drifted, swapped)],
        (256, 320, 160, drifted, 0.3),
        (256, 320, 320, drifted, 0.3),
        # With one slot, a rank that has to give a hot expert a copy more can only change it: nearly all moves are such,
        # and no plan with that balance has less of them. With two slots, what is next to it has to change, too.
        (256, 320, 320, swapped, 0.33),
        (256, 320, 160, swapped, 0.4),
        (8, 12, 4, drifted, 0.4),  # of 12 slots, one is a large share
    ],
)
def test_drifting_loads_move_little(
    num_experts: int, num_slots: int, num_ranks: int, drift: Callable[..., list[float]], share: float
) -> None:
    """At most so much of what a plan from nothing moves; as good to 2 %.

    If all loads drift, that holds even with the ranks of that plan in a good order. It does not if experts exchange
    loads: `balance` goes by the order of loads, so its plan is then the same with other experts in some slots.
    """
    moved, moved_by_full, moved_by_relabelled = 0, 0, 0
    for seed in range(3):
        generator = random.Random(seed)
        loads = lognormal(seed, num_experts)
        placement = balance(loads, num_ranks, num_slots)
        for _ in range(4):
            loads = drift(generator, loads)
            full, after = balance(loads, num_ranks, num_slots), rebalance(loads, placement)
            assert imbalance(loads, after) <= 1.02 * imbalance(loads, full) * ROUNDING
            old = placement.logical_of_slot
            moved += num_moved(old, after.logical_of_slot)
            moved_by_full += num_moved(old, full.logical_of_slot)
            if drift is drifted and num_ranks < 160 and num_experts > 16:  # the order takes long to find with more
                moved_by_relabelled += num_moved(old, relabelled(old, full.logical_of_slot))
            placement = after
    assert moved <= share * moved_by_full
    if moved_by_relabelled:
        assert moved <= share * moved_by_relabelled


@pytest.mark.parametrize(("num_slots", "num_ranks"), [(256, 8), (288, 32), (320, 160)])
def test_what_is_good_enough_stays(num_slots: int, num_ranks: int) -> None:
    for seed in range(5):
        loads = lognormal(seed, 256, 2.0)
        before = balance(loads, num_ranks, num_slots)
        assert rebalance([load * (1 + index % 2 / 100) for index, load in enumerate(loads)], before) == before


def seconds(work: Callable[[], object]) -> float:
    def once() -> Iterator[float]:
        for _ in range(5):
            start = time.process_time()
            work()
            yield time.process_time() - start

    return min(once())


@pytest.mark.parametrize("num_ranks", [32, 144, 288])
def test_speed(num_ranks: int) -> None:
    """58 layers: a plan in 0.1 s, a change of plan in 6 ms each; here 2.5 times that: others use the machine."""
    layers = [lognormal(seed, 256) for seed in range(58)]
    assert seconds(lambda: [balance(loads, num_ranks, 288) for loads in layers]) < 2.5 * 0.1
    today = [balance(loads, num_ranks, 288) for loads in layers]
    later = [drifted(random.Random(seed), loads) for seed, loads in enumerate(layers)]
    assert seconds(lambda: [rebalance(loads, old) for loads, old in zip(later, today, strict=True)]) < 2.5 * 0.006 * 58


@pytest.mark.parametrize("load", [-1.0, float("nan"), float("inf"), 10**400])
def test_loads_that_are_refused(load: float) -> None:
    with pytest.raises(SettingsError, match="expert 1 has load"):
        balance([1.0, load], 2, 2)
    with pytest.raises(SettingsError, match="expert 1 has load"):
        rebalance([1.0, load], Placement.even(2, 2))


@pytest.mark.parametrize("make", [balance, eplb])
def test_sizes_that_are_refused(make: Callable[..., Placement]) -> None:
    with pytest.raises(SettingsError, match=r"from 2 slots .* to 4 .* not 5"):
        make([1.0, 2.0], 2, 5)
    with pytest.raises(SettingsError, match="0 experts on 2 ranks"):
        make([], 2, 2)
    with pytest.raises(SettingsError, match="1 groups of experts on 0 nodes"):
        Topology(num_nodes=0)


def test_each_layer_is_placed_by_its_own_loads() -> None:
    placed = place_experts([[9, 1, 1], [1, 1, 9]], num_layers=2, num_experts=3, num_ranks=2, num_redundant=1)
    assert placed == (balance([9, 1, 1], 2, 4), balance([1, 1, 9], 2, 4))
    assert [len(layer.physical_of_logical[expert]) for layer, expert in zip(placed, (0, 2), strict=True)] == [2, 2]
    unknown = place_experts([], num_layers=2, num_experts=3, num_ranks=2, num_redundant=1)
    assert unknown == (Placement.even(3, 2, 1),) * 2
    assert place_experts([], num_layers=0, num_experts=0, num_ranks=2, num_redundant=0) == ()


def test_balancer_needs_no_torch() -> None:
    program = "import sys, moeserve.expert_placement.eplb; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


@pytest.mark.parametrize(
    ("loads", "best"), [([308, 78, 326, 236], 1.019), ([266, 250, 198, 234], 1.017), ([262, 232, 272, 182], 1.0106)]
)
def test_few_experts_get_the_best_of_all_choices_of_copies(loads: list[float], best: float) -> None:
    """Two copies more on two ranks: those with most load are not the ones to copy. Never worse than without."""
    found = imbalance(loads, balance(loads, 2, 6))
    everything = [
        imbalance(loads, Placement((one, other), 4))
        for one in itertools.combinations(range(4), 3)
        for other in itertools.combinations(range(4), 3)
        if len({*one, *other}) == 4
    ]
    assert found == pytest.approx(min(everything), rel=1e-3)
    assert found == pytest.approx(best, abs=1e-3)
    assert found <= imbalance(loads, balance(loads, 2, 4))
