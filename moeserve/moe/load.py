"""How many rows each expert was given: counted where they arrive, and brought together from all ranks.

Counting is one operation in a layer, on its device and without a look at the result. The ranks' counts come together in
steps that all replicas have agreed on, in one collective. Padding goes to no expert, so it is in none of the figures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeserve.distributed.group import Groups
from moeserve.moe.dispatch.base import PackedTokens, SlottedTokens
from moeserve.moe.placement import Placement
from moeserve.ops.pairs import choose_pairs
from moeserve.telemetry.expert_load import LoadWindow, summed

# e local experts

NANOSECONDS = 10**9
NUM_OWN = 3  # figures that each rank tells in any case: nanoseconds waited, bytes sent, nanoseconds of its steps


class ExpertLoad:
    """The rows that this rank's experts of one layer were given since they were last collected."""

    def __init__(self, placement: Placement, rank_in_group: int, device: torch.device) -> None:
        self.placement = placement
        self.rows_e = torch.zeros(placement.num_slots[rank_in_group], dtype=torch.int64, device=device)
        self._pairs = choose_pairs(device.type)

    def count(self, tokens: PackedTokens | SlottedTokens) -> None:
        self._pairs.count(tokens.counts_e, self.rows_e)


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
        self._first_step = self._num_steps = 0
        self._held: list[LoadWindow] = []  # that belong to the window under way
        self._forget()

    def add_step(self, num_tokens: Sequence[int], seconds: float) -> None:
        """Counts a step that was executed.

        Args:
            num_tokens: of each replica.
            seconds: that it took here.
        """
        self._num_steps += 1
        self._num_tokens += sum(num_tokens)
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
        by_rank = self._gathered(figures)
        window = self._window(by_rank, NUM_OWN + len(figures), placement_epoch)
        window = summed([*self._held, window])
        self._held = []
        self._forget()
        return Collected(window, tuple(tuple(numbers[NUM_OWN : NUM_OWN + len(figures)]) for numbers in by_rank))

    def hold(self, placement_epoch: int) -> None:
        """Brings the counts together before slots get other experts. Collective: all ranks."""
        self._held.append(self._window(self._gathered(()), NUM_OWN, placement_epoch))
        self._forget()

    def _gathered(self, figures: Sequence[int]) -> list[list[int]]:
        """By rank: NUM_OWN figures, those asked for, and the rows of its slots, layer by layer."""
        groups = self._groups
        own = [
            round(groups.seconds_waited * NANOSECONDS) - self._waited_ns,
            groups.ep.num_bytes_sent - self._bytes,
            round(self._seconds * NANOSECONDS),
            *figures,
        ]
        mine = torch.cat([torch.tensor(own), *(load.rows_e.cpu() for load in self._load_of_layer.values())])
        sizes = [
            len(own) + sum(load.placement.num_slots[rank] for load in self._load_of_layer.values())
            for rank in range(groups.world.world_size)
        ]
        # collective: all ranks
        return [numbers.tolist() for numbers in groups.world.all_gather(mine, sizes).split(sizes)]

    def _window(self, by_rank: Sequence[Sequence[int]], num_figures: int, placement_epoch: int) -> LoadWindow:
        waited = [numbers[0] / NANOSECONDS for numbers in by_rank]
        tokens_of_expert, tokens_of_rank = [], []
        first = [num_figures] * len(by_rank)
        for load in self._load_of_layer.values():
            of_expert, of_rank = [0] * load.placement.num_logical, []
            for rank, slots in enumerate(load.placement.logical_of_slot):
                rows = by_rank[rank][first[rank] : first[rank] + len(slots)]
                first[rank] += len(slots)
                of_rank.append(sum(rows))
                for expert, count in zip(slots, rows, strict=True):
                    of_expert[expert] += count
            tokens_of_expert.append(tuple(of_expert))
            tokens_of_rank.append(tuple(of_rank))
        return LoadWindow(
            first_step=self._first_step,
            num_steps=self._num_steps,
            ended_at=time.time(),
            seconds=max(numbers[2] for numbers in by_rank) / NANOSECONDS,
            placement_epoch=placement_epoch,
            num_tokens=self._num_tokens,
            num_padding_tokens=0,
            num_empty_turns=self._num_empty_turns,
            bytes_dispatched=sum(numbers[1] for numbers in by_rank),
            straggler_seconds=sum(waited) / len(waited) - min(waited),
            layers=tuple(self._load_of_layer),
            tokens_of_expert=tuple(tokens_of_expert),
            tokens_of_rank=tuple(tokens_of_rank),
            logical_of_slot=tuple(load.placement.logical_of_slot for load in self._load_of_layer.values()),
        )

    def _forget(self) -> None:
        for load in self._load_of_layer.values():
            load.rows_e.zero_()
        self._first_step += self._num_steps
        self._num_steps = self._num_tokens = self._num_empty_turns = 0
        self._seconds = 0.0
        self._waited_ns = round(self._groups.seconds_waited * NANOSECONDS)
        self._bytes = self._groups.ep.num_bytes_sent
