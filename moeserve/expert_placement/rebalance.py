"""Moves experts between ranks while they serve, layer by layer: between steps, a bounded part of each step's time.

Every rank does the same, since it decides by figures that all ranks have: the windows that were collected from all of
them, and the number of steps executed since. So nothing has to be told but the experts' weights themselves. These go
directly from rank to rank into memory that was set aside; the old placement serves meanwhile, and goes on if nothing
comes of the new one. A layer is switched where all replicas have agreed that everyone holds the new one's weights.

Knows layers and their placements; what a good placement is, `balancer.py` knows.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeserve.distributed.group import Groups, PendingTensor
from moeserve.expert_placement.eplb import Move, moves
from moeserve.expert_placement.gain import Proposal, excess, pays, propose, remembered
from moeserve.expert_placement.placement import Placement
from moeserve.telemetry.expert_load import LoadWindow


class PlacedExperts(Protocol):
    """The experts of one rank, as the rebalancer needs them."""

    @property
    def memory_of_each(self) -> list[Tensor]:
        """[e, bytes] uint8 each, together all weights of an expert."""
        ...


class PlacedLayer(Protocol):
    """A layer whose experts can move between ranks."""

    @property
    def placement(self) -> Placement: ...

    @property
    def local_experts(self) -> tuple[int, ...]: ...

    @property
    def experts(self) -> PlacedExperts: ...

    def place(self, placement: Placement) -> None:
        """Use another placement with the same slots. The weights are in place already."""
        ...


SHARE_OF_A_STEP = 0.1  # that moving may take
FIRST_BYTES_PER_SECOND = 1e9  # until the first were moved
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 2**16, 2**24  # of what a rank sends or gets in a step
PIECE_ALIGNMENT = 64


@dataclass(frozen=True)
class Change:
    """A layer's next placement, and what has to be moved for it, which is something."""

    layer: int
    proposal: Proposal
    moves: tuple[Move, ...]  # by rank that they go to and slot
    source_slots: tuple[int, ...]  # of each move: where its expert is, on the rank that it comes from

    @classmethod
    def between(cls, layer: int, before: Placement, proposal: Proposal, node_of_rank: Sequence[int]) -> Change:
        found = moves(before, proposal.after, node_of_rank)
        source_slots = tuple(before.logical_of_slot[move.from_rank].index(move.expert) for move in found)
        return cls(layer, proposal, found, source_slots)

    @property
    def most_at_once(self) -> int:
        """Moves from one rank, or to one."""
        senders = Counter(move.from_rank for move in self.moves)
        receivers = Counter(move.to_rank for move in self.moves)
        return max(*senders.values(), *receivers.values())


@dataclass(frozen=True)
class Piece:
    """So many bytes of each expert of a change, under way in one step."""

    change: Change
    start: int
    size: int
    pending: PendingTensor
    sent: Tensor  # not to be freed before it has arrived
    seconds: float  # that it took to begin


def spare_bytes(layers: Mapping[int, PlacedLayer]) -> int:
    """Memory that a rebalancer of these layers sets aside."""
    num_slots, num_bytes = _spare_shape(layers)
    return num_slots * num_bytes + MOST_PIECE_BYTES


def _spare_shape(layers: Mapping[int, PlacedLayer]) -> tuple[int, int]:
    """For each slot of this rank in one layer, its bytes."""
    return max(len(layer.local_experts) for layer in layers.values()), max(map(_slot_bytes, layers.values()))


def _slot_bytes(layer: PlacedLayer) -> int:
    return sum(memory.shape[1] for memory in layer.experts.memory_of_each)


