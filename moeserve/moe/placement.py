"""Which rank holds which experts. Knows numbers only: no weights, no tensors, no other layers.

A logical expert is one of the model's. A physical expert is a slot of some rank that holds a copy of a logical one;
physical experts are numbered through all ranks' slots, rank by rank.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from moeserve.distributed.mesh import share_sizes
from moeserve.errors import SettingsError, shown

MAX_EXPERTS = 2**20
MAX_LOAD = 1e30
MAX_FILE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Placement:
    """The experts of one layer on the ranks of an expert-parallel group. Every logical expert has at least one slot."""

    logical_of_slot: tuple[tuple[int, ...], ...]  # by rank: the logical expert in each of its slots; some may have none
    num_logical: int

    def __post_init__(self) -> None:
        fault = _fault(self.logical_of_slot, self.num_logical)
        assert fault is None, fault

    @property
    def num_ranks(self) -> int:
        return len(self.logical_of_slot)

    @property
    def num_slots(self) -> tuple[int, ...]:
        """By rank."""
        return tuple(len(slots) for slots in self.logical_of_slot)

    @property
    def first_physical(self) -> tuple[int, ...]:
        """By rank: the physical expert in its first slot."""
        return tuple(itertools.accumulate(self.num_slots, initial=0))[:-1]

    @property
    def logical_of_physical(self) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(self.logical_of_slot))

    @property
    def physical_of_logical(self) -> tuple[tuple[int, ...], ...]:
        """By logical expert: its copies, ascending."""
        copies: list[list[int]] = [[] for _ in range(self.num_logical)]
        for physical, logical in enumerate(self.logical_of_physical):
            copies[logical].append(physical)
        return tuple(map(tuple, copies))

    @classmethod
    def even(cls, num_experts: int, num_ranks: int, num_redundant: int = 0) -> Placement:
        """Experts in their order over ranks with as many slots each as can be; after the last comes the first again.

        Raises:
            SettingsError: more slots than there could be copies, of which a rank takes one.
        """
        num_slots = num_experts + num_redundant
        _check_num_slots(num_slots, num_experts, num_ranks)
        experts = (slot % num_experts for slot in range(num_slots))
        sizes = share_sizes(num_slots, num_ranks)
        return cls(tuple(tuple(itertools.islice(experts, size)) for size in sizes), num_experts)

    @classmethod
    def from_loads(cls, loads: Sequence[float], num_ranks: int, num_slots: int) -> Placement:
        """Spreads the work of experts with unequal loads, greedily; no rank holds two copies of one expert.

        While there are slots to spare, the expert whose copies are hottest gets another copy. Then the copies go,
        heaviest first, to the rank with the least load that has a slot.

        Args:
            loads: by logical expert, how many tokens it gets, in any unit.
            num_ranks: ranks of the group.
            num_slots: slots of all ranks together.

        Raises:
            SettingsError: a load out of range, fewer slots than experts, or more than there could be copies.
        """
        for expert, load in enumerate(loads):
            if not 0 <= load <= MAX_LOAD:
                raise SettingsError(f"expert {expert} has load {shown(load)}; loads must be from 0 to {MAX_LOAD:g}")
        _check_num_slots(num_slots, len(loads), num_ranks)
        num_copies = _count_copies(loads, num_ranks, num_slots)
        return cls(_pack(loads, num_copies, share_sizes(num_slots, num_ranks)), len(loads))

    def to_json(self) -> str:
        return msgspec.json.encode(_PlacementJson(self.num_logical, self.logical_of_slot)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Placement:
        """What `to_json` wrote.

        Raises:
            SettingsError: not such a text, or a placement that leaves an expert without a slot.
        """
        try:
            content = msgspec.json.decode(text, type=_PlacementJson)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SettingsError(f"not a placement of experts: {error}") from None
        fault = _fault(content.logical_of_slot, content.num_logical)
        if fault is not None:
            raise SettingsError(f"not a placement of experts: {fault}")
        return cls(content.logical_of_slot, content.num_logical)


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
        SettingsError: see `Placement.from_loads`.
    """
    if not loads:
        return (Placement.even(num_experts, num_ranks, num_redundant),) * num_layers if num_layers else ()
    assert len(loads) == num_layers, (len(loads), num_layers)
    return tuple(Placement.from_loads(of_layer, num_ranks, num_experts + num_redundant) for of_layer in loads)


