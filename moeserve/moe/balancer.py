"""Decides which rank holds which experts, by their loads, and what must move when loads change. Knows numbers only.

The load of an expert is how many tokens it gets, in any unit. Its copies share it evenly, so the load of a rank is the
sum over its slots of the load of the expert divided by the expert's copies. What is to be small is the imbalance: the
load of the fullest rank over the mean of the ranks.

`eplb` is the published algorithm, as a measure. `balance` starts from it and goes on; `rebalance` starts from a
placement that is in use and changes few slots.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.errors import SettingsError, shown
from moeserve.moe.placement import MAX_LOAD, Placement, check_num_slots

GOOD_ENOUGH = 1.001  # times what is certainly unavoidable: nothing looks for less
HEAVY = 0.6  # a copy that carries more than this share of what a rank may is one of too few
MAX_PARTNERS = 8  # ranks with which the fullest one tries first to exchange experts
LEAST_GAIN = 1e-6  # an exchange must do better than none by this share of what is to be gained; rounding does not


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What the ranks and the experts are divided into. Parts are in order and as even as can be.

    A router that lets a token choose from few groups of experts keeps it on few nodes if no group is divided over
    nodes. Placements keep groups whole where each node can have equally many of them.
    """

    num_nodes: int = 1  # of ranks
    num_groups: int = 1  # of experts

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.num_groups < 1:
            raise SettingsError(
                f"{self.num_groups} groups of experts on {self.num_nodes} nodes: there must be at least one of both"
            )


@dataclass(frozen=True, kw_only=True)
class Move:
    """A slot that gets another expert."""

    to_rank: int
    slot: int  # of that rank
    expert: int
    from_rank: int  # has a copy before; `to_rank` itself when the expert only changes slots


def rank_loads(loads: Sequence[float], placement: Placement) -> tuple[float, ...]:
    """The load of each rank.

    Args:
        loads: by logical expert.
        placement: of these experts.
    """
    assert len(loads) == placement.num_logical, (len(loads), placement.num_logical)
    num_copies = Counter(placement.logical_of_physical)
    share = [load / num_copies[expert] for expert, load in enumerate(loads)]
    return tuple(sum(map(share.__getitem__, slots)) for slots in placement.logical_of_slot)


def imbalance(loads: Sequence[float], placement: Placement) -> float:
    """The load of the fullest rank over the mean of the ranks; 1 if nothing has any load. See `rank_loads`."""
    of_rank = rank_loads(loads, placement)
    total = sum(of_rank)
    return max(of_rank) * len(of_rank) / total if total else 1.0


def eplb(loads: Sequence[float], num_ranks: int, num_slots: int, topology: Topology = Topology()) -> Placement:
    """The published algorithm, for any number of anything: replicate, then pack; by nodes where groups allow.

    A rank may get two copies of an expert. The order of slots is the published one.
    Source: DeepSeek's EPLB, https://github.com/deepseek-ai/EPLB.

    Args:
        loads: by logical expert.
        num_ranks: ranks of the group.
        num_slots: slots of all ranks together.
        topology: of ranks and experts.

    Raises:
        SettingsError: a load out of range, fewer slots than experts, or more than there could be copies.
    """
    _check(loads, num_ranks, num_slots)
    nodes = _divide(loads, num_ranks, num_slots, topology)
    return Placement(tuple(tuple(slots) for node in nodes for slots in _published(loads, node)), len(loads))


def replicate(loads: Sequence[float], num_copies: int, max_copies: int | None = None) -> list[int]:
    """Which experts get a copy: each one, and then again and again the one with the highest load for each copy.

    Args:
        loads: by expert. Of equally high ones, the first gets the copy.
        num_copies: of all experts together.
        max_copies: of one expert.

    Returns:
        By copy: the expert, in the order in which they got them.
    """
    copies = list(range(len(loads)))
    highest = [(-load, expert, 1) for expert, load in enumerate(loads)] if max_copies != 1 else []
    heapq.heapify(highest)
    for _ in range(num_copies - len(loads)):
        _, expert, count = highest[0]
        copies.append(expert)
        count += 1
        if count == max_copies:
            heapq.heappop(highest)
        else:
            heapq.heapreplace(highest, (-loads[expert] / count, expert, count))
    return copies


