"""Decides which rank holds which experts, by their loads, and what must move when loads change. Knows numbers only.

The load of an expert is how many tokens it gets, in any unit. Its copies share it evenly, so the load of a rank is the
sum over its slots of the load of the expert divided by the expert's copies. What is to be small is the imbalance: the
load of the fullest rank over the mean of the ranks.

`eplb` is the published algorithm, as a measure. `balance` starts from it and goes on; `rebalance` starts from a
placement that is in use and changes few slots. Both are the same on every rank that computes them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.errors import SettingsError, shown
from moeserve.expert_placement.placement import MAX_LOAD, Placement, check_num_slots

GOOD_ENOUGH = 1.001  # times what is certainly unavoidable: nothing looks for less
HEAVY = (0.6, 1.0, 0.45, 0.8, 0.3)  # a copy with more than this share of what a rank may carry is one of too few
SLOTS_TO_TRY = 384  # as many of these as come to no more slots together, so that a layer takes a few milliseconds
MAX_CHOICES = 64  # of what gets copies, that are all tried where experts are few
MAX_PARTNERS = 8  # ranks with which the fullest one tries first to exchange experts
MAX_CHANGED = 8  # ranks that differ from today's, with which it tries after that
MAX_ALIKE = 16  # experts next in load to one of the fullest rank's, whose ranks it tries where those fail
MAX_STEPS_OF_PLAN = 32  # to reach what the published algorithm does without second copies, once exchanges fail
FREE = 0.5  # moves: what a step is taken to cost that costs none
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
    lightest = [(0.0, index) for index, size in enumerate(sizes) if size]  # packs that have room: what they carry
    items = range(len(loads))
    for item in sorted(items, key=loads.__getitem__, reverse=True) if max(sizes) > 1 else items:
        kind = kinds[item]
        having = []
        while lightest and kind in held[lightest[0][1]]:
            having.append(heapq.heappop(lightest))
        if lightest:
            load, index = lightest[0]
            if len(packs[index]) + 1 < sizes[index]:
                heapq.heapreplace(lightest, (load + loads[item], index))
            else:
                heapq.heappop(lightest)
        else:
            # Every pack with room has this kind, so a full one passes something on to make room. It holds more kinds
            # besides this one than the pack with room does, so there is something to pass.
            load, free = having.pop(0)
            without = [index for index in range(len(sizes)) if kind not in held[index]]
            index = min(without, key=lambda index: sum(map(loads.__getitem__, packs[index])))
            moved = min((old for old in packs[index] if kinds[old] not in held[free]), key=loads.__getitem__)
            packs[index].remove(moved)
            held[index].remove(kinds[moved])
            packs[free].append(moved)
            held[free].add(kinds[moved])
            if len(packs[free]) < sizes[free]:
                having.append((load + loads[moved], free))
        packs[index].append(item)
        held[index].add(kind)
        for entry in having:
            heapq.heappush(lightest, entry)
    return packs


def balance(loads: Sequence[float], num_ranks: int, num_slots: int, topology: Topology = Topology()) -> Placement:
    """The placement of experts that makes the imbalance small, whatever is in place today.

    No rank has two copies of an expert. Where the published algorithm gives none two either, its slots are improved by
    exchanges between ranks, so the imbalance is not higher than with `eplb`. Where it does, second copies first change
    places with what carries as much on other ranks. Then the imbalance can be higher, if no placement without second
    copies is as even: of 256 equal experts in 257 slots of 8 ranks, one has two halves, so two ranks carry 32.5, while
    `eplb` has both halves on one rank and 32 on all. Or it is higher because a better one is not found, as can be with
    a handful of experts, or where a few of many carry almost all.

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

    The fullest rank exchanges experts with others, or a copy of a hot expert replaces one of a cold expert, until none
    carries more than it should. Where that fails, the ranks take over what `balance` gives, each the experts of which
    it has most already. An expert that stays on its rank stays in its slot.

    When loads drift, less than 30 percent of the slots change that would with the plan of `balance`. That does not hold
    where a single move is a large share of all, with a handful of experts; nor where ranks have one or two slots and
    the loads of some experts become those of others, since each that needs more copies then costs moves.

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
            after = [slots for draft in drafts if draft is not None for slots in draft]
    if not after:
        sources = _matched([node.experts for node in nodes], held, [node.sizes for node in nodes])
        for source, slots in zip(sources, today, strict=True):
            draft = _settled(loads, nodes[source].experts, slots, most)
            if draft is not None:
                after += draft
            else:
                plan = plans[source]
                after += (plan[index] for index in _matched(plan, slots, [(len(held),) for held in slots]))
    return Placement(tuple(map(_in_slots, before.logical_of_slot, after)), len(loads))


