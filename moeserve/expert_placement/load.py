"""Counts the rows of each expert on each rank, and gathers the counts of all ranks into load windows.

A layer counts with one operation on its device, without waiting for the result. All ranks gather their counts in one
collective, in steps on which all replicas have agreed. Padding goes to no expert, so it is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.distributed.groups import Groups
from moeserve.expert_placement.placement import Placement
from moeserve.layers.context import ModelContext
from moeserve.telemetry.expert_load import LoadWindow

# e local experts

NANOSECONDS = 10**9
NUM_FIXED = 2  # figures of each rank that are always gathered: bytes sent, nanoseconds of its steps


class ExpertLoad:
    """The rows that this rank's experts of one layer got since the counts were last gathered."""

    def __init__(self, placement: Placement, rank_in_group: int, context: ModelContext) -> None:
        self.placement = placement
        self.rows_e = torch.zeros(placement.num_slots[rank_in_group], dtype=torch.int64, device=context.device)
        self._pairs = context.kernels.pairs

    def count(self, counts_e: Tensor) -> None:
        """Add the rows of one step: [e] int64."""
        self._pairs.count(counts_e, self.rows_e)


@dataclass(frozen=True)
class Collected:
    """A gathered window; the same on all ranks."""

    window: LoadWindow
    figures_of_rank: tuple[tuple[int, ...], ...]  # by rank, the figures that it passed to `collect`


@dataclass(frozen=True)
class _LayerRows:
    of_rank: list[int]
    of_expert: list[int]

    def __add__(self, other: _LayerRows) -> _LayerRows:
        return _LayerRows(_sum(self.of_rank, other.of_rank), _sum(self.of_expert, other.of_expert))