def pack(loads: Sequence[float], sizes: Sequence[int], kinds: Sequence[int]) -> list[list[int]]:
    """Divides items over packs: the heaviest first, each to the pack with the least load that has room.

    Args:
        loads: by item. Of equal ones, the first goes first.
        sizes: by pack, how many items it takes; together as many as there are items. Of packs with equal loads, the
            first comes first. Where all take one item at most, items keep their order.
        kinds: by item. No pack gets two items of a kind. There are not more of a kind than packs, and if kinds repeat,
            sizes differ by one at most.

    Returns:
        By pack: its items, in the order in which they came.
    """
    packs: list[list[int]] = [[] for _ in sizes]
    held: list[set[int]] = [set() for _ in sizes]  # by pack: the kinds
    total = [0.0] * len(sizes)
    lightest = [(0.0, index) for index, size in enumerate(sizes) if size]  # packs that have room

    def put(item: int, index: int) -> None:
        packs[index].append(item)
        held[index].add(kinds[item])
        total[index] += loads[item]
        if len(packs[index]) < sizes[index]:
            heapq.heappush(lightest, (total[index], index))

    items = range(len(loads))
    for item in sorted(items, key=loads.__getitem__, reverse=True) if max(sizes) > 1 else items:
        having = []
        while lightest and kinds[item] in held[lightest[0][1]]:
            having.append(heapq.heappop(lightest))
        if lightest:
            put(item, heapq.heappop(lightest)[1])
        else:
            # Every pack with room has this kind, so a full one passes something on to make room. It holds more kinds
            # besides this one than the pack with room does, so there is something to pass.
            _, free = having.pop(0)
            full = min((index for index in range(len(sizes)) if kinds[item] not in held[index]), key=total.__getitem__)
            moved = min((old for old in packs[full] if kinds[old] not in held[free]), key=loads.__getitem__)
            packs[full].remove(moved)
            held[full].remove(kinds[moved])
            total[full] -= loads[moved]
            put(moved, free)
            put(item, full)
        for entry in having:
            heapq.heappush(lightest, entry)
    return packs


def balance(loads: Sequence[float], num_ranks: int, num_slots: int, topology: Topology = Topology()) -> Placement:
    """The placement of experts that makes the imbalance small, whatever is in place today.

    No rank has two copies of an expert. Unless the published algorithm puts two copies of one on a rank, the imbalance
    is not higher than with `eplb`: this is the same placement, improved by exchanges between ranks.

    Args:
        loads: by logical expert. If all are zero, experts are taken to be alike.
        num_ranks: ranks of the group.
        num_slots: slots of all ranks together.
        topology: of ranks and experts.

    Raises:
        SettingsError: a load out of range, fewer slots than experts, or more than there could be copies.
    """
    _check(loads, num_ranks, num_slots)
    plans = [_plan(loads, node) for node in _divide(loads, num_ranks, num_slots, topology)]
    return Placement(tuple(tuple(sorted(slots)) for plan in plans for slots in plan.slots), len(loads))


def rebalance(
    loads: Sequence[float], before: Placement, topology: Topology = Topology(), *, slack: float = 0.02
) -> Placement:
    """A placement almost as good as that of `balance` that changes few slots of one in use.

    Experts change places one by one until the fullest rank carries no more than it should. Where that fails, the ranks
    take over what `balance` gives, each the experts of which it has most already. An expert that stays on its rank
    stays in its slot.

    Args:
        loads: by logical expert.
        before: what is in use, with slots as `balance` gives them; it need not keep groups whole.
        topology: of ranks and experts.
        slack: by how much the imbalance may be higher than with `balance`; 0.02 is two percent.

    Raises:
        SettingsError: a load out of range, or more slots than there could be copies.
    """
    num_slots = sum(before.num_slots)
    assert before.num_logical == len(loads), (before.num_logical, len(loads))
    assert before.num_slots == share_sizes(num_slots, before.num_ranks), before.num_slots
    _check(loads, before.num_ranks, num_slots)
    nodes = _divide(loads, before.num_ranks, num_slots, topology)
    plans = [_plan(loads, node).slots for node in nodes]
    full = Placement(tuple(tuple(slots) for plan in plans for slots in plan), len(loads))
    most = max(rank_loads(loads, full)) * (1 + slack)
    bounds = itertools.accumulate((len(node.sizes) for node in nodes), initial=0)
    today = [before.logical_of_slot[start:end] for start, end in itertools.pairwise(bounds)]

    held = [sorted(set(itertools.chain.from_iterable(slots))) for slots in today]
    after: list[list[int]] = []
    if _keeps_groups(held, nodes, len(loads), topology.num_groups):
        drafts = [_settled(loads, *of_node, most) for of_node in zip(held, today, strict=True)]
        if None not in drafts:
            after = [slots for draft in drafts if draft is not None for slots in draft.slots]
    if not after:
        sources = _matched([node.experts for node in nodes], held, [node.sizes for node in nodes])
        for source, slots in zip(sources, today, strict=True):
            draft = _settled(loads, nodes[source].experts, slots, most)
            if draft is not None:
                after += draft.slots
            else:
                plan = plans[source]
                after += (plan[index] for index in _matched(plan, slots, [(len(held),) for held in slots]))
    return Placement(tuple(map(_in_slots, before.logical_of_slot, after)), len(loads))


