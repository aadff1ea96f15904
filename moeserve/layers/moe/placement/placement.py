"""The placement of one layer's experts on ranks; files of placements and of expert loads.

A logical expert is an expert of the model. A physical expert is a slot of a rank, which holds a copy of a logical
expert. Physical experts are numbered consecutively over the slots of all ranks, in order of rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.errors import SettingsError
from moeserve.telemetry.expert_load import read_windows, summed

MAX_EXPERTS = 2**20
MAX_LOAD = 1e30


@dataclass(frozen=True)
class Placement:
    """The experts of one layer on the ranks of an expert-parallel group. Every logical expert has at least one slot.

    Either each rank holds some whole experts, or each rank holds a slice of every expert, along the expert's width.
    With several nodes, all copies of a group of consecutive experts are on one node. Nodes have equally many groups.
    """

    logical_of_slot: tuple[tuple[int, ...], ...]  # for each rank, the expert in each slot; a rank may have no slots
    num_logical: int
    num_slices: int = 1  # number of slices of each expert: 1, or the number of ranks
    num_nodes: int = 1  # nodes of equally many consecutive ranks; 1: copies are placed regardless of nodes
    num_groups: int = 1  # number of the router's groups of experts, if there are several nodes

    def __post_init__(self) -> None:
        fault = _fault(self.logical_of_slot, self.num_logical)
        assert fault is None, fault
        assert self.num_slices in (1, self.num_ranks)
        group_size = self.num_logical // self.num_groups
        for ranks in self.ranks_of_node:
            groups = {expert // group_size for slots in ranks for expert in slots}
            assert len(groups) * self.num_nodes == self.num_groups, groups

    @property
    def num_ranks(self) -> int:
        return len(self.logical_of_slot)

    @property
    def num_slots(self) -> tuple[int, ...]:
        """The number of slots of each rank."""
        return tuple(len(slots) for slots in self.logical_of_slot)

    @property
    def ranks_of_node(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The experts by node, by rank of the node and by slot."""
        ranks = (share_of(self.num_ranks, node, self.num_nodes) for node in range(self.num_nodes))
        return tuple(self.logical_of_slot[of_node] for of_node in ranks)

    @property
    def first_physical(self) -> tuple[int, ...]:
        """The physical expert in the first slot of each rank."""
        return tuple(itertools.accumulate(self.num_slots, initial=0))[:-1]

    @property
    def logical_of_physical(self) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(self.logical_of_slot))

    @property
    def physical_of_logical(self) -> tuple[tuple[int, ...], ...]:
        """The physical experts of each logical expert, ascending."""
        copies: list[list[int]] = [[] for _ in range(self.num_logical)]
        for physical, logical in enumerate(self.logical_of_physical):
            copies[logical].append(physical)
        return tuple(map(tuple, copies))

    @classmethod
    def even(
        cls, num_experts: int, num_ranks: int, num_redundant: int = 0, *, num_nodes: int = 1, num_groups: int = 1
    ) -> Placement:
        """Return a placement of the experts in order. The numbers of slots per rank differ by at most one.

        The redundant slots of a node come last, and hold copies of the node's first experts.

        Raises:
            SettingsError: there are more slots than experts times ranks.
        """
        num_slots = num_experts + num_redundant
        check_num_slots(num_slots, num_experts, num_ranks)
        sizes = share_sizes(num_slots, num_ranks)
        ranks: list[tuple[int, ...]] = []
        for node in range(num_nodes):
            experts = itertools.cycle(range(num_experts)[share_of(num_experts, node, num_nodes)])
            of_node = sizes[share_of(num_ranks, node, num_nodes)]
            ranks += (tuple(itertools.islice(experts, size)) for size in of_node)
        return cls(tuple(ranks), num_experts, num_nodes=num_nodes, num_groups=num_groups)

    @classmethod
    def sliced(cls, num_experts: int, num_ranks: int) -> Placement:
        """Return the placement that holds a slice of each expert, in order, on every rank."""
        return cls((tuple(range(num_experts)),) * num_ranks, num_experts, num_slices=num_ranks)

    def to_json(self) -> str:
        return msgspec.json.encode(_PlacementJson(self.num_logical, self.logical_of_slot)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Placement:
        """Parse the result of `to_json`."""
        content = msgspec.json.decode(text, type=_PlacementJson)
        return cls(content.logical_of_slot, content.num_logical)


def check_num_slots(num_slots: int, num_experts: int, num_ranks: int) -> None:
    """Check that the slots can hold every expert, and that no rank needs two copies of an expert.

    Raises:
        SettingsError: there are too few or too many slots.
    """
    if not 1 <= num_experts <= MAX_EXPERTS or num_ranks < 1:
        raise SettingsError(f"{num_experts} experts on {num_ranks} ranks: there must be at least one of both")
    if not num_experts <= num_slots <= num_experts * num_ranks:
        raise SettingsError(
            f"{num_experts} experts on {num_ranks} ranks need from {num_experts} slots (one copy each) to "
            f"{num_experts * num_ranks} (a copy on every rank), not {num_slots}"
        )


def read_loads(path: Path, *, num_layers: int, num_experts: int) -> tuple[tuple[float, ...], ...]:
    """Read expert loads from a file such as {"loads": [[5, 1, 0, 2], [3, 3, 1, 1]]}, or from recorded load windows.

    Args:
        path: a JSON file with one list of loads per MoE layer, or with a single list for all layers; or a .jsonl file
            written by `expert_load_file`, whose windows are added up.
        num_layers: number of MoE layers of the model.
        num_experts: number of logical experts of each layer.

    Returns:
        The loads by layer and by logical expert.

    Raises:
        SettingsError: the file cannot be read, or its loads do not fit this model.
    """
    loads: tuple[tuple[float, ...], ...]
    try:
        if path.suffix == ".jsonl":
            loads = summed(read_windows(path)).tokens_of_expert
        else:
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
                f"{path}: loads[{layer}] has {len(of_layer)} experts; the model has {num_experts} in each layer"
            )
    return loads if len(loads) == num_layers else loads * num_layers


