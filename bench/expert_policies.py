"""Which experts a layer keeps in memory: policies of replacement, simulated on recorded visits.

A visit is the set of experts that a layer needs in a step. Those that are not in memory are read one after another.
Each replaces an expert that the visit does not need, or, if there is no such expert, one that it has computed.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

HALF_LIFE = 64  # visits, as in csrc/host/expert_store.cpp
NEVER = math.inf

Visits = Sequence[Sequence[int]]
# (expert, number of the visit) -> the worth of keeping it; the expert with the least is replaced.
Worth = Callable[[int, int], float]


def count_reads(visits: Visits, num_slots: int, worth: Worth) -> int:
    """Return how many experts are read if each replaces the one of least worth."""
    held: set[int] = set()
    num_reads = 0
    for number, experts in enumerate(visits):
        for expert in sorted({*experts} - held):
            num_reads += 1
            if len(held) == num_slots:
                idle = held - {*experts}  # the others become replaceable when they have been computed
                held.remove(min(idle or held, key=lambda other: worth(other, number)))
            held.add(expert)
    return num_reads


def fewest_reads(visits: Visits, num_slots: int) -> int:
    """Return how many experts are read by Belady's optimum, which knows the future.

    It replaces the expert whose next visit is farthest, and may compute those of a visit in any order.
    """
    worth = next_use(visits)
    held: set[int] = set()
    num_reads = 0
    for number, experts in enumerate(visits):
        num_reads += len({*experts} - held)
        best = sorted(held | {*experts}, key=lambda expert: worth(expert, number), reverse=True)
        held = {*best[:num_slots]}
    return num_reads


def least_recent(visits: Visits) -> Worth:
    """LRU: the number of the last visit."""
    last = _visits_of_expert(visits)
    return lambda expert, number: _before(last[expert], number, -1)


def frequent(visits: Visits, half_life: float = HALF_LIFE) -> Worth:
    """The number of visits, of which older ones count less."""
    all_visits = _visits_of_expert(visits)
    scores: dict[int, list[float]] = {}
    for expert, numbers in all_visits.items():
        scores[expert] = []
        score, last = 0.0, 0
        for number in numbers:
            score = score * 2 ** ((last - number) / half_life) + 1
            last = number
            scores[expert].append(score)

    def worth(expert: int, number: int) -> float:
        place = bisect.bisect_right(all_visits[expert], number) - 1
        return scores[expert][place] * 2 ** ((all_visits[expert][place] - number) / half_life) if place >= 0 else 0.0

    return worth


def next_use(visits: Visits) -> Worth:
    """The number of the next visit, negative."""
    all_visits = _visits_of_expert(visits)

    def worth(expert: int, number: int) -> float:
        numbers = all_visits[expert]
        place = bisect.bisect_right(numbers, number)
        return -numbers[place] if place < len(numbers) else -NEVER

    return worth


POLICIES: dict[str, Callable[[Visits], Worth]] = {
    "lru": least_recent,
    **{f"frequent_{size}": partial(frequent, half_life=size) for size in (8, 32, 64, 256)},
}


def _visits_of_expert(visits: Visits) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for number, experts in enumerate(visits):
        for expert in experts:
            found[expert].append(number)
    return found


def _before(numbers: Sequence[int], number: int, otherwise: int) -> int:
    place = bisect.bisect_right(numbers, number) - 1
    return numbers[place] if place >= 0 else otherwise