def moves(before: Placement, after: Placement, topology: Topology = Topology()) -> tuple[Move, ...]:
    """What must be copied to come from one placement to another with the same slots.

    An expert comes from a rank of the same node if one there has it, and among those from the one that sends least.

    Args:
        before: what is in use.
        after: what is wanted.
        topology: of the ranks; it need not be that of the plan.

    Returns:
        A move for each slot whose expert is another, by rank and slot.
    """
    assert (before.num_slots, before.num_logical) == (after.num_slots, after.num_logical)
    holders: list[list[int]] = [[] for _ in range(before.num_logical)]
    for rank, slots in enumerate(before.logical_of_slot):
        for expert in set(slots):
            holders[expert].append(rank)
    num_ranks = before.num_ranks
    node_of_rank = [0] * num_ranks
    for node in range(topology.num_nodes):
        of_node = share_of(num_ranks, node, topology.num_nodes)
        node_of_rank[of_node] = [node] * (of_node.stop - of_node.start)

    changed = [
        (rank, slot, new)
        for rank, (old_slots, new_slots) in enumerate(zip(before.logical_of_slot, after.logical_of_slot, strict=True))
        for slot, (old, new) in enumerate(zip(old_slots, new_slots, strict=True))
        if old != new
    ]
    sources = []
    for rank, _, expert in changed:
        near = [holder for holder in holders[expert] if node_of_rank[holder] == node_of_rank[rank]]
        sources.append([rank] if rank in near else near or holders[expert])
    num_sent = [0] * num_ranks
    chosen = []
    # Those without a choice first, so that the others can avoid the ranks that send for them.
    for index in sorted(range(len(changed)), key=lambda index: len(sources[index])):
        to_rank, slot, expert = changed[index]
        from_rank = min(sources[index], key=num_sent.__getitem__)
        num_sent[from_rank] += from_rank != to_rank
        chosen.append(Move(to_rank=to_rank, slot=slot, expert=expert, from_rank=from_rank))
    return tuple(sorted(chosen, key=lambda move: (move.to_rank, move.slot)))


def place_experts(
    loads: Sequence[Sequence[float]], *, num_layers: int, num_experts: int, num_ranks: int, num_redundant: int
) -> tuple[Placement, ...]:
    """A placement for each layer that has experts: by their loads, or in order where no loads are known.

    Args:
        loads: by layer, by logical expert, as from `read_loads`; empty: unknown.
        num_layers: how many of the model's layers have experts.
        num_experts: logical experts of each.
        num_ranks: ranks of the group.
        num_redundant: slots of all ranks together, beyond one for each expert.

    Raises:
        SettingsError: see `balance`.
    """
    if not loads:
        return (Placement.even(num_experts, num_ranks, num_redundant),) * num_layers if num_layers else ()
    assert len(loads) == num_layers, (len(loads), num_layers)
    return tuple(balance(of_layer, num_ranks, num_experts + num_redundant) for of_layer in loads)


@dataclass(frozen=True)
class _Node:
    """Ranks that have some experts for themselves."""

    sizes: tuple[int, ...]  # slots by rank
    experts: list[int]


def _check(loads: Sequence[float], num_ranks: int, num_slots: int) -> None:
    for expert, load in enumerate(loads):
        if not 0 <= load <= MAX_LOAD:
            raise SettingsError(f"expert {expert} has load {shown(load)}; loads must be from 0 to {MAX_LOAD:g}")
    check_num_slots(num_slots, len(loads), num_ranks)