def moves(before: Placement, after: Placement, node_of_rank: Sequence[int] = ()) -> tuple[Move, ...]:
    """What must be copied to come from one placement to another with the same slots.

    An expert comes from a rank of the same node if one there has it, and among those from the one that sends least.

    Args:
        before: what is in use.
        after: what is wanted.
        node_of_rank: by rank: a number of its node. Empty: all share one.

    Returns:
        A move for each slot whose expert is another, by rank and slot.
    """
    assert (before.num_slots, before.num_logical) == (after.num_slots, after.num_logical)
    holders: list[list[int]] = [[] for _ in range(before.num_logical)]
    for rank, slots in enumerate(before.logical_of_slot):
        for expert in set(slots):
            holders[expert].append(rank)
    node_of_rank = node_of_rank or (0,) * before.num_ranks

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
    num_sent = [0] * before.num_ranks
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
    best = _plan_from_published(loads, node)
    even = sum(best.total) / len(node.sizes) * GOOD_ENOUGH
    for more in _choices_of_copies(node):
        if best.fullest <= even:
            break
        copies = [*node.experts, *more]
        draft = _Draft(loads, _packed(loads, copies, node.sizes, copies))
        draft.level()
        best = min(best, draft, key=lambda each: each.fullest)
    return best


def _choices_of_copies(node: _Node) -> Iterator[tuple[int, ...]]:
    """Everything that slots beyond one for each expert can be given to, where that is little. With few experts, copies
    of those with most load need not be the best.
    """
    num_free = sum(node.sizes) - len(node.experts)
    if num_free and math.comb(len(node.experts) + num_free - 1, num_free) <= MAX_CHOICES:
        for more in itertools.combinations_with_replacement(node.experts, num_free):
            if max(Counter(more).values()) < len(node.sizes):
                yield more


def _plan_from_published(loads: Sequence[float], node: _Node) -> _Draft:
    """The published plan, improved; none has two copies of an expert on a rank."""
    published = _published(loads, node)
    if all(len(set(held)) == len(held) for held in published):
        draft = _Draft(loads, published)
        draft.level()
        return draft
    most = max(_totals(_shares(loads, published), published))
    drafts = []
    for make in (_without_repeats, _packed_by_kind):
        slots = make(loads, node, published)
        if slots is None:
            continue
        draft = _Draft(loads, slots)
        draft.level(most)
        if draft.fullest <= most:
            return draft
        drafts.append(draft)
    best = min(drafts, key=lambda draft: draft.fullest)
    tried = (_repaired(loads, draft.slots, draft.slots, most, MAX_STEPS_OF_PLAN) for draft in drafts)
    # The slots of second copies can also be used otherwise.
    for repair in itertools.chain(tried, _repairs(loads, node.experts, published, most, MAX_STEPS_OF_PLAN)):
        if repair.done:
            return repair.draft
    return best


def _packed_by_kind(loads: Sequence[float], node: _Node, _: Sequence[Sequence[int]]) -> list[list[int]]:
    """By rank: experts, heaviest first, with no more copies of one than ranks and none twice on a rank."""
    copies = _copies(loads, node.experts, node.sizes)
    return _packed(loads, copies, node.sizes, copies)


