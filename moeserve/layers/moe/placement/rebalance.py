"""Moves experts between ranks while the engine runs: plans changes, sends weights in pieces, switches placements.

A layer keeps its old placement until every rank holds the weights of the new one.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeserve.distributed.coordinator import PendingTensor
from moeserve.distributed.groups import Groups
from moeserve.layers.moe.placement.eplb import Move, moves, rank_loads
from moeserve.layers.moe.placement.gain import Proposal, add_window, excess_rows, is_worth_it, propose
from moeserve.layers.moe.placement.placement import Placement
from moeserve.ops.side_stream import InlineStream, Pending, SideStream
from moeserve.telemetry.expert_load import LoadWindow

SHARE_OF_A_STEP = 0.1  # maximum fraction of a step that sending may take
SHARE_OF_EXPERTS = 0.5  # assumed fraction of a step on GPUs, where waiting is not measured
INITIAL_BYTES_PER_SECOND = 1e9  # assumed until a transfer has been measured
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2**16, 2**24  # bytes that a rank sends or receives in a step
PIECE_ALIGNMENT = 64
FEMTOSECONDS = 10**15


class PlacedExperts(Protocol):
    """The expert weights of one rank, in the form that the rebalancer needs."""

    @property
    def memory_of_each(self) -> list[Tensor]:
        """Tensors [e, bytes] uint8 that together are all weights of the e local experts."""
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
        """Switch to a placement with the same numbers of slots. All weights must be in their new slots already."""
        ...


@dataclass(frozen=True)
class Change:
    """The next placement of a layer, and the moves that lead to it (at least one)."""

    layer: int
    proposal: Proposal
    moves: tuple[Move, ...]  # ordered by receiving rank and slot

    @property
    def max_moves_of_rank(self) -> int:
        """The maximum number of moves that any rank sends or receives."""
        senders = Counter(move.from_rank for move in self.moves)
        receivers = Counter(move.to_rank for move in self.moves)
        return max(*senders.values(), *receivers.values())


@dataclass(frozen=True)
class Piece:
    """The bytes [start, start + size) of each moved expert of a change, in flight during one step."""

    change: Change
    start: int
    size: int
    pending: PendingTensor
    sent: Tensor  # kept alive until the transfer has completed


def spare_bytes(layers: Mapping[int, PlacedLayer]) -> int:
    """Return the size in bytes of the memory that a rebalancer of `layers` reserves."""
    num_slots, num_bytes = _spare_shape(layers)
    return num_slots * num_bytes + 2 * MAX_PIECE_BYTES  # one piece sent and one received


def _spare_shape(layers: Mapping[int, PlacedLayer]) -> tuple[int, int]:
    return max(len(layer.local_experts) for layer in layers.values()), max(map(_slot_bytes, layers.values()))


def _slot_bytes(layer: PlacedLayer) -> int:
    return sum(memory.shape[1] for memory in layer.experts.memory_of_each)


class HostClock:
    """Measures the host's time between `start` and `stop`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._started

    def take_seconds(self) -> float | None:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class DeviceClock:
    """Measures the current stream's time between `start` and `stop`, with events. The host never waits."""

    def __init__(self) -> None:
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        self._first.record()

    def stop(self) -> None:
        self._last.record()

    def take_seconds(self) -> float | None:
        """Return the seconds, or None if the stream has not reached `stop` yet."""
        return self._first.elapsed_time(self._last) / 1e3 if self._last.query() else None