def _divide(loads: Sequence[float], num_ranks: int, num_slots: int, topology: Topology) -> list[_Node]:
    """Whole groups of experts for each node, if they are equally many and fit; else all experts for all ranks."""
    sizes = share_sizes(num_slots, num_ranks)
    num_nodes, num_groups = topology.num_nodes, topology.num_groups
    if num_groups % num_nodes == 0 and num_nodes <= num_ranks and num_groups <= len(loads):
        groups = [range(len(loads))[share_of(len(loads), group, num_groups)] for group in range(num_groups)]
        load_of_group = [sum(loads[group.start : group.stop]) for group in groups]
        packs = pack(load_of_group, (num_groups // num_nodes,) * num_nodes, range(num_groups))
        nodes = [
            _Node(sizes[share_of(num_ranks, node, num_nodes)], [expert for group in packed for expert in groups[group]])
            for node, packed in enumerate(packs)
        ]
        if all(1 <= len(node.experts) <= sum(node.sizes) <= len(node.experts) * len(node.sizes) for node in nodes):
            return nodes
    return [_Node(sizes, list(range(len(loads))))]


def _published(loads: Sequence[float], node: _Node) -> list[list[int]]:
    """What `eplb` gives for the ranks of a node."""
    copies = [node.experts[item] for item in replicate([loads[expert] for expert in node.experts], sum(node.sizes))]
    return _packed(loads, copies, node.sizes, range(len(copies)))


def _packed(
    loads: Sequence[float], copies: Sequence[int], sizes: Sequence[int], kinds: Sequence[int]
) -> list[list[int]]:
    """By rank: the experts of which copies go there. See `pack`."""
    num_copies = Counter(copies)
    packs = pack([loads[expert] / num_copies[expert] for expert in copies], sizes, kinds)
    return [[copies[copy] for copy in members] for members in packs]


def _plan(loads: Sequence[float], node: _Node) -> _Draft:
    """What `balance` gives for the ranks of a node."""
    if not any(loads[expert] for expert in node.experts):
        loads = [1.0] * len(loads)
    slots, most = _published(loads, node), math.inf
    if any(len(set(held)) < len(held) for held in slots):
        most = _Draft(loads, slots).most
        copies = _copies(loads, node.experts, node.sizes)
        slots = _packed(loads, copies, node.sizes, copies)
    draft = _Draft(loads, slots)
    draft.level(most)
    return draft


def _copies(loads: Sequence[float], experts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """For the ranks of a node with so many slots: the experts, each as often as it has copies."""
    own = [loads[expert] for expert in experts]
    return [experts[item] for item in replicate(own if any(own) else [1.0] * len(own), sum(sizes), len(sizes))]


def _settled(
    loads: Sequence[float], experts: Sequence[int], today: Sequence[Sequence[int]], most: float
) -> _Draft | None:
    """These experts on these ranks, with few slots changed, so that none carries above `most`; None if none is found.

    First with nearly as many copies of each as today, then with as many as `balance` gives them.
    """
    if sum(loads[expert] for expert in experts) > most * len(today):
        return None
    nearly_the_same = _nearly_the_same_copies(loads, experts, today, most * HEAVY)
    for num_copies in (nearly_the_same, Counter(_copies(loads, experts, list(map(len, today))))):
        slots = _adjusted(loads, num_copies, today)
        if slots is not None:
            draft = _Draft(loads, slots)
            if draft.settle(most):
                return draft
    return None


def _nearly_the_same_copies(
    loads: Sequence[float], experts: Sequence[int], today: Sequence[Sequence[int]], heavy: float
) -> Counter[int]:
    """How many copies of each expert: as today, but for those whose copies carry more than `heavy`, which get more."""
    num_ranks = len(today)
    held = Counter(itertools.chain.from_iterable(map(set, today)))
    num_copies = Counter({expert: max(held[expert], 1) for expert in experts})
    num_free = sum(map(len, today)) - num_copies.total()
    # What a copy carries now, of experts that can have more; and with one copy less, of those that can have less.
    now = {expert: loads[expert] / count for expert, count in num_copies.items() if count < num_ranks}
    then = {expert: loads[expert] / (count - 1) for expert, count in num_copies.items() if count > 1}

    def add(expert: int, number: int) -> None:
        num_copies[expert] += number
        count = num_copies[expert]
        for shares, is_open, divisor in ((now, count < num_ranks, count), (then, count > 1, count - 1)):
            if is_open:
                shares[expert] = loads[expert] / divisor
            else:
                shares.pop(expert, None)

    for _ in range(num_free):
        add(max(now, key=now.__getitem__), 1)
    for _ in range(-num_free):
        add(min(then, key=then.__getitem__), -1)
    while now and then:
        hottest, coldest = max(now, key=now.__getitem__), min(then, key=then.__getitem__)
        if now[hottest] <= max(heavy, then[coldest]):
            break
        add(hottest, 1)
        add(coldest, -1)
    return num_copies


def _adjusted(
    loads: Sequence[float], num_copies: Counter[int], today: Sequence[Sequence[int]]
) -> list[list[int]] | None:
    """By rank: `today` with as many copies of each expert as asked for, none twice on a rank; None if none is found.

    Copies go from the fullest ranks and come, heaviest first, to those with the least load that have room.
    """
    held = [list(dict.fromkeys(expert for expert in slots if expert in num_copies)) for slots in today]
    ranks: dict[int, list[int]] = {expert: [] for expert in num_copies}
    for rank, slots in enumerate(held):
        for expert in slots:
            ranks[expert].append(rank)
    share = {expert: loads[expert] / count for expert, count in num_copies.items()}
    total = [sum(map(share.__getitem__, slots)) for slots in held]
    lacking = []
    for expert, count in num_copies.items():
        for _ in range(len(ranks[expert]) - count):
            rank = max(ranks[expert], key=total.__getitem__)
            ranks[expert].remove(rank)
            held[rank].remove(expert)
            total[rank] -= share[expert]
        lacking += [expert] * (count - len(ranks[expert]))
    for expert in sorted(lacking, key=share.__getitem__, reverse=True):
        free = [rank for rank, slots in enumerate(held) if len(slots) < len(today[rank]) and expert not in slots]
        if not free:
            return None
        rank = min(free, key=total.__getitem__)
        held[rank].append(expert)
        total[rank] += share[expert]
    return held


def _keeps_groups(held: Sequence[Sequence[int]], nodes: Sequence[_Node], num_experts: int, num_groups: int) -> bool:
    """Whether several nodes hold equally many whole groups each, and no two the same. `held`: by node, the experts."""
    if len(nodes) == 1:
        return False
    node_of_expert = {expert: node for node, experts in enumerate(held) for expert in experts}
    groups = [range(num_experts)[share_of(num_experts, group, num_groups)] for group in range(num_groups)]
    nodes_of_group = [{node_of_expert[expert] for expert in group} for group in groups]
    num_held = Counter(min(of_group) for of_group in nodes_of_group)
    return (
        sum(map(len, held)) == num_experts
        and all(len(of_group) == 1 for of_group in nodes_of_group)
        and set(num_held.values()) == {num_groups // len(nodes)}
    )


def _matched(
    new: Sequence[Sequence[int]], today: Sequence[Sequence[int]], sizes: Sequence[tuple[int, ...]]
) -> list[int]:
    """By place: which of the new sets it gets, of its own size; those that share most with what is there go first."""
    places: dict[int, list[int]] = {}
    for place, held in enumerate(today):
        for expert in held:
            places.setdefault(expert, []).append(place)
    shared = Counter(
        (index, place) for index, held in enumerate(new) for expert in held for place in places.get(expert, ())
    )
    left = dict.fromkeys(range(len(new)))
    chosen: dict[int, int] = {}
    rest = itertools.product(range(len(new)), repeat=2)
    for index, place in itertools.chain((pair for pair, _ in shared.most_common()), rest):
        if index in left and place not in chosen and sizes[index] == sizes[place]:
            chosen[place] = index
            del left[index]
    return [chosen[place] for place in range(len(new))]


def _in_slots(before: Sequence[int], after: Iterable[int]) -> tuple[int, ...]:
    """The experts of a rank, each that stays in the slot that it had."""
    arriving = set(after)
    kept = []
    for expert in before:
        kept.append(expert if expert in arriving else None)
        arriving.discard(expert)
    new = iter(sorted(arriving))
    return tuple(next(new) if expert is None else expert for expert in kept)


class _Exchange(NamedTuple):
    """Two ranks give each other an expert."""

    rank: int
    expert: int
    other_rank: int
    other_expert: int
    load: float  # that passes from the rank to the other


class _Draft:
    """The slots of some ranks while experts change places, and what each rank has to carry."""

    def __init__(self, loads: Sequence[float], slots: list[list[int]]) -> None:
        self.slots = slots
        num_copies = Counter(itertools.chain.from_iterable(slots))
        self._share = {expert: loads[expert] / count for expert, count in num_copies.items()}  # of each copy
        self._ascending: list[list[tuple[float, int]]] = [[] for _ in slots]  # by rank: share and expert
        self._total = [0.0] * len(slots)
        for rank in range(len(slots)):
            self._count(rank)

    @property
    def most(self) -> float:
        """What the fullest rank carries."""
        return max(self._total)

    def level(self, most: float) -> None:
        """Exchanges experts of the fullest rank until it carries little more than it must, and not above `most`."""
        total = self._total
        least = min(most, max(sum(total) / len(total), max(self._share.values())) * GOOD_ENOUGH)
        for _ in range(sum(map(len, self.slots))):
            fullest = total.index(max(total))
            if total[fullest] <= least:
                return
            exchange = self._exchange(fullest, total.index(min(total)))
            if exchange is None:
                others = heapq.nsmallest(MAX_PARTNERS, range(len(total)), key=total.__getitem__)
                found = (self._exchange(fullest, other) for other in others[1:])
                exchange = next((exchange for exchange in found if exchange is not None), None)
            if exchange is None:
                return
            self._apply(exchange)

    def settle(self, most: float) -> bool:
        """Exchanges few experts until no rank carries above `most`; whether that came about.

        Each step exchanges an expert of the fullest rank, with the first rank where nothing above `most` is left.
        """
        for _ in range(sum(map(len, self.slots))):
            fullest = self._total.index(max(self._total))
            if self._total[fullest] <= most:
                return True
            exchange = self._best_exchange(fullest, most)
            if exchange is None:
                return False
            self._apply(exchange)
        return False

    def _best_exchange(self, fullest: int, most: float) -> _Exchange | None:
        """The one that leaves least above `most` on its two ranks; None if none lowers it."""
        total = self._total
        best, least = None, total[fullest] - most
        if len(self.slots[fullest]) == 1:  # its expert is as heavy wherever it goes
            return None
        for tried, other in enumerate(sorted(range(len(total)), key=total.__getitem__)):
            if total[other] >= most or (tried >= MAX_PARTNERS and best is not None):
                break
            exchange = self._exchange(fullest, other)
            if exchange is None:
                continue
            above = max(total[fullest] - exchange.load - most, 0.0) + max(total[other] + exchange.load - most, 0.0)
            if above < least:
                best, least = exchange, above
            if above == 0.0:
                break
        return best

    def _exchange(self, rank: int, other: int) -> _Exchange | None:
        """The one that brings two ranks closest to each other, the first being the fuller; None if none does."""
        ours, theirs = self._ascending[rank], self._ascending[other]
        our_slots, their_slots = self.slots[rank], self.slots[other]
        want = (self._total[rank] - self._total[other]) / 2
        best = None
        least_miss = want * (1 - LEAST_GAIN)
        for share, expert in ours:
            at = bisect_left(theirs, (share - want, -1))
            for other_share, other_expert in theirs[max(at - 1, 0) : at + 1]:
                miss = abs(share - other_share - want)
                if miss < least_miss and expert not in their_slots and other_expert not in our_slots:
                    best, least_miss = (expert, other_expert, share - other_share), miss
        return None if best is None else _Exchange(rank, best[0], other, *best[1:])

    def _apply(self, exchange: _Exchange) -> None:
        self._put(exchange.rank, exchange.expert, exchange.other_expert)
        self._put(exchange.other_rank, exchange.other_expert, exchange.expert)

    def _put(self, rank: int, old: int, new: int) -> None:
        slots = self.slots[rank]
        slots[slots.index(old)] = new
        self._count(rank)

    def _count(self, rank: int) -> None:
        """After its slots have changed."""
        share = self._share
        held = self._ascending[rank] = sorted([(share[expert], expert) for expert in self.slots[rank]])
        self._total[rank] = sum([share for share, _ in held])