def _without_repeats(loads: Sequence[float], _: _Node, slots: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """By rank: these experts, with as many copies, none twice on a rank; None if that is not found.

    Of a second copy on a rank and another rank's expert, those change places that carry most nearly as much.
    """
    share = _shares(loads, slots)
    held = [list(of_rank) for of_rank in slots]
    ranks = _ranks_of(held)
    ascending = sorted(share, key=lambda expert: (share[expert], expert))
    shares = list(map(share.__getitem__, ascending))
    for rank, of_rank in enumerate(held):
        for slot, expert in enumerate(of_rank):
            if expert not in of_rank[:slot]:
                continue
            for other_expert in _nearest(ascending, shares, share[expert]):
                if other_expert in of_rank:
                    continue
                other = next((other for other in ranks[other_expert] if expert not in held[other]), None)
                if other is not None:
                    break
            else:
                return None
            of_rank[slot] = other_expert
            held[other][held[other].index(other_expert)] = expert
            ranks[expert].remove(rank)
            ranks[expert].append(other)
            ranks[other_expert].remove(other)
            ranks[other_expert].append(rank)
    return held


def _nearest(experts: Sequence[int], shares: Sequence[float], share: float) -> Iterator[int]:
    """The experts, by how near their shares are to this one. `shares`: of each, ascending."""
    above = bisect_left(shares, share)
    below = above - 1
    while below >= 0 or above < len(shares):
        if above < len(shares) and (below < 0 or shares[above] - share <= share - shares[below]):
            yield experts[above]
            above += 1
        else:
            yield experts[below]
            below -= 1


def _copies(loads: Sequence[float], experts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """For the ranks of a node with so many slots: the experts, each as often as it has copies."""
    own = [loads[expert] for expert in experts]
    return [experts[item] for item in replicate(own if any(own) else [1.0] * len(own), sum(sizes), len(sizes))]


def _settled(
    loads: Sequence[float], experts: Sequence[int], today: Sequence[Sequence[int]], most: float
) -> list[list[int]] | None:
    """These experts on these ranks, with few slots changed, so that none carries above `most`; None if none is found.

    First with nearly as many copies of each as today; where that fails, with as many as `balance` gives them.
    """
    if sum(loads[expert] for expert in experts) > most * len(today):
        return None
    if _is_whole(today, experts) and max(_totals(_shares(loads, today), today)) <= most:
        return list(map(list, today))
    max_steps = sum(map(len, today)) // 3 + 1
    repairs = list(_repairs(loads, experts, today, most, max_steps))
    if not any(repair.done for repair in repairs):
        max_steps -= min(repair.num_steps for repair in repairs)
        num_copies = Counter(_copies(loads, experts, list(map(len, today))))
        repairs = [_repaired(loads, _adjusted(loads, num_copies, today), today, most, max_steps)]
    done = (repair for repair in repairs if repair.done)
    best = min(done, key=lambda repair: repair.num_moved, default=None)
    return None if best is None else best.draft.slots


def _is_whole(slots: Sequence[Sequence[int]], experts: Sequence[int]) -> bool:
    """Whether these experts are all there and no others, and none twice on a rank."""
    return set().union(*slots) == set(experts) and all(len(set(held)) == len(held) for held in slots)


def _repairs(
    loads: Sequence[float], experts: Sequence[int], today: Sequence[Sequence[int]], most: float, max_steps: int
) -> Iterator[_Repair]:
    """Tries to have these experts on these ranks with few slots changed, so that none carries above `most`.

    In as many ways as there is time for: of a few slots, one more or less is a large share.
    """
    num_slots = sum(map(len, today))
    for heavy in HEAVY[: max(1, SLOTS_TO_TRY // num_slots)]:
        num_copies = _nearly_the_same_copies(loads, experts, today, most * heavy)
        yield _repaired(loads, _adjusted(loads, num_copies, today), today, most, max_steps)


def _repaired(
    loads: Sequence[float], slots: Sequence[Sequence[int]], today: Sequence[Sequence[int]], most: float, max_steps: int
) -> _Repair:
    repair = _Repair(loads, slots, today, most)
    repair.run(max_steps)
    return repair


def _nearly_the_same_copies(
    loads: Sequence[float], experts: Sequence[int], today: Sequence[Sequence[int]], heavy: float
) -> Counter[int]:
    """How many copies of each expert: as today, but for those whose copies carry more than `heavy`, which get more."""
    num_ranks = len(today)
    held = Counter(itertools.chain.from_iterable(map(set, today)))
    num_copies = Counter({expert: max(held[expert], 1) for expert in experts})
    num_free = sum(map(len, today)) - num_copies.total()
    # What a copy carries now, of experts that can have more; and with one copy less, of those that can have less. An
    # entry holds as long as its number of copies does.
    now = [(-loads[expert] / count, expert, count) for expert, count in num_copies.items() if count < num_ranks]
    then = [(loads[expert] / (count - 1), expert, count) for expert, count in num_copies.items() if count > 1]
    heapq.heapify(now)
    heapq.heapify(then)

    def first(entries: list[tuple[float, int, int]]) -> tuple[float, int, int] | None:
        while entries and num_copies[entries[0][1]] != entries[0][2]:
            heapq.heappop(entries)
        return entries[0] if entries else None

    def add(expert: int, number: int) -> None:
        num_copies[expert] += number
        count = num_copies[expert]
        if count < num_ranks:
            heapq.heappush(now, (-loads[expert] / count, expert, count))
        if count > 1:
            heapq.heappush(then, (loads[expert] / (count - 1), expert, count))

    for _ in range(abs(num_free)):
        entry = first(now if num_free > 0 else then)
        assert entry is not None
        add(entry[1], 1 if num_free > 0 else -1)
    while True:
        hottest, coldest = first(now), first(then)
        if hottest is None or coldest is None or -hottest[0] <= max(heavy, coldest[0]):
            return num_copies
        add(hottest[1], 1)
        add(coldest[1], -1)


def _adjusted(loads: Sequence[float], num_copies: Counter[int], today: Sequence[Sequence[int]]) -> list[list[int]]:
    """By rank: `today` with as many copies of each expert as asked for, none twice on a rank.

    Copies go from the fullest ranks and come, heaviest first, to those with the least load that have room.
    """
    held = [list(dict.fromkeys(expert for expert in slots if expert in num_copies)) for slots in today]
    ranks = _ranks_of(held)
    share = {expert: loads[expert] / count for expert, count in num_copies.items()}
    total = [sum(map(share.__getitem__, slots)) for slots in held]

    def give(rank: int, expert: int) -> None:
        held[rank].append(expert)
        total[rank] += share[expert]

    def take(rank: int, expert: int) -> None:
        held[rank].remove(expert)
        total[rank] -= share[expert]

    lacking = []
    for expert, count in num_copies.items():
        holders = ranks.get(expert, [])
        for _ in range(len(holders) - count):
            rank = max(holders, key=total.__getitem__)
            holders.remove(rank)
            take(rank, expert)
        lacking += [expert] * (count - len(holders))
    for expert in sorted(lacking, key=share.__getitem__, reverse=True):
        free = [rank for rank, slots in enumerate(held) if len(slots) < len(today[rank])]
        lacking_it = [rank for rank in free if expert not in held[rank]]
        if lacking_it:
            rank = min(lacking_it, key=total.__getitem__)
        else:
            # All ranks with room have it already. So a full one makes room and passes something on. It holds as many as
            # the one with room at least, which has this one besides: so there is something that that one lacks.
            rank = min((rank for rank, slots in enumerate(held) if expert not in slots), key=total.__getitem__)
            passed = min((old for old in held[rank] if old not in held[free[0]]), key=share.__getitem__)
            take(rank, passed)
            give(free[0], passed)
        give(rank, expert)
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
    if len(new) == 1:
        return [0]
    places: dict[int, list[int]] = {}
    for place, held in enumerate(today):
        for expert in held:
            places.setdefault(expert, []).append(place)
    shared = Counter(
        (index, place) for index, held in enumerate(new) for expert in held for place in places.get(expert, ())
    )
    left = dict.fromkeys(range(len(new)))
    chosen: dict[int, int] = {}
    rest = ((index, place) for place in range(len(new)) if place not in chosen for index in list(left))
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


class _Draft:
    """The experts of some ranks while they change places, and what each rank has to carry."""

    def __init__(self, loads: Sequence[float], slots: Sequence[Iterable[int]]) -> None:
        self.held = list(map(set, slots))  # by rank
        self.share = _shares(loads, self.held)  # by expert: what a copy carries
        self.total = _totals(self.share, self.held)  # by rank
        self._ascending: list[list[tuple[float, int]] | None] = [None] * len(self.held)  # see `ordered`

    @property
    def slots(self) -> list[list[int]]:
        return list(map(sorted, self.held))

    @property
    def fullest(self) -> float:
        return max(self.total)

    def level(self, most: float = math.inf) -> None:
        """Exchanges experts of the fullest rank until it carries little more than it must, and not above `most`."""
        total = self.total
        least = min(most, max(sum(total) / len(total), max(self.share.values())) * GOOD_ENOUGH)
        for _ in range(sum(map(len, self.held))):
            fullest = total.index(max(total))
            if total[fullest] <= least:
                return
            other = total.index(min(total))
            pair = self._pair(fullest, other, least)
            if pair is None:
                for other in heapq.nsmallest(MAX_PARTNERS, range(len(total)), key=total.__getitem__)[1:]:
                    pair = self._pair(fullest, other, least)
                    if pair is not None:
                        break
                else:
                    return
            self.put(fullest, *pair)
            self.put(other, *reversed(pair))

    def put(self, rank: int, old: int, new: int) -> None:
        self.held[rank].remove(old)
        self.held[rank].add(new)
        self.recount(rank)

    def recount(self, rank: int) -> None:
        """After a change of what a rank holds or of what that carries."""
        self._ascending[rank] = None
        self.total[rank] = sum([share for share, _ in self.ordered(rank)])

    def ordered(self, rank: int) -> list[tuple[float, int]]:
        """The rank's experts, the lightest first: what one copy carries, and which it is."""
        held = self._ascending[rank]
        if held is None:
            held = self._ascending[rank] = sorted([(self.share[expert], expert) for expert in self.held[rank]])
        return held

    def _pair(self, rank: int, other: int, least: float) -> tuple[int, int] | None:
        """An expert of a rank and one of another, less full, that bring them closest to each other when exchanged.

        The first that leaves neither above `least` will do. None if none brings them closer.
        """
        ours, theirs = self.ordered(rank), self.ordered(other)
        our_held, their_held = self.held[rank], self.held[other]
        want = (self.total[rank] - self.total[other]) / 2
        enough = least - (self.total[rank] + self.total[other]) / 2
        best = None
        least_miss = want * (1 - LEAST_GAIN)
        for share, expert in ours:
            at = bisect_left(theirs, (share - want,))
            for other_share, other_expert in theirs[at - 1 if at else 0 : at + 1]:
                miss = abs(share - other_share - want)
                if miss < least_miss and expert not in their_held and other_expert not in our_held:
                    if miss <= enough:
                        return expert, other_expert
                    best, least_miss = (expert, other_expert), miss
        return best


class _Step(NamedTuple):
    """A change of one slot, or of two that exchange experts."""

    gain: float  # by how much less the ranks carry above what they may
    num_moves: int  # how many more slots differ from today's
    puts: tuple[tuple[int, int, int], ...]  # rank, old expert, new expert

    @property
    def worth(self) -> float:
        return self.gain / max(self.num_moves, FREE)


class _Repair:
    """Changes a draft, step by step, until no rank carries above `most`, and few of its slots differ from today's."""

    def __init__(
        self, loads: Sequence[float], slots: Sequence[Sequence[int]], today: Sequence[Sequence[int]], most: float
    ) -> None:
        self.draft = _Draft(loads, slots)
        self.num_steps = 0
        self._loads = loads
        self._today = [frozenset(held) for held in today]
        self._most = most
        self._ranks = _ranks_of(slots)
        self._changed = {rank for rank, held in enumerate(self.draft.held) if held != self._today[rank]}
        self._spare: list[int] | None = None  # see `_coldest`
        self._lightest: list[int] | None = None  # see `_lightest_for`
        self._experts: list[tuple[float, int]] | None = None  # see `_alike`

    @property
    def num_moved(self) -> int:
        return sum(len(held - today) for held, today in zip(self.draft.held, self._today, strict=True))

    @property
    def done(self) -> bool:
        return self.draft.fullest <= self._most

    def run(self, max_steps: int) -> None:
        """Changes the fullest rank until all is done or nothing helps any more."""
        total = self.draft.total
        while not self.done and self.num_steps < max_steps:
            fullest = total.index(max(total))
            step = self._exchange(fullest)
            if step is None or step.gain < total[fullest] - self._most or step.num_moves > 1:
                step = self._replacement(fullest) or step
            if step is None:
                return
            self._apply(step)
            self.num_steps += 1

    def _exchange(self, fullest: int) -> _Step | None:
        """The exchange with the fullest rank that is worth most, of those looked at; None if none lowers it.

        First with the ranks that carry least. Then with those that are not as today any more: an expert that moved
        moves once more at no cost.
        """
        total, most = self.draft.total, self._most
        above = total[fullest] - most
        best: _Step | None = None
        ascending = [rank for rank in sorted(range(len(total)), key=total.__getitem__) if total[rank] < most]
        lightest = ascending[:MAX_PARTNERS]
        for others in (lightest, self._alike(fullest, lightest)):
            for other in others:
                step = self._exchange_with(fullest, other)
                if step is not None and (best is None or step.worth > best.worth):
                    best = step
                    if best.gain >= above:
                        break
            if best is not None:
                break
        if best is not None:
            changed = (rank for rank in ascending if rank in self._changed)
            for other in itertools.islice(changed, MAX_CHANGED):
                if best.worth >= above:
                    break
                step = self._exchange_with(fullest, other)
                if step is not None and step.worth > best.worth:
                    best = step
        return best

    def _alike(self, rank: int, without: Sequence[int]) -> Iterator[int]:
        """Ranks below `most` that have an expert little lighter than one of this rank's. `without`: all but these."""
        if self._experts is None:
            self._experts = sorted((share, expert) for expert, share in self.draft.share.items())
        seen = {rank, *without}
        for share, _ in reversed(self.draft.ordered(rank)):
            end = bisect_left(self._experts, (share,))
            for _, expert in reversed(self._experts[max(end - MAX_ALIKE, 0) : end]):
                for other in self._ranks[expert]:
                    if other not in seen and self.draft.total[other] < self._most:
                        seen.add(other)
                        yield other

    def _exchange_with(self, rank: int, other: int) -> _Step | None:
        """The exchange of two ranks that is worth most, of which the first carries too much and the other does not."""
        draft = self.draft
        above, room = draft.total[rank] - self._most, self._most - draft.total[other]
        low, high = min(above, room), max(above, room)  # as good as any is an exchange of a load between these
        theirs = draft.ordered(other)
        our_held, their_held = draft.held[rank], draft.held[other]
        our_today, their_today = self._today[rank], self._today[other]
        changed = rank in self._changed or other in self._changed
        best, best_worth = None, 0.0
        num_moves = 2
        for share, expert in draft.ordered(rank):
            if expert in their_held:
                continue
            start = bisect_left(theirs, (share - high,))
            for other_share, other_expert in theirs[start - 1 if start else 0 :]:
                load = share - other_share
                if load <= above * LEAST_GAIN:
                    break
                if other_expert not in our_held:
                    gain = load if load < above else above
                    if load > room:
                        gain -= load - room
                    if changed:
                        num_moves = (expert in our_today) - (other_expert in our_today)
                        num_moves += (other_expert in their_today) - (expert in their_today)
                    worth = gain / (num_moves if num_moves > 0 else FREE)
                    if worth > best_worth:
                        best, best_worth = (gain, num_moves, expert, other_expert), worth
                        if gain >= low and not changed:
                            break
                if load < low:
                    break
            if best_worth >= low / 2 and not changed:
                break
        if best is None:
            return None
        gain, num_moves, expert, other_expert = best
        return _Step(gain, num_moves, ((rank, expert, other_expert), (other, other_expert, expert)))

    def _replacement(self, fullest: int) -> _Step | None:
        """A slot that gets another expert, so that the fullest rank is not above `most` any more and none gets so."""
        draft, most = self.draft, self._most
        above = draft.total[fullest] - most
        for share, hot in reversed(draft.ordered(fullest)):
            less = share / (len(self._ranks[hot]) + 1)
            if less >= above:
                for old in self._coldest():
                    rank = self._rank_for(hot, less, old)
                    if rank is not None:
                        return _Step(above, self._num_moves(rank, old, hot), ((rank, old, hot),))
        several = [(share, old) for share, old in draft.ordered(fullest) if len(self._ranks[old]) > 1]
        new = self._lightest_for(fullest) if several else None
        if new is not None:
            less = draft.share[new] / (len(self._ranks[new]) + 1)
            for share, old in reversed(several):
                if share - draft.share[new] + less >= above and self._can_spare(old, fullest, new, less):
                    return _Step(above, self._num_moves(fullest, old, new), ((fullest, old, new),))
        return None

    def _lightest_for(self, rank: int) -> int | None:
        """The expert of which one copy more would carry least, of those that a rank lacks."""
        if self._lightest is None:
            then = {expert: self._loads[expert] / (len(ranks) + 1) for expert, ranks in self._ranks.items()}
            self._lightest = sorted(then, key=then.__getitem__)
        return next((expert for expert in self._lightest if expert not in self.draft.held[rank]), None)

    def _rank_for(self, new: int, less: float, old: int) -> int | None:
        """Of the ranks with a copy of `old`, the one that can best take one of `new` instead. See `_can_spare`."""
        draft = self.draft
        limit = self._most + draft.share[old] - draft.share[new] + less
        fitting = [rank for rank in self._ranks[old] if draft.total[rank] <= limit and new not in draft.held[rank]]
        rank = min(fitting, key=draft.total.__getitem__, default=None)
        return rank if rank is not None and self._can_spare(old, rank, new, less) else None

    def _can_spare(self, old: int, rank: int, new: int, less: float) -> bool:
        """Whether the other copies of `old` can take over what that of a rank carries, which gets `new` instead.

        less: what the other copies of `new` then carry less.
        """
        draft = self.draft
        ranks = self._ranks[old]
        if len(ranks) == 1:
            return False
        more = draft.share[old] / (len(ranks) - 1)
        return all(
            draft.total[holder] + more - (less if new in draft.held[holder] else 0.0) <= self._most
            for holder in ranks
            if holder != rank
        )

    def _coldest(self) -> list[int]:
        """Of the experts with several copies, some that need them least, in order."""
        if self._spare is None:
            several = (expert for expert, ranks in self._ranks.items() if len(ranks) > 1)
            then = {expert: self.draft.share[expert] / (len(self._ranks[expert]) - 1) for expert in several}
            self._spare = heapq.nsmallest(MAX_PARTNERS, then, key=then.__getitem__)
        return self._spare

    def _num_moves(self, rank: int, old: int, new: int) -> int:
        today = self._today[rank]
        return (old in today) - (new in today)

    def _apply(self, step: _Step) -> None:
        share = self.draft.share
        for rank, old, new in step.puts:
            self._ranks[old].remove(rank)
            self._ranks[new].append(rank)
            self._changed.add(rank)
            if len(step.puts) == 1:
                self._spare = self._lightest = self._experts = None
                share[old], share[new] = (self._loads[expert] / len(self._ranks[expert]) for expert in (old, new))
            self.draft.put(rank, old, new)
            if len(step.puts) == 1:
                for holder in {*self._ranks[old], *self._ranks[new]}:
                    self.draft.recount(holder)


def _ranks_of(slots: Sequence[Iterable[int]]) -> dict[int, list[int]]:
    """By expert: the ranks that have it, ascending."""
    ranks: dict[int, list[int]] = {}
    for rank, held in enumerate(slots):
        for expert in held:
            ranks.setdefault(expert, []).append(rank)
    return ranks


def _shares(loads: Sequence[float], slots: Iterable[Iterable[int]]) -> dict[int, float]:
    """By expert: what one copy carries, with as many copies as there are."""
    num_copies = Counter(itertools.chain.from_iterable(slots))
    return {expert: loads[expert] / count for expert, count in num_copies.items()}


def _totals(share: Mapping[int, float], slots: Iterable[Iterable[int]]) -> list[float]:
    """By rank: what it carries, added in an order that does not depend on that of its slots."""
    return [sum(sorted(map(share.__getitem__, held))) for held in slots]