class LoadMeter:
    """One rank's record of the steps since the counts were last gathered."""

    def __init__(self, load_of_layer: dict[int, ExpertLoad], groups: Groups) -> None:
        """
        Args:
            load_of_layer: by the index of the layer in the model, for layers with experts.
        """
        self._load_of_layer = load_of_layer
        self._groups = groups
        self._first_step = 0
        self._rows_before_switch: dict[int, _LayerRows] = {}  # by layer
        self._start_window()

    def add_step(self, num_tokens: Sequence[int], seconds: float, padded_to: int | None = None) -> None:
        """Count an executed step.

        Args:
            num_tokens: of each replica.
            seconds: that it took on this rank.
            padded_to: rows that each replica ran; None: as many as tokens.
        """
        self._num_steps += 1
        self._num_tokens += sum(num_tokens)
        self._num_padding_tokens += 0 if padded_to is None else sum(padded_to - count for count in num_tokens)
        self._num_idle_steps += sum(count == 0 for count in num_tokens)
        self._seconds += seconds

    def collect(self, placement_epoch: int, figures: Sequence[int] = ()) -> Collected | None:
        """Return the figures of all ranks since the last call, and start a new window. None: no layer has experts.

        Collective: all ranks.

        Args:
            placement_epoch: of the placement in use.
            figures: further figures to send to all ranks; equally many on each.
        """
        if not self._load_of_layer:
            return None
        ep = self._groups.ep
        waited = ep.seconds_waited()
        before = self._waited + [0.0] * (len(waited) - len(self._waited))
        waited_ns = [round((now - then) * NANOSECONDS) for now, then in zip(waited, before, strict=True)]
        own = [ep.num_bytes_sent - self._bytes, round(self._seconds * NANOSECONDS), *figures, *waited_ns]
        numbers_of_rank = self._gather(own, list(self._load_of_layer))
        first_wait = NUM_FIXED + len(figures)
        window = self._window(numbers_of_rank, first_wait, len(own), placement_epoch)
        self._first_step += self._num_steps
        self._rows_before_switch = {}
        self._start_window()
        return Collected(window, tuple(tuple(numbers[NUM_FIXED:first_wait]) for numbers in numbers_of_rank))

    def collect_layer(self, layer: int) -> None:
        """Gather a layer's counts before its slots get other experts. Collective: all ranks."""
        rows = self._rows(layer, self._gather([], [layer]))
        if layer in self._rows_before_switch:
            rows += self._rows_before_switch[layer]
        self._rows_before_switch[layer] = rows
        self._load_of_layer[layer].rows_e.zero_()

    def _gather(self, own: list[int], layers: Sequence[int]) -> list[list[int]]:
        """Return by rank: its `own` figures, equally many on each, and then the rows of its slots, layer by layer."""
        loads = [self._load_of_layer[layer] for layer in layers]
        mine = torch.cat([torch.tensor(own, dtype=torch.int64), *(load.rows_e.cpu() for load in loads)])
        sizes = [
            len(own) + sum(load.placement.num_slots[rank] for load in loads)
            for rank in range(self._groups.world.world_size)
        ]
        # collective: all ranks
        return [numbers.tolist() for numbers in self._groups.world.all_gather(mine, sizes).split(sizes)]

    def _rows(self, layer: int, rows_of_slots: Sequence[Sequence[int]]) -> _LayerRows:
        """Add up a layer's rows, which are given by rank and slot."""
        placement = self._load_of_layer[layer].placement
        of_expert = [0] * placement.num_logical
        for slots, rows in zip(placement.logical_of_slot, rows_of_slots, strict=True):
            for expert, count in zip(slots, rows, strict=True):
                of_expert[expert] += count
        return _LayerRows(list(map(sum, rows_of_slots)), of_expert)

    def _window(
        self, numbers_of_rank: Sequence[Sequence[int]], first_wait: int, first_row: int, placement_epoch: int
    ) -> LoadWindow:
        """Build the window. Each rank's numbers hold its waits from `first_wait` on, its rows from `first_row` on."""
        tokens_of_expert, tokens_of_rank = [], []
        starts = [first_row] * len(numbers_of_rank)
        for layer, load in self._load_of_layer.items():
            ends = _sum(starts, load.placement.num_slots)
            spans = zip(numbers_of_rank, starts, ends, strict=True)
            rows = self._rows(layer, [numbers[start:end] for numbers, start, end in spans])
            if layer in self._rows_before_switch:
                rows += self._rows_before_switch[layer]
            tokens_of_expert.append(tuple(rows.of_expert))
            tokens_of_rank.append(tuple(rows.of_rank))
            starts = ends
        # By exchange: another rank may be the fullest one in each layer.
        waits = zip(*(numbers[first_wait:first_row] for numbers in numbers_of_rank), strict=True)
        return LoadWindow(
            first_step=self._first_step,
            num_steps=self._num_steps,
            ended_at=time.time(),
            seconds=max(numbers[1] for numbers in numbers_of_rank) / NANOSECONDS,
            placement_epoch=placement_epoch,
            num_tokens=self._num_tokens,
            num_padding_tokens=self._num_padding_tokens,
            num_idle_steps=self._num_idle_steps,
            bytes_dispatched=sum(numbers[0] for numbers in numbers_of_rank),
            straggler_seconds=sum(sum(of_rank) / len(of_rank) - min(of_rank) for of_rank in waits) / NANOSECONDS,
            layers=tuple(self._load_of_layer),
            tokens_of_expert=tuple(tokens_of_expert),
            tokens_of_rank=tuple(tokens_of_rank),
            logical_of_slot=tuple(load.placement.logical_of_slot for load in self._load_of_layer.values()),
        )

    def _start_window(self) -> None:
        for load in self._load_of_layer.values():
            load.rows_e.zero_()
        self._num_steps = self._num_tokens = self._num_padding_tokens = self._num_idle_steps = 0
        self._seconds = 0.0
        self._waited = self._groups.ep.seconds_waited()
        self._bytes = self._groups.ep.num_bytes_sent


def _sum(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]