class Rebalancer:
    """One rank's side. All ranks call the same methods in the same steps."""

    def __init__(self, layers: Mapping[int, PlacedLayer], groups: Groups, horizon: int) -> None:
        """
        Args:
            layers: those with experts, by their number in the model. Their weights are final.
            horizon: steps in which a new placement must gain more time than it costs.
        """
        self.epoch = 0  # of the placement in use: layers switched so far
        self.held_epoch = 0  # of the newest whose weights are all here
        self.bytes_moved = 0  # from all ranks to others
        self._layers = layers
        self._groups = groups
        self._horizon = horizon
        self._rank = groups.world.rank_in_group
        self._memory = {number: layer.experts.memory_of_each for number, layer in layers.items()}
        self._slot_bytes = {number: _slot_bytes(layer) for number, layer in layers.items()}
        self._spare = torch.empty(*_spare_shape(layers), dtype=torch.uint8)
        self._outgoing = torch.empty(MOST_PIECE_BYTES, dtype=torch.uint8)
        for layer in layers.values():  # from now on copies are looked up in tables that can change, on graphs too
            layer.place(layer.placement)
        self._loads = {number: [0.0] * layer.placement.num_logical for number, layer in layers.items()}
        self._window: LoadWindow | None = None  # by which plans are being made
        self._unplanned: deque[int] = deque()  # layers
        self._planned: list[Change] = []  # of which it is not decided yet whether they are worth it
        self._excess = 0.0  # rows that fullest ranks have above the mean, over all layers
        self._changes: deque[Change] = deque()  # to be made; the first is under way
        self._num_arrived = 0  # bytes of each of its experts
        self._seconds_per_byte = 1 / FIRST_BYTES_PER_SECOND  # the slowest rank's
        self._own_seconds_per_byte = self._seconds_per_byte
        self._step_seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether experts are on their way, or plans are made."""
        return bool(self._changes or self._unplanned)

    def own_figures(self) -> list[int]:
        """What the others must know of this rank, to be handed to `consider` of all ranks."""
        return [round(self._own_seconds_per_byte * 1e15)]

    def consider(self, window: LoadWindow, figures_of_rank: Sequence[Sequence[int]]) -> None:
        """Begins to plan, if nothing is under way.

        Args:
            window: the newest, the same on all ranks.
            figures_of_rank: by rank: its `own_figures`.
        """
        for number, counts in zip(window.layers, window.tokens_of_expert, strict=True):
            self._loads[number] = remembered(self._loads[number], counts)
        if self.is_busy or not window.num_steps:
            return
        self._window = window
        self._seconds_per_byte = max(figures[0] for figures in figures_of_rank) / 1e15
        self._step_seconds = window.seconds / window.num_steps
        self._unplanned = deque(self._layers)
        self._excess = 0.0

    def may_switch(self, agreed_epoch: int) -> bool:
        """Whether all hold the weights of a newer placement than the one in use."""
        assert agreed_epoch <= self.held_epoch, (agreed_epoch, self.held_epoch)
        return agreed_epoch > self.epoch

    @property
    def next_layer(self) -> int:
        """The layer that `switch` is about."""
        return self._changes[0].layer

    def switch(self) -> None:
        """The layer whose weights have arrived everywhere is served by its new placement from now on."""
        change = self._changes.popleft()
        for number, move in enumerate(self._incoming(change)):
            start = 0
            for of_slots in self._memory[change.layer]:
                size = of_slots.shape[1]
                of_slots[move.slot] = self._spare[number, start : start + size]
                start += size
        self._layers[change.layer].place(change.proposal.after)
        self._num_arrived = 0
        self.epoch += 1

    def begin_step(self) -> Piece | None:
        """Collective, where something is to be moved: all ranks. What it returns is to be given to `finish_step`."""
        if not self._changes or self.held_epoch > self.epoch:  # the first one only waits to be switched
            return None
        change = self._changes[0]
        began = time.perf_counter()
        slot_bytes = self._slot_bytes[change.layer]
        budget = max(LEAST_PIECE_BYTES, SHARE_OF_A_STEP * self._step_seconds / self._seconds_per_byte)
        size = int(min(budget, MOST_PIECE_BYTES)) // change.most_at_once // PIECE_ALIGNMENT * PIECE_ALIGNMENT
        size = min(max(size, PIECE_ALIGNMENT), slot_bytes - self._num_arrived)
        ranks = range(self._groups.world.world_size)
        outgoing = [
            (move, slot)
            for move, slot in zip(change.moves, change.source_slots, strict=True)
            if move.from_rank == self._rank
        ]
        sent = self._outgoing[: size * len(outgoing)]
        for of_slot, (_, slot) in zip(sent.view(len(outgoing), size), outgoing, strict=True):
            self._copy_part(change.layer, slot, self._num_arrived, of_slot)
        send_sizes = [size * sum(move.to_rank == rank for move, _ in outgoing) for rank in ranks]
        receive_sizes = [size * sum(move.from_rank == rank for move in self._incoming(change)) for rank in ranks]
        # collective: all ranks
        pending = self._groups.world.all_to_all(sent, send_sizes, receive_sizes)
        return Piece(change, self._num_arrived, size, pending, sent, time.perf_counter() - began)

    def finish_step(self, piece: Piece | None) -> None:
        """Takes what has arrived; and plans a layer, where plans are made."""
        if piece is not None:
            began = time.perf_counter()
            received = piece.pending.wait()
            self._store(piece, received)
            seconds = piece.seconds + time.perf_counter() - began
            if num_bytes := max(len(piece.sent), len(received)):
                self._own_seconds_per_byte = seconds / num_bytes
            self.bytes_moved += piece.size * sum(move.from_rank != move.to_rank for move in piece.change.moves)
            self._num_arrived = piece.start + piece.size
            if self._num_arrived == self._slot_bytes[piece.change.layer]:
                self.held_epoch = self.epoch + 1
        elif self._unplanned:
            self._plan(self._unplanned.popleft())
            if not self._unplanned:
                self._decide()

    def _plan(self, layer: int) -> None:
        """A better placement of one layer, if there is one."""
        before, loads = self._layers[layer].placement, self._loads[layer]
        self._excess += excess(loads, before)
        if proposal := propose(loads, before):
            change = Change.between(layer, before, proposal, self._groups.world.node_of_rank)
            if change.moves:
                self._planned.append(change)

    def _decide(self) -> None:
        """Which of the planned changes are worth it. The others are forgotten."""
        window, self._window = self._window, None
        planned, self._planned = self._planned, []
        assert window is not None
        waited_s = window.straggler_seconds / window.num_steps * self._horizon
        self._changes.extend(
            change
            for change in planned
            if pays(change.proposal, all_excess=self._excess, waited_s=waited_s, cost_s=self._seconds(change))
        )

    def _seconds(self, change: Change) -> float:
        """That a change takes: each byte travels, and is copied once more at the switch."""
        return 2 * change.most_at_once * self._slot_bytes[change.layer] * self._seconds_per_byte

    def _incoming(self, change: Change) -> list[Move]:
        """By source, as they arrive; the place in this order is that in the spare memory."""
        own = [move for move in change.moves if move.to_rank == self._rank]
        return sorted(own, key=lambda move: (move.from_rank, move.slot))

    def _copy_part(self, layer: int, slot: int, start: int, part: Tensor) -> None:
        """Bytes of what a slot holds, from `start` on, as if all of its weights lay one after the other."""
        first = 0
        for memory in self._memory[layer]:
            last = first + memory.shape[1]
            begin, end = max(start, first), min(start + len(part), last)
            if begin < end:
                part[begin - start : end - start] = memory[slot, begin - first : end - first]
            first = last

    def _store(self, piece: Piece, received: Tensor) -> None:
        of_each = received.view(-1, piece.size)
        self._spare[: len(of_each), piece.start : piece.start + piece.size] = of_each