def read_loads(path: Path, *, num_layers: int, num_experts: int) -> tuple[tuple[float, ...], ...]:
    """Loads of experts from a file such as {"loads": [[5, 1, 0, 2], [3, 3, 1, 1]]}.

    Args:
        path: JSON; one list of loads for each layer that has experts, or a single list that holds for all of them.
        num_layers: how many of the model's layers have experts.
        num_experts: logical experts of each.

    Returns:
        By layer, by logical expert.

    Raises:
        SettingsError: no such file, or not the loads of this model.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{path} is too large for a file of expert loads ({path.stat().st_size} bytes)")
        loads = msgspec.json.decode(path.read_bytes(), type=_LoadsJson).loads
    except OSError as error:
        raise SettingsError(f"cannot read the expert loads in {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f'{path} must hold {{"loads": [[load, ...], ...]}}: {error}') from None
    if num_layers == 0:
        raise SettingsError(f"{path} holds loads of experts, but the model has no experts")
    if len(loads) not in (1, num_layers):
        raise SettingsError(
            f"{path} holds loads of {len(loads)} layers; give one list, or one for each of the {num_layers} layers "
            f"that have experts"
        )
    for layer, of_layer in enumerate(loads):
        if len(of_layer) != num_experts:
            raise SettingsError(
                f"{path}: loads[{layer}] is of {len(of_layer)} experts; the model has {num_experts} in each layer"
            )
    return loads if len(loads) == num_layers else loads * num_layers


_ExpertId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_EXPERTS)]
_Load = Annotated[float, msgspec.Meta(ge=0, le=MAX_LOAD)]


class _PlacementJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_logical: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERTS)]
    logical_of_slot: tuple[tuple[_ExpertId, ...], ...]


class _LoadsJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    loads: tuple[tuple[_Load, ...], ...]


def _fault(logical_of_slot: Sequence[Sequence[int]], num_logical: int) -> str | None:
    """What is wrong with a placement, in words."""
    placed = set(itertools.chain.from_iterable(logical_of_slot))
    for expert in range(num_logical):
        if expert not in placed:
            return f"no slot holds expert {expert} of {num_logical}"
    if len(placed) > num_logical:
        return f"a slot holds expert {max(placed)}, but there are {num_logical}, counted from 0"
    return None


def _check_num_slots(num_slots: int, num_experts: int, num_ranks: int) -> None:
    if not 1 <= num_experts <= MAX_EXPERTS or num_ranks < 1:
        raise SettingsError(f"{num_experts} experts on {num_ranks} ranks: there must be at least one of both")
    if not num_experts <= num_slots <= num_experts * num_ranks:
        raise SettingsError(
            f"{num_experts} experts on {num_ranks} ranks need from {num_experts} slots (one copy each) to "
            f"{num_experts * num_ranks} (a copy on every rank), not {num_slots}"
        )


def _count_copies(loads: Sequence[float], num_ranks: int, num_slots: int) -> list[int]:
    """By logical expert, from 1 to `num_ranks`."""
    num_copies = [1] * len(loads)
    # The hottest copy first; among equals, that of the expert with the fewest.
    hottest = [(-load, 1, expert) for expert, load in enumerate(loads)] if num_ranks > 1 else []
    heapq.heapify(hottest)
    for _ in range(num_slots - len(loads)):
        _, count, expert = heapq.heappop(hottest)
        num_copies[expert] = count + 1
        if count + 1 < num_ranks:
            heapq.heappush(hottest, (-loads[expert] / (count + 1), count + 1, expert))
    return num_copies


def _pack(loads: Sequence[float], num_copies: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """By rank: its experts, ascending. `sizes` differ by one at most, and no expert has more copies than ranks."""
    load_of_copy = [load / count for load, count in zip(loads, num_copies, strict=True)]
    held: list[set[int]] = [set() for _ in sizes]
    total = [0.0] * len(sizes)

    def put(expert: int, rank: int) -> None:
        held[rank].add(expert)
        total[rank] += load_of_copy[expert]

    for expert in sorted(range(len(loads)), key=lambda expert: -load_of_copy[expert]):
        for _ in range(num_copies[expert]):
            lacking = [rank for rank in range(len(sizes)) if expert not in held[rank]]
            open_to_it = [rank for rank in lacking if len(held[rank]) < sizes[rank]]
            rank = min(open_to_it or lacking, key=total.__getitem__)
            if not open_to_it:
                # Every rank with a free slot has this expert, so a full one passes something on to make room. It holds
                # more experts besides this one than the rank with the free slot does, so there is something to pass.
                free = next(other for other in range(len(sizes)) if len(held[other]) < sizes[other])
                moved = min(held[rank] - held[free], key=lambda expert: (load_of_copy[expert], expert))
                held[rank].remove(moved)
                total[rank] -= load_of_copy[moved]
                put(moved, free)
            put(expert, rank)
    return tuple(tuple(sorted(experts)) for experts in held)