def copies_in_turn(placement: Placement, rank: int, node_of_rank: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return, for each logical expert, the copies to which a rank sends its tokens in turn.

    With c copies and n ranks, each rank has c turns, and each copy is used in n turns of all ranks. So all copies get
    the same work if all ranks have the same number of tokens. Turns use copies on the rank's own node first. All ranks
    of a node are treated alike, so that a rank with many tokens does not compute all its tokens itself.

    Args:
        rank: the sending rank.
        node_of_rank: the node of each rank.

    Returns:
        Physical experts by logical expert and turn.
    """
    assert len(node_of_rank) == placement.num_ranks
    node_of_physical = [node for node, size in zip(node_of_rank, placement.num_slots, strict=True) for _ in range(size)]
    turns: list[tuple[int, ...]] = []
    for copies in placement.physical_of_logical:
        room = dict.fromkeys(copies, placement.num_ranks)  # turns left for each copy
        given: list[list[int]] = [[] for _ in node_of_rank]
        for is_near in (True, False):
            for node, own in zip(node_of_rank, given, strict=True):
                usable = [copy for copy in copies if not is_near or node_of_physical[copy] == node]
                while len(own) < len(copies) and any(room[copy] for copy in usable):
                    copy = max(usable, key=room.__getitem__)
                    own.append(copy)
                    room[copy] -= 1
        turns.append(tuple(given[rank]))
    return tuple(turns)


def write_placements(path: Path, placements: Sequence[Placement]) -> None:
    """Write the placement of each MoE layer, for `read_placements`.

    Raises:
        SettingsError: the file cannot be written.
    """
    content = _PlacementsJson(tuple(_PlacementJson(each.num_logical, each.logical_of_slot) for each in placements))
    try:
        path.write_bytes(msgspec.json.encode(content) + b"\n")
    except OSError as error:
        raise SettingsError(f"cannot write the placements to {path}: {error.strerror}") from None


def read_placements(
    path: Path, *, num_layers: int, num_experts: int, num_ranks: int, num_redundant: int
) -> tuple[Placement, ...]:
    """Read the file of `write_placements`: a placement for each MoE layer.

    Raises:
        SettingsError: the file cannot be read, or its placements do not fit this model, its ranks or its slots.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_PlacementsJson).placements
    except OSError as error:
        raise SettingsError(f"cannot read the placements in {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path} does not hold placements of experts: {error}") from None
    if len(found) != num_layers:
        raise SettingsError(
            f"{path} holds placements of {len(found)} layers; the model has {num_layers} layers with experts"
        )
    sizes = share_sizes(num_experts + num_redundant, num_ranks)
    for number, each in enumerate(found):
        found_sizes = tuple(map(len, each.logical_of_slot))
        fault = _fault(each.logical_of_slot, num_experts)
        if fault is None and found_sizes != sizes:
            fault = (
                f"its {len(found_sizes)} ranks have {sum(found_sizes)} slots; use num_redundant_experts="
                f"{sum(found_sizes) - num_experts} and {len(found_sizes)} ranks"
            )
        if fault is not None:
            raise SettingsError(f"{path}: placements[{number}]: {fault}")
    return tuple(Placement(each.logical_of_slot, num_experts) for each in found)


_ExpertId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_EXPERTS)]
_Load = Annotated[float, msgspec.Meta(ge=0, le=MAX_LOAD)]


class _PlacementJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_logical: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERTS)]
    logical_of_slot: tuple[tuple[_ExpertId, ...], ...]


class _PlacementsJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    placements: tuple[_PlacementJson, ...]


class _LoadsJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    loads: tuple[tuple[_Load, ...], ...]


def _fault(logical_of_slot: Sequence[Sequence[int]], num_logical: int) -> str | None:
    """Return a description of the error in a placement; None if it is valid."""
    placed = set(itertools.chain.from_iterable(logical_of_slot))
    for expert in range(num_logical):
        if expert not in placed:
            return f"no slot holds expert {expert} of {num_logical}"
    if len(placed) > num_logical:
        return f"a slot holds expert {max(placed)}, but there are {num_logical}, counted from 0"
    return None
