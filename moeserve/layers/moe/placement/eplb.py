"""Computes placements of experts from their loads, and the moves from one placement to another.

The load of an expert is the number of tokens routed to it, in any unit. Copies of an expert share its load evenly, so
the load of a rank is the sum over its slots of the expert's load divided by its number of copies. The imbalance is the
load of the fullest rank over the mean of the ranks: all ranks wait for the fullest rank.

`eplb` is DeepSeek's published algorithm (https://github.com/deepseek-ai/EPLB), for any number of experts, slots and
ranks, with two policies. The global policy ignores nodes. The hierarchical policy keeps all copies of a group of
experts on one node, so that a router that first chooses groups sends a token to few nodes. `rebalance` reaches nearly
the same imbalance with few changes to the current placement. Both functions are deterministic, so every rank can
compute placements independently.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.errors import SettingsError, shown
from moeserve.layers.moe.placement.placement import MAX_LOAD, Placement, check_num_slots

# A repair adds a copy of an expert if each of its copies carries more than this fraction of a rank's limit.
HEAVY_SHARE = 0.6
LEAST_GAIN = 1e-9  # minimum reduction of the fullest rank's load by a swap, above rounding errors

# Dimensions: E logical experts, R ranks, S slots of all ranks, s slots of the fullest rank

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Ranks = tuple[tuple[int, ...], ...]  # experts by rank and slot


@dataclass(frozen=True, kw_only=True)
class Move:
    """The copy of an expert into a slot that holds another expert."""

    to_rank: int
    slot: int  # slot of `to_rank`
    expert: int
    from_rank: int  # a rank that holds the expert before the move; `to_rank` if the expert only changes slots


def rank_loads(loads: Sequence[float], placement: Placement) -> tuple[float, ...]:
    """Return the load of each rank, given the load of each logical expert."""
    assert len(loads) == placement.num_logical, (len(loads), placement.num_logical)
    num_copies = Counter(placement.logical_of_physical)
    share = [load / num_copies[expert] for expert, load in enumerate(loads)]
    return tuple(sum(map(share.__getitem__, slots)) for slots in placement.logical_of_slot)


def imbalance(loads: Sequence[float], placement: Placement) -> float:
    """Return the load of the fullest rank over the mean of the ranks; 1 if all loads are zero."""
    of_rank = rank_loads(loads, placement)
    total = sum(of_rank)
    return max(of_rank) * len(of_rank) / total if total else 1.0


def eplb(
    loads: Sequence[float], num_ranks: int, num_slots: int, *, num_nodes: int = 1, num_groups: int = 1
) -> Placement:
    """Return the placement of the published algorithm: replicate the hottest experts, then pack, heaviest first.

    Under the hierarchical policy, groups are first packed on nodes. Each node then places its own experts. Under the
    global policy, nodes and groups are ignored. As in the original, a rank may get two copies of an expert.

    Args:
        loads: the load of each logical expert. If all loads are zero, experts count as equally loaded.
        num_ranks: number of ranks of the ep group.
        num_slots: number of slots of all ranks together.
        num_nodes: number of nodes, each of equally many consecutive ranks.
        num_groups: number of groups of consecutive experts that the router chooses from. See `policy`.

    Raises:
        SettingsError: a load is out of range, or the slots are fewer than the experts or more than one copy per rank.
    """
    for expert, load in enumerate(loads):
        if not 0 <= load <= MAX_LOAD:
            raise SettingsError(f"expert {expert} has load {shown(load)}; loads must be from 0 to {MAX_LOAD:g}")
    check_num_slots(num_slots, len(loads), num_ranks)
    num_nodes, num_groups = policy(len(loads), num_ranks, num_slots, num_nodes, num_groups)
    groups = [range(len(loads))[share_of(len(loads), group, num_groups)] for group in range(num_groups)]
    load_of_group = [sum(map(loads.__getitem__, group)) for group in groups]
    groups_of_node = pack(load_of_group, share_sizes(num_groups, num_nodes))
    experts_of_node = [[expert for group in members for expert in groups[group]] for members in groups_of_node]
    return _place(loads, experts_of_node, share_sizes(num_slots, num_ranks), num_groups)


def policy(num_experts: int, num_ranks: int, num_slots: int, num_nodes: int, num_groups: int) -> tuple[int, int]:
    """Return the numbers of nodes and groups of the hierarchical policy; (1, 1): the policy is global.

    The policy is hierarchical if there are several nodes, all numbers can be divided evenly, and no rank needs two
    copies of an expert.
    """
    is_even = not (num_groups % num_nodes or num_experts % num_groups or num_ranks % num_nodes)
    is_hierarchical = num_nodes > 1 and is_even and num_slots * num_nodes <= num_experts * num_ranks
    return (num_nodes, num_groups) if is_hierarchical else (1, 1)


def _place(
    loads: Sequence[float], experts_of_node: Sequence[Sequence[int]], num_slots: Sequence[int], num_groups: int
) -> Placement:
    """Return the placement in which each node replicates its experts and packs the copies on its ranks.

    Args:
        num_slots: number of slots of each rank.
    """
    ranks: list[tuple[int, ...]] = []
    for node, experts in enumerate(experts_of_node):
        own_loads = [loads[expert] for expert in experts]
        if not any(own_loads):
            own_loads = [1.0] * len(experts)
        sizes = num_slots[share_of(len(num_slots), node, len(experts_of_node))]
        copies = replicate(own_loads, sum(sizes))
        num_copies = Counter(copies)
        packs = pack([own_loads[index] / num_copies[index] for index in copies], sizes)
        ranks += (tuple(experts[copies[copy]] for copy in members) for members in packs)
    return Placement(tuple(ranks), len(loads), num_nodes=len(experts_of_node), num_groups=num_groups)


def replicate(loads: Sequence[float], num_copies: int) -> list[int]:
    """Return the expert of each copy: first each expert once, then repeatedly the expert with the most load per copy.

    Ties go to the lowest index.
    """
    copies = list(range(len(loads)))
    hottest = [(-load, expert, 1) for expert, load in enumerate(loads)]
    heapq.heapify(hottest)
    for _ in range(num_copies - len(loads)):
        _, expert, count = hottest[0]
        copies.append(expert)
        heapq.heapreplace(hottest, (-loads[expert] / (count + 1), expert, count + 1))
    return copies


def pack(loads: Sequence[float], sizes: Sequence[int]) -> list[list[int]]:
    """Distribute items over packs: the heaviest item first, each to the lightest pack with room.

    Ties go to the lowest index. If every pack has room for at most one item, items keep their order, as in the
    original.

    Args:
        loads: the load of each item.
        sizes: the number of items of each pack; their sum is the number of items.

    Returns:
        The items of each pack, in the order in which they were placed.
    """
    packs: list[list[int]] = [[] for _ in sizes]
    lightest = [(0.0, index) for index, size in enumerate(sizes) if size]
    items = range(len(loads))
    for item in sorted(items, key=loads.__getitem__, reverse=True) if max(sizes) > 1 else items:
        load, index = heapq.heappop(lightest)
        packs[index].append(item)
        if len(packs[index]) < sizes[index]:
            heapq.heappush(lightest, (load + loads[item], index))
    return packs


def rebalance(loads: Sequence[float], before: Placement, *, slack: float = 0.01) -> Placement:
    """Return a placement almost as even as the result of `eplb`, with few changes to the current placement.

    Groups of experts stay on their nodes if such a placement can be almost as even. A node that keeps its groups is
    repaired: copies of cold experts are replaced with copies of hot experts, then the fullest rank swaps experts with
    other ranks. If the repair does not come close enough to `eplb`'s imbalance, `eplb`'s placement is used, with nodes
    and ranks renumbered so that few experts move. An expert that stays on its rank stays in its slot.

    Args:
        loads: the load of each logical expert.
        before: the current placement, with as many slots on each rank as `eplb` would assign.
        slack: the fraction by which the imbalance may exceed the imbalance of `eplb`; 0.01 is one percent.

    Raises:
        SettingsError: see `eplb`.
    """
    assert before.num_logical == len(loads), (before.num_logical, len(loads))
    planned = eplb(
        loads, before.num_ranks, sum(before.num_slots), num_nodes=before.num_nodes, num_groups=before.num_groups
    )
    assert before.num_slots == planned.num_slots, (before.num_slots, planned.num_slots)
    limit = max(rank_loads(loads, planned)) * (1 + slack)
    if max(rank_loads(loads, before)) <= limit:
        return before
    experts_of_node = [sorted(set(itertools.chain.from_iterable(ranks))) for ranks in before.ranks_of_node]
    in_place = _place(loads, experts_of_node, before.num_slots, before.num_groups)
    if max(rank_loads(loads, in_place)) <= limit:
        planned = in_place
    nodes = zip(before.ranks_of_node, _ordered(before.ranks_of_node, planned.ranks_of_node), strict=True)
    experts_of_rank = [slots for old, new in nodes for slots in _rebalance_node(loads, old, new, limit)]
    return _keep_slots(before, experts_of_rank)


def moves(before: Placement, after: Placement, node_of_rank: Sequence[int] = ()) -> tuple[Move, ...]:
    """Return the copies that change one placement into another with the same slots.

    The source of an expert is a rank of the same node if possible. Among several, it is the rank with the fewest sends.

    Args:
        before: the current placement.
        after: the next placement.
        node_of_rank: the node of each rank. Empty: all ranks share one node.

    Returns:
        A move for each slot whose expert changes, ordered by rank and slot.
    """
    assert (before.num_slots, before.num_logical) == (after.num_slots, after.num_logical)
    holders: list[list[int]] = [[] for _ in range(before.num_logical)]
    for rank, slots in enumerate(before.logical_of_slot):
        for expert in set(slots):
            holders[expert].append(rank)
    node_of_rank = node_of_rank or (0,) * before.num_ranks
    num_sent = [0] * before.num_ranks
    found = []
    for rank, (old_slots, new_slots) in enumerate(zip(before.logical_of_slot, after.logical_of_slot, strict=True)):
        for slot, (old, expert) in enumerate(zip(old_slots, new_slots, strict=True)):
            if old == expert:
                continue
            near = [holder for holder in holders[expert] if node_of_rank[holder] == node_of_rank[rank]]
            sources = [rank] if rank in near else near or holders[expert]
            from_rank = min(sources, key=num_sent.__getitem__)
            num_sent[from_rank] += from_rank != rank
            found.append(Move(to_rank=rank, slot=slot, expert=expert, from_rank=from_rank))
    return tuple(found)


def place_experts(
    loads: Sequence[Sequence[float]],
    *,
    num_layers: int,
    num_experts: int,
    num_ranks: int,
    num_redundant: int,
    node_of_rank: Sequence[int] = (),
    num_groups: int = 1,
) -> tuple[Placement, ...]:
    """Return a placement for each MoE layer.

    `eplb` computes the placements from the loads. If the loads are unknown, experts are placed in order.

    Args:
        loads: for each layer, the load of each logical expert, as from `read_loads`; empty: unknown.
        num_layers: number of MoE layers of the model.
        num_experts: number of logical experts of each layer.
        num_ranks: number of ranks of the ep group.
        num_redundant: number of slots of all ranks together, beyond one per expert.
        node_of_rank: the node of each rank; the policy is global unless each node has equally many consecutive ranks.
            Empty: all ranks share one node.
        num_groups: number of groups of experts that the router chooses from.

    Raises:
        SettingsError: see `eplb`.
    """
    num_slots = num_experts + num_redundant
    nodes = _num_even_nodes(node_of_rank)
    if loads or not num_layers:
        assert len(loads) == num_layers, (len(loads), num_layers)
        return tuple(eplb(each, num_ranks, num_slots, num_nodes=nodes, num_groups=num_groups) for each in loads)
    nodes, num_groups = policy(num_experts, num_ranks, num_slots, nodes, num_groups)
    return (Placement.even(num_experts, num_ranks, num_redundant, num_nodes=nodes, num_groups=num_groups),) * num_layers


def _num_even_nodes(node_of_rank: Sequence[int]) -> int:
    """Return the number of nodes if each node has equally many consecutive ranks, else 1."""
    num_nodes = max(len(set(node_of_rank)), 1)
    num_ranks = len(node_of_rank) // num_nodes
    in_order = [node for node in dict.fromkeys(node_of_rank) for _ in range(num_ranks)]
    return num_nodes if list(node_of_rank) == in_order else 1


def _rebalance_node(loads: Sequence[float], before: Ranks, planned: Ranks, limit: float) -> Sequence[Sequence[int]]:
    """Return the experts of each rank of a node: repaired if possible, otherwise as planned, with ranks renumbered."""
    experts = sorted(set(itertools.chain.from_iterable(before)))
    if experts == sorted(set(itertools.chain.from_iterable(planned))):
        index = {expert: index for index, expert in enumerate(experts)}
        node = Placement(tuple(tuple(map(index.__getitem__, slots)) for slots in before), len(experts))
        own_loads = [loads[expert] for expert in experts]
        if max(rank_loads(own_loads, node)) <= limit:
            return before
        if (repaired := _repair(own_loads, node, limit)) is not None:
            return [[experts[index] for index in slots] for slots in repaired]
    return [slots for (slots,) in _ordered([(slots,) for slots in before], [(slots,) for slots in planned])]


def _repair(loads: Sequence[float], before: Placement, limit: float) -> list[list[int]] | None:
    """Return the experts of each rank after a few changes that leave no rank above `limit`; None if impossible."""
    load_E = np.asarray(loads, dtype=np.float64)
    expert_S = np.array(before.logical_of_physical)
    rank_S = np.repeat(np.arange(before.num_ranks), before.num_slots)
    _move_copies(load_E, expert_S, rank_S, HEAVY_SHARE * limit)
    share_S = (load_E / np.bincount(expert_S))[expert_S]
    for _ in range(len(expert_S)):
        total_R = np.bincount(rank_S, share_S, before.num_ranks)
        fullest = total_R.argmax()
        if total_R[fullest] <= limit:
            return [expert_S[rank_S == rank].tolist() for rank in range(before.num_ranks)]
        # Swap the pair of experts that minimises the load of the fuller of their two ranks.
        own_s = np.flatnonzero(rank_S == fullest)
        change_sS = share_S[own_s, None] - share_S
        fuller_sS = np.maximum(total_R[fullest] - change_sS, total_R[rank_S] + change_sS)
        holds_RE = np.zeros((before.num_ranks, before.num_logical), dtype=bool)
        holds_RE[rank_S, expert_S] = True
        fuller_sS[holds_RE[rank_S][:, expert_S[own_s]].T | holds_RE[fullest, expert_S]] = np.inf
        own, other = divmod(int(fuller_sS.argmin()), len(expert_S))
        if fuller_sS[own, other] >= total_R[fullest] * (1 - LEAST_GAIN):
            return None
        pair = [own_s[own], other]
        expert_S[pair], share_S[pair] = expert_S[pair[::-1]], share_S[pair[::-1]]
    return None


def _move_copies(load_E: FloatArray, expert_S: IntArray, rank_S: IntArray, heavy: float) -> None:
    """Assign slots of cold experts, in place, to experts whose copies each carry more than `heavy`."""
    copies_E = np.bincount(expert_S, minlength=len(load_E))
    while True:
        share_E = load_E / copies_E
        without_one_E = np.where(copies_E > 1, load_E / np.maximum(copies_E - 1, 1), np.inf)
        hot, cold = int(share_E.argmax()), int(without_one_E.argmin())
        if share_E[hot] <= max(heavy, without_one_E[cold]):
            return
        total_R = np.bincount(rank_S, share_E[expert_S])
        ranks_of_hot = rank_S[expert_S == hot]
        candidates = np.flatnonzero(expert_S == cold)
        slot = min(candidates, key=lambda slot: (rank_S[slot] in ranks_of_hot, total_R[rank_S[slot]]))
        expert_S[slot] = hot
        copies_E[[hot, cold]] += [1, -1]


def _ordered(before: Sequence[Ranks], after: Sequence[Ranks]) -> list[Ranks]:
    """Return the items of `after`, each paired with an item of `before` of the same size that shares many experts."""
    left = list(after)
    ordered = []
    for ranks in before:
        experts = set(itertools.chain.from_iterable(ranks))
        fitting = [each for each in left if sorted(map(len, each)) == sorted(map(len, ranks))]
        best = max(fitting, key=lambda each: len(experts.intersection(itertools.chain.from_iterable(each))))
        left.remove(best)
        ordered.append(best)
    return ordered


def _keep_slots(before: Placement, experts_of_rank: Sequence[Sequence[int]]) -> Placement:
    """Return a placement in which each expert that stays on its rank stays in its slot."""
    ranks = []
    for slots, experts in zip(before.logical_of_slot, experts_of_rank, strict=True):
        arriving = Counter(experts)
        kept: list[int | None] = []
        for expert in slots:
            kept.append(expert if arriving[expert] else None)
            arriving[expert] -= bool(arriving[expert])
        new = iter(sorted(arriving.elements()))
        ranks.append(tuple(next(new) if expert is None else expert for expert in kept))
    return dataclasses.replace(before, logical_of_slot=tuple(ranks))
