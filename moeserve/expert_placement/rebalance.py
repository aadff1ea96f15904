"""Moves experts between ranks while the engine runs: plans, sends weights piece by piece, and switches placements.

A layer keeps its old placement until every rank holds the weights of the new one.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeserve.distributed.coordinator import PendingTensor
from moeserve.distributed.groups import Groups
from moeserve.expert_placement.eplb import Move, moves
from moeserve.expert_placement.gain import Proposal, add_window, excess_rows, is_worth_it, propose
from moeserve.expert_placement.placement import Placement
from moeserve.telemetry.expert_load import LoadWindow

SHARE_OF_A_STEP = 0.1  # the most that sending may take
INITIAL_BYTES_PER_SECOND = 1e9  # assumed until a transfer was measured
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2**16, 2**24  # limits of what a rank sends or receives in a step
PIECE_ALIGNMENT = 64
FEMTOSECONDS = 10**15


class PlacedExperts(Protocol):
    """The expert weights of one rank, as the rebalancer needs them."""

    @property
    def memory_of_each(self) -> list[Tensor]:
        """[e, bytes] uint8 each, together all weights of the e local experts."""
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
        """Use another placement with the same slots, whose weights are in them already."""
        ...


@dataclass(frozen=True)
class Change:
    """The next placement of a layer, and the moves that lead to it (at least one)."""

    layer: int
    proposal: Proposal
    moves: tuple[Move, ...]  # by receiving rank and slot

    @property
    def max_moves_of_rank(self) -> int:
        """The most moves that one rank sends or that one rank receives."""
        senders = Counter(move.from_rank for move in self.moves)
        receivers = Counter(move.to_rank for move in self.moves)
        return max(*senders.values(), *receivers.values())


@dataclass(frozen=True)
class Piece:
    """The bytes [start, start + size) of each expert of a change, in flight during one step."""

    change: Change
    start: int
    size: int
    pending: PendingTensor
    sent: Tensor  # kept alive until it has arrived
    seconds: float  # spent on starting the transfer


def spare_bytes(layers: Mapping[int, PlacedLayer]) -> int:
    """Return the memory that a rebalancer of these layers reserves."""
    num_slots, num_bytes = _spare_shape(layers)
    return num_slots * num_bytes + MAX_PIECE_BYTES


def _spare_shape(layers: Mapping[int, PlacedLayer]) -> tuple[int, int]:
    return max(len(layer.local_experts) for layer in layers.values()), max(map(_slot_bytes, layers.values()))


def _slot_bytes(layer: PlacedLayer) -> int:
    return sum(memory.shape[1] for memory in layer.experts.memory_of_each)


class Rebalancer:
    """One rank's part of rebalancing. All ranks of a pipeline stage call the same methods in the same steps.

    Each stage rebalances its own layers, independently of the others.
    """

    def __init__(self, layers: Mapping[int, PlacedLayer], groups: Groups, horizon: int) -> None:
        """
        Args:
            layers: those of this stage with experts, by their index in the model; at least one. Their weights are
                loaded and packed.
            horizon: steps within which a new placement must save more time than it costs.
        """
        self.epoch = 0  # epoch of the placement in use: the number of switched layers
        # The weights of the first change have arrived: `switch` is due before the next step. So it is on all ranks.
        self.must_switch = False
        self._layers = layers
        self._groups = groups
        self._horizon = horizon
        self._rank = groups.stage.rank_in_group
        self._memory = {index: layer.experts.memory_of_each for index, layer in layers.items()}
        self._slot_bytes = {index: _slot_bytes(layer) for index, layer in layers.items()}
        self._spare = torch.empty(*_spare_shape(layers), dtype=torch.uint8)
        self._outgoing = torch.empty(MAX_PIECE_BYTES, dtype=torch.uint8)
        for layer in layers.values():  # makes graphs look up copies in tables, which can change
            layer.place(layer.placement)
        self._loads = {index: [0.0] * layer.placement.num_logical for index, layer in layers.items()}
        self._window: LoadWindow | None = None  # the basis of the current plans
        self._unplanned: deque[int] = deque()  # layers still to plan
        self._planned: list[Change] = []  # not yet accepted or rejected
        self._excess_of_model = 0.0  # rows, over all layers
        self._changes: deque[Change] = deque()  # accepted; the first one is in progress
        self._num_arrived = 0  # bytes of each expert of the first change
        self._seconds_per_byte = 1 / INITIAL_BYTES_PER_SECOND  # on the slowest rank
        self._own_seconds_per_byte = self._seconds_per_byte
        self._step_seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """True while plans are made or experts are moved."""
        return bool(self._changes or self._unplanned)

    def own_figures(self) -> list[int]:
        """Return the measurements of this rank that `consider` needs from all ranks."""
        return [round(self._own_seconds_per_byte * FEMTOSECONDS)]

    def consider(self, window: LoadWindow, figures_of_rank: Sequence[Sequence[int]]) -> None:
        """Add a window to the loads, and start to plan if nothing is in progress.

        Args:
            window: the newest one of this stage's layers, the same on all its ranks.
            figures_of_rank: by rank of the stage, its `own_figures`.
        """
        for layer, counts in zip(window.layers, window.tokens_of_expert, strict=True):
            self._loads[layer] = add_window(self._loads[layer], counts)
        if self.is_busy or not window.num_steps:
            return
        self._window = window
        self._seconds_per_byte = max(figures[0] for figures in figures_of_rank) / FEMTOSECONDS
        self._step_seconds = window.seconds / window.num_steps
        self._unplanned = deque(self._layers)
        self._excess_of_model = 0.0

    @property
    def next_layer(self) -> int:
        """The layer that `switch` changes."""
        return self._changes[0].layer

    def switch(self) -> None:
        """Use the new placement of the layer whose weights have arrived on all ranks."""
        change = self._changes.popleft()
        for index, move in enumerate(self._incoming(change)):
            start = 0
            for memory in self._memory[change.layer]:
                size = memory.shape[1]
                memory[move.slot] = self._spare[index, start : start + size]
                start += size
        self._layers[change.layer].place(change.proposal.placement)
        self._num_arrived = 0
        self.must_switch = False
        self.epoch += 1

    def begin_step(self) -> Piece | None:
        """Start to move a piece, if there is one, and return it for `finish_step`. Collective: all ranks of a stage."""
        if not self._changes or self.must_switch:
            return None
        change = self._changes[0]
        started = time.perf_counter()
        size = self._piece_size(change)
        outgoing = [move for move in change.moves if move.from_rank == self._rank]
        own_experts = self._layers[change.layer].local_experts
        sent = self._outgoing[: size * len(outgoing)]
        for part, move in zip(sent.view(len(outgoing), size), outgoing, strict=True):
            self._copy_part(change.layer, own_experts.index(move.expert), self._num_arrived, part)
        ranks = range(self._groups.stage.world_size)
        send_sizes = [size * sum(move.to_rank == rank for move in outgoing) for rank in ranks]
        receive_sizes = [size * sum(move.from_rank == rank for move in self._incoming(change)) for rank in ranks]
        # collective: all ranks of the stage
        pending = self._groups.stage.all_to_all(sent, send_sizes, receive_sizes)
        if not self._groups.stage.progresses_in_background:
            pending.wait()  # the collectives of the step would queue behind it
        return Piece(change, self._num_arrived, size, pending, sent, time.perf_counter() - started)

    def finish_step(self, piece: Piece | None) -> None:
        """Store the piece of this step; without one, plan the next layer if plans are being made."""
        if piece is not None:
            self._receive(piece)
        elif self._unplanned:
            self._plan(self._unplanned.popleft())
            if not self._unplanned:
                self._decide()

    def _piece_size(self, change: Change) -> int:
        """Return the bytes of each expert to move in this step."""
        budget = max(MIN_PIECE_BYTES, SHARE_OF_A_STEP * self._step_seconds / self._seconds_per_byte)
        size = int(min(budget, MAX_PIECE_BYTES)) // change.max_moves_of_rank
        size = max(size // PIECE_ALIGNMENT * PIECE_ALIGNMENT, PIECE_ALIGNMENT)
        return min(size, self._slot_bytes[change.layer] - self._num_arrived)

    def _receive(self, piece: Piece) -> None:
        started = time.perf_counter()
        received = piece.pending.wait()
        experts = received.view(-1, piece.size)
        self._spare[: len(experts), piece.start : piece.start + piece.size] = experts
        seconds = piece.seconds + time.perf_counter() - started
        if num_bytes := max(len(piece.sent), len(received)):
            self._own_seconds_per_byte = seconds / num_bytes
        self._num_arrived = piece.start + piece.size
        if self._num_arrived == self._slot_bytes[piece.change.layer]:
            self.must_switch = True

    def _plan(self, layer: int) -> None:
        before, loads = self._layers[layer].placement, self._loads[layer]
        self._excess_of_model += excess_rows(loads, before)
        if proposal := propose(loads, before):
            node_of_rank = self._groups.stage.node_of_rank
            self._planned.append(Change(layer, proposal, moves(before, proposal.placement, node_of_rank)))

    def _decide(self) -> None:
        """Accept the planned changes that save more time than they cost, and drop the others."""
        window, self._window = self._window, None
        planned, self._planned = self._planned, []
        assert window is not None
        waited_s = window.straggler_seconds / window.num_steps * self._horizon
        self._changes.extend(
            change
            for change in planned
            if is_worth_it(
                change.proposal,
                excess_of_model=self._excess_of_model,
                waited_s=waited_s,
                cost_s=self._cost_seconds(change),
            )
        )

    def _cost_seconds(self, change: Change) -> float:
        """Return the time that a change takes: each byte is sent, and copied once more at the switch."""
        return 2 * change.max_moves_of_rank * self._slot_bytes[change.layer] * self._seconds_per_byte

    def _incoming(self, change: Change) -> list[Move]:
        """Return the moves to this rank in order of arrival, which is also their order in the spare memory."""
        own = [move for move in change.moves if move.to_rank == self._rank]
        return sorted(own, key=lambda move: (move.from_rank, move.slot))

    def _copy_part(self, layer: int, slot: int, start: int, part: Tensor) -> None:
        """Fill `part` with a slot's bytes from `start` on, as if all its weights were one after the other."""
        first = 0
        for memory in self._memory[layer]:
            last = first + memory.shape[1]
            begin, end = max(start, first), min(start + len(part), last)
            if begin < end:
                part[begin - start : end - start] = memory[slot, begin - first : end - first]
            first = last
