"""How many rows each expert was given: counted where they arrive, and brought together from all ranks.

Counting is one operation in a layer, on its device and without a look at the result. The ranks' counts come together in
steps that all replicas have agreed on, in one collective. Padding goes to no expert, so it is in none of the figures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.distributed.group import Groups
from moeserve.expert_placement.placement import Placement
from moeserve.ops.pairs import choose_pairs
from moeserve.telemetry.expert_load import LoadWindow

# e local experts

NANOSECONDS = 10**9
NUM_OWN = 2  # figures that each rank tells in any case: bytes sent, nanoseconds of its steps


class ExpertLoad:
    """The rows that this rank's experts of one layer were given since they were last collected."""

    def __init__(self, placement: Placement, rank_in_group: int, device: torch.device) -> None:
        self.placement = placement
        self.rows_e = torch.zeros(placement.num_slots[rank_in_group], dtype=torch.int64, device=device)
        self._pairs = choose_pairs(device.type)

    def count(self, counts_e: Tensor) -> None:
        """Add one step's rows: [e] int64."""
        self._pairs.count(counts_e, self.rows_e)


@dataclass(frozen=True)
class Collected:
    """What all ranks have told; the same on all of them."""

    window: LoadWindow
    figures_of_rank: tuple[tuple[int, ...], ...]  # what each rank told besides


class LoadMeter:
    """What the steps since the last collection were, as one rank sees them."""

    def __init__(self, load_of_layer: dict[int, ExpertLoad], groups: Groups) -> None:
        """
        Args:
            load_of_layer: by the number of the model's layer; those without experts are left out.
        """
        self._load_of_layer = load_of_layer
        self._groups = groups
        self._first_step = 0
        self._held: dict[int, list[list[int]]] = {}  # see `hold`; by layer: rows by rank, and then by expert
        self._forget()

    def add_step(self, num_tokens: Sequence[int], seconds: float, padded_to: int | None = None) -> None:
        """Counts a step that was executed.

        Args:
            num_tokens: of each replica.
            seconds: that it took here.
            padded_to: rows that each replica ran; None: as many as tokens.
        """
        self._num_steps += 1
        self._num_tokens += sum(num_tokens)
        self._num_padding_tokens += 0 if padded_to is None else sum(padded_to - count for count in num_tokens)
        self._num_empty_turns += sum(count == 0 for count in num_tokens)
        self._seconds += seconds

    def collect(self, placement_epoch: int, figures: Sequence[int] = ()) -> Collected | None:
        """The figures of all ranks since the last time, and begins anew. None: the model has no experts.

        Collective: all ranks.

        Args:
            placement_epoch: of the placement in use.
            figures: what this rank tells the others besides; as many on each.
        """
        if not self._load_of_layer:
            return None
        groups, num_figures = self._groups, NUM_OWN + len(figures)
        waited = groups.ep.seconds_waited()
        before = self._waited + [0.0] * (len(waited) - len(self._waited))
        waited_ns = [round((now - then) * NANOSECONDS) for now, then in zip(waited, before, strict=True)]
        own = [groups.ep.num_bytes_sent - self._bytes, round(self._seconds * NANOSECONDS), *figures, *waited_ns]
        by_rank = self._gathered(own, list(self._load_of_layer))
        window = self._window(by_rank, num_figures, len(own), placement_epoch)
        self._first_step += self._num_steps
        self._held = {}
        self._forget()
        return Collected(window, tuple(tuple(numbers[NUM_OWN:num_figures]) for numbers in by_rank))

    def hold(self, layer: int) -> None:
        """Brings a layer's counts together before its slots get other experts. Collective: all ranks."""
        rows = self._rows(layer, self._gathered([], [layer]))
        held = self._held.get(layer)
        self._held[layer] = rows if held is None else _added(held, rows)
        self._load_of_layer[layer].rows_e.zero_()

    def _gathered(self, own: list[int], layers: Sequence[int]) -> list[list[int]]:
        """By rank: figures of its own, as many on each, and the rows of its slots, layer by layer."""
        loads = [self._load_of_layer[layer] for layer in layers]
        mine = torch.cat([torch.tensor(own, dtype=torch.int64), *(load.rows_e.cpu() for load in loads)])
        sizes = [
            len(own) + sum(load.placement.num_slots[rank] for load in loads)
            for rank in range(self._groups.world.world_size)
        ]
        # collective: all ranks
        return [numbers.tolist() for numbers in self._groups.world.all_gather(mine, sizes).split(sizes)]

    def _rows(self, layer: int, of_slots: Sequence[Sequence[int]]) -> list[list[int]]:
        """A layer's rows by rank, and by logical expert. `of_slots`: by rank, by slot."""
        placement = self._load_of_layer[layer].placement
        of_expert = [0] * placement.num_logical
        for slots, rows in zip(placement.logical_of_slot, of_slots, strict=True):
            for expert, count in zip(slots, rows, strict=True):
                of_expert[expert] += count
        return [list(map(sum, of_slots)), of_expert]

    def _window(
        self, by_rank: Sequence[Sequence[int]], first_waited: int, first_rows: int, placement_epoch: int
    ) -> LoadWindow:
        """Of each rank's numbers, waits begin at `first_waited`, and rows at `first_rows`."""
        tokens_of_expert, tokens_of_rank = [], []
        first = [first_rows] * len(by_rank)
        for layer, load in self._load_of_layer.items():
            last = [start + num_slots for start, num_slots in zip(first, load.placement.num_slots, strict=True)]
            of_slots = [numbers[start:end] for numbers, start, end in zip(by_rank, first, last, strict=True)]
            first = last
            rows = self._rows(layer, of_slots)
            of_rank, of_expert = _added(self._held[layer], rows) if layer in self._held else rows
            tokens_of_expert.append(tuple(of_expert))
            tokens_of_rank.append(tuple(of_rank))
        # Exchange by exchange: who is fullest may be another rank in each layer.
        waited = zip(*(numbers[first_waited:first_rows] for numbers in by_rank), strict=True)
        return LoadWindow(
            first_step=self._first_step,
            num_steps=self._num_steps,
            ended_at=time.time(),
            seconds=max(numbers[1] for numbers in by_rank) / NANOSECONDS,
            placement_epoch=placement_epoch,
            num_tokens=self._num_tokens,
            num_padding_tokens=self._num_padding_tokens,
            num_empty_turns=self._num_empty_turns,
            bytes_dispatched=sum(numbers[0] for numbers in by_rank),
            straggler_seconds=sum(sum(of_rank) / len(of_rank) - min(of_rank) for of_rank in waited) / NANOSECONDS,
            layers=tuple(self._load_of_layer),
            tokens_of_expert=tuple(tokens_of_expert),
            tokens_of_rank=tuple(tokens_of_rank),
            logical_of_slot=tuple(load.placement.logical_of_slot for load in self._load_of_layer.values()),
        )

    def _forget(self) -> None:
        for load in self._load_of_layer.values():
            load.rows_e.zero_()
        self._num_steps = self._num_tokens = self._num_padding_tokens = self._num_empty_turns = 0
        self._seconds = 0.0
        self._waited = self._groups.ep.seconds_waited()
        self._bytes = self._groups.ep.num_bytes_sent


def _added(one: list[list[int]], other: list[list[int]]) -> list[list[int]]:
    return [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]