class Rebalancer:
    """One rank's part of rebalancing. All ranks of a pipeline stage call the same methods in the same steps.

    Each stage rebalances its own layers, independently of the other stages.

    On a GPU the host never waits. Pieces of experts are sent on the main stream between two steps, because collectives
    need the same order on all ranks. A side stream stores received pieces in spare memory, and a switch waits for this
    stream. The switch writes weights and tables on the main stream, after the last step with the old placement and
    before the first step or graph replay with the new placement.
    """

    def __init__(
        self,
        layers: Mapping[int, PlacedLayer],
        groups: Groups,
        horizon: int,
        side_stream: SideStream | None = None,
    ) -> None:
        """
        Args:
            layers: the MoE layers of this stage, by their index in the model; at least one. The weights of all layers
                are loaded and packed.
            horizon: number of steps within which a new placement must save more time than it costs.
            side_stream: a side stream of the GPU that holds the experts; None: the experts are on the CPU.
        """
        self._is_on_gpu = side_stream is not None
        self._side_stream = InlineStream() if side_stream is None else side_stream
        self._clock = HostClock() if side_stream is None else DeviceClock()
        self._storing: Pending | None = None  # the last piece, which the side stream stores
        self._timed_bytes = 0  # bytes of the piece that the clock measures
        self.epoch = 0  # epoch of the placement in use: the number of switched layers
        # True if the weights of the first change have arrived, so that `switch` is due before the next step. Equal on
        # all ranks.
        self.must_switch = False
        self._layers = layers
        self._groups = groups
        self._horizon = horizon
        self._rank = groups.stage.rank_in_group
        self._memory = {index: layer.experts.memory_of_each for index, layer in layers.items()}
        self._slot_bytes = {index: _slot_bytes(layer) for index, layer in layers.items()}
        device = next(iter(self._memory.values()))[0].device
        self._spare = torch.empty(*_spare_shape(layers), dtype=torch.uint8, device=device)
        self._outgoing = torch.empty(MAX_PIECE_BYTES, dtype=torch.uint8, device=device)
        for layer in layers.values():  # so that graphs read copies from tables, which can change
            layer.place(layer.placement)
        self._loads = {index: [0.0] * layer.placement.num_logical for index, layer in layers.items()}
        self._window: LoadWindow | None = None  # the window that the current plans are based on
        self._unplanned: deque[int] = deque()  # layers still to plan
        self._planned: list[Change] = []  # changes that are neither accepted nor rejected yet
        self._excess_of_model = 0.0  # rows of each layer's fullest rank above the mean, over all layers
        self._rows_of_fullest = 0.0  # rows of each layer's fullest rank, over all layers
        self._changes: deque[Change] = deque()  # accepted changes; the first is in progress
        self._num_arrived = 0  # bytes of each expert of the first change that have arrived
        self._seconds_per_byte = 1 / INITIAL_BYTES_PER_SECOND  # time to send a byte on the slowest rank
        self._own_seconds_per_byte = self._seconds_per_byte
        self._step_seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """True while changes are planned or experts are moved."""
        return bool(self._changes or self._unplanned)

    def drop_changes(self) -> None:
        """Drop all changes that are planned or in progress. Layers keep their placements."""
        self._wait_for_side_stream()
        self._window = None
        self._unplanned.clear()
        self._planned.clear()
        self._changes.clear()
        self._num_arrived = 0
        self.must_switch = False

    def own_figures(self) -> list[int]:
        """Return this rank's measured time to send a byte, [femtoseconds]. `consider` needs it from all ranks."""
        if self._timed_bytes and (seconds := self._clock.take_seconds()) is not None:
            self._own_seconds_per_byte, self._timed_bytes = seconds / self._timed_bytes, 0
        return [round(self._own_seconds_per_byte * FEMTOSECONDS)]

    def consider(self, window: LoadWindow, figures_of_rank: Sequence[Sequence[int]]) -> None:
        """Add a window to the loads, and start planning if no change is in progress.

        Args:
            window: the latest window of this stage's layers, the same on all ranks of the stage.
            figures_of_rank: the `own_figures` of each rank of the stage.
        """
        for layer, counts in zip(window.layers, window.tokens_of_expert, strict=True):
            self._loads[layer] = add_window(self._loads[layer], counts)
        if self.is_busy or not window.num_steps:
            return
        self._window = window
        self._seconds_per_byte = max(figures[0] for figures in figures_of_rank) / FEMTOSECONDS
        self._step_seconds = window.seconds / window.num_steps
        self._unplanned = deque(self._layers)
        self._excess_of_model = self._rows_of_fullest = 0.0

    @property
    def next_layer(self) -> int:
        """The layer that `switch` will change."""
        return self._changes[0].layer

    def switch(self) -> None:
        """Switch `next_layer` to its new placement. All ranks must have received the weights of this placement."""
        change = self._changes.popleft()
        self._wait_for_side_stream()
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
        """Begin to send a piece of the change in progress, and return it for `finish_step`; None: nothing is to send.

        Collective: all ranks of a stage.
        """
        if not self._changes or self.must_switch:
            return None
        change = self._changes[0]
        self._wait_for_side_stream()
        self._clock.start()
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
        if self._is_on_gpu or not self._groups.stage.progresses_in_background:
            pending.wait()  # otherwise the collectives of the step would queue behind this collective
        self._clock.stop()
        return Piece(change, self._num_arrived, size, pending, sent)

    def finish_step(self, piece: Piece | None) -> None:
        """Store the piece of this step. Without a piece, plan the next layer if there is one to plan."""
        if piece is not None:
            self._receive(piece)
        elif self._unplanned:
            self._plan(self._unplanned.popleft())
            if not self._unplanned:
                self._decide()

    def _piece_size(self, change: Change) -> int:
        """Return the number of bytes of each expert to send in this step."""
        budget = max(MIN_PIECE_BYTES, SHARE_OF_A_STEP * self._step_seconds / self._seconds_per_byte)
        size = int(min(budget, MAX_PIECE_BYTES)) // change.max_moves_of_rank
        size = max(size // PIECE_ALIGNMENT * PIECE_ALIGNMENT, PIECE_ALIGNMENT)
        return min(size, self._slot_bytes[change.layer] - self._num_arrived)

    def _receive(self, piece: Piece) -> None:
        if not self._is_on_gpu:
            self._clock.start()
        received = piece.pending.wait()
        self._storing = self._side_stream.start(functools.partial(self._store, piece), received)
        if not self._is_on_gpu:
            self._clock.stop()
        self._timed_bytes = max(len(piece.sent), len(received))
        self._num_arrived = piece.start + piece.size
        if self._num_arrived == self._slot_bytes[piece.change.layer]:
            self.must_switch = True

    def _store(self, piece: Piece, received: Tensor) -> Tensor:
        """Store a piece, and return it: its memory must stay alive until the side stream has been waited for."""
        experts = received.view(-1, piece.size)
        self._spare[: len(experts), piece.start : piece.start + piece.size] = experts
        return received

    def _wait_for_side_stream(self) -> None:
        if self._storing is not None:
            self._storing.wait()
            self._storing = None

    def _plan(self, layer: int) -> None:
        before, loads = self._layers[layer].placement, self._loads[layer]
        self._excess_of_model += excess_rows(loads, before)
        self._rows_of_fullest += max(rank_loads(loads, before))
        if proposal := propose(loads, before):
            node_of_rank = self._groups.stage.node_of_rank
            self._planned.append(Change(layer, proposal, moves(before, proposal.placement, node_of_rank)))

    def _decide(self) -> None:
        """Accept the planned changes that save more time than they cost, and drop the others."""
        window, self._window = self._window, None
        planned, self._planned = self._planned, []
        assert window is not None
        waited_s = window.straggler_seconds / window.num_steps * self._horizon
        if self._is_on_gpu and self._rows_of_fullest:
            share_of_waits = SHARE_OF_EXPERTS * self._excess_of_model / self._rows_of_fullest
            waited_s = share_of_waits * self._step_seconds * self._horizon
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
        """Return the time that a change takes: each byte is sent once, and copied once more at the switch."""
        return 2 * change.max_moves_of_rank * self._slot_bytes[change.layer] * self._seconds_per_byte

    def _incoming(self, change: Change) -> list[Move]:
        """Return the moves to this rank in order of arrival, which is their order in the spare memory."""
        own = [move for move in change.moves if move.to_rank == self._rank]
        return sorted(own, key=lambda move: (move.from_rank, move.slot))

    def _copy_part(self, layer: int, slot: int, start: int, part: Tensor) -> None:
        """Fill `part` with a slot's bytes from `start` on, as if the slot's weights were consecutive in memory."""
        first = 0
        for memory in self._memory[layer]:
            last = first + memory.shape[1]
            begin, end = max(start, first), min(start + len(part), last)
            if begin < end:
                part[begin - start : end - start] = memory[slot, begin - first : end - first]
            first = last
