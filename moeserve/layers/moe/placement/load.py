"""Counts the rows of each expert on each rank, and gathers the counts of all ranks into load windows.

A layer counts with one operation on its device, without waiting for the result. All ranks of a pipeline stage gather
their counts in one collective, in steps that all replicas have agreed on; then the stages exchange their windows.
Padding rows are routed to no expert, so they are not counted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from moeserve.distributed.groups import Groups
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.placement.placement import Placement
from moeserve.ops import pairs
from moeserve.ops.products.cpu import CpuExpertStore
from moeserve.ops.upload import uploaded
from moeserve.telemetry.expert_load import DiskReads, LoadWindow, joined

# Dimensions: e local experts, E logical experts

NANOSECONDS = 10**9


class ExpertLoad:
    """The rows routed to this rank's experts of one layer since the counts were last gathered."""

    def __init__(self, placement: Placement, rank_in_group: int, context: BuildContext) -> None:
        self.placement = placement
        self.rows_e = torch.zeros(placement.num_slots[rank_in_group], dtype=torch.int64, device=context.device)
        self._pairs = pairs.make(context.backend)

    def count(self, counts_e: Tensor) -> None:
        """Add the number of rows of each local expert in one step, [e] int64."""
        self._pairs.count(counts_e, self.rows_e)


@dataclass(frozen=True)
class Collected:
    """The windows that were gathered, which are the same on all ranks of a stage."""

    window: LoadWindow  # all layers of the model
    of_stage: LoadWindow | None  # the MoE layers of this rank's pipeline stage; None: the stage has none
    figures_of_rank: tuple[tuple[int, ...], ...]  # for each rank of the stage, its `figures` argument of `collect`


class LoadMeter:
    """One rank's record of the steps since the counts were last gathered."""

    def __init__(
        self, load_of_layer: dict[int, ExpertLoad], groups: Groups, store: CpuExpertStore | None = None
    ) -> None:
        """
        Args:
            load_of_layer: the counters of this rank's MoE layers, by the index of the layer in the model.
            store: the store that reads experts from disk. Either all ranks have a store or none has.
        """
        self._load_of_layer = load_of_layer
        self._store = store
        self._reads = [0] * len(DiskReads.__struct_fields__)
        self._groups = groups
        self._first_step = 0
        self._start_window()

    def add_step(self, num_tokens: Sequence[int], seconds: float, padded_to: int | None = None) -> None:
        """Count an executed step.

        Args:
            num_tokens: tokens of each replica.
            seconds: duration of the step on this rank.
            padded_to: number of rows that each replica processed; None: as many rows as the replica has tokens.
        """
        self._num_steps += 1
        self._num_tokens += sum(num_tokens)
        self._num_padding_tokens += 0 if padded_to is None else sum(padded_to - count for count in num_tokens)
        self._num_idle_steps += sum(count == 0 for count in num_tokens)
        self._seconds += seconds

    def keep_counts(self, layer: int) -> None:
        """Keep a layer's counts by expert before its slots change experts. All ranks call this in the same step."""
        load = self._load_of_layer[layer]
        kept_E = self._kept_of_layer.setdefault(layer, load.rows_e.new_zeros(load.placement.num_logical))
        experts = load.placement.logical_of_slot[self._groups.ep.rank_in_group]
        kept_E.index_add_(0, uploaded(experts, kept_E.device), load.rows_e)
        load.rows_e.zero_()

    def collect(self, placement_epoch: int, figures: Sequence[int] = ()) -> Collected | None:
        """Return all ranks' counts since the last call and `figures`, and start a new window. None: no MoE layers.

        Collective: all ranks.

        Args:
            placement_epoch: epoch of the current placement.
            figures: further integers to gather from all ranks; all ranks pass equally many.
        """
        of_stage, figures_of_rank = self._collect_stage(placement_epoch, figures) if self._load_of_layer else (None, ())
        self._first_step += self._num_steps
        self._start_window()
        windows = self._of_stages(of_stage)
        return Collected(joined(windows), of_stage, figures_of_rank) if windows else None

    def _of_stages(self, own: LoadWindow | None) -> list[LoadWindow]:
        """Return the windows of pipeline stages with MoE layers, in order. Collective: all ranks of the pp group."""
        pp = self._groups.pp
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(own)), dtype=torch.uint8)
        sizes = pp.all_gather(torch.tensor([len(encoded)]), [1] * pp.world_size).tolist()
        parts = pp.all_gather(encoded, sizes).split(sizes)
        found = (msgspec.msgpack.decode(part.numpy().tobytes(), type=LoadWindow | None) for part in parts)
        return [window for window in found if window is not None]

    def _collect_stage(
        self, placement_epoch: int, figures: Sequence[int]
    ) -> tuple[LoadWindow, tuple[tuple[int, ...], ...]]:
        """Return the window of this stage's layers, and each rank's `figures`. Collective: all ranks of the stage."""
        ep = self._groups.ep
        waited = ep.seconds_waited()
        before = self._waited + [0.0] * (len(waited) - len(self._waited))
        waited_ns = [round((now - then) * NANOSECONDS) for now, then in zip(waited, before, strict=True)]
        reads = self._reads_of_window()
        own = [ep.num_bytes_sent - self._bytes, round(self._seconds * NANOSECONDS), *reads, *figures, *waited_ns]
        readers = [iter(numbers) for numbers in self._gather(own)]
        num_bytes, nanoseconds, *others = zip(*(itertools.islice(reader, len(own)) for reader in readers), strict=True)
        totals_of_reads, others = list(map(sum, others[: len(reads)])), others[len(reads) :]
        rows_of_layer = [self._read_rows(layer, readers) for layer in self._load_of_layer]
        window = LoadWindow(
            first_step=self._first_step,
            num_steps=self._num_steps,
            ended_at=time.time(),
            seconds=max(nanoseconds) / NANOSECONDS,
            placement_epoch=placement_epoch,
            num_tokens=self._num_tokens,
            num_padding_tokens=self._num_padding_tokens,
            num_idle_steps=self._num_idle_steps,
            bytes_dispatched=sum(num_bytes),
            # Per exchange, because the fullest rank differs between layers.
            straggler_seconds=sum(sum(of_rank) / len(of_rank) - min(of_rank) for of_rank in others[len(figures) :])
            / NANOSECONDS,
            layers=tuple(self._load_of_layer),
            tokens_of_expert=tuple(of_expert for of_expert, _ in rows_of_layer),
            tokens_of_rank=tuple(of_rank for _, of_rank in rows_of_layer),
            logical_of_slot=tuple(load.placement.logical_of_slot for load in self._load_of_layer.values()),
            disk=_disk_reads(*totals_of_reads) if totals_of_reads else None,
        )
        return window, tuple(zip(*others[: len(figures)], strict=True)) or ((),) * len(readers)

    def _gather(self, own: list[int]) -> list[list[int]]:
        """Return, for each rank of the stage, its `own` integers (the same number on each rank) followed by its rows.

        For each layer, the rows are the counts of the rank's slots, followed by the counts of all experts that
        `keep_counts` kept, if any.
        """
        mine: list[Tensor] = []
        sizes = [len(own)] * self._groups.stage.world_size
        for layer, load in self._load_of_layer.items():
            mine.append(load.rows_e)
            sizes = [size + num_slots for size, num_slots in zip(sizes, load.placement.num_slots, strict=True)]
            if layer in self._kept_of_layer:
                mine.append(self._kept_of_layer[layer])
                sizes = [size + load.placement.num_logical for size in sizes]
        # The first copy from a GPU waits for it, the only wait of the host. Experts may be on the host in some layers.
        numbers = torch.cat([torch.tensor(own), *(rows.cpu() for rows in mine)])
        # collective: all ranks of the stage
        return [of_rank.tolist() for of_rank in self._groups.stage.all_gather(numbers, sizes).split(sizes)]

    def _read_rows(self, layer: int, readers: Sequence[Iterator[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a layer's rows by expert and by rank. `readers` yield the integers of each rank."""
        placement = self._load_of_layer[layer].placement
        of_expert, of_rank = [0] * placement.num_logical, [0] * placement.num_ranks
        kept = range(placement.num_logical) if layer in self._kept_of_layer else ()
        for rank, (slots, reader) in enumerate(zip(placement.logical_of_slot, readers, strict=True)):
            for expert in (*slots, *kept):
                rows = next(reader)
                of_rank[rank] += rows
                if rank % placement.num_slices == 0:  # all slices of an expert have the same rows
                    of_expert[expert] += rows
        return tuple(of_expert), tuple(of_rank)

    def _reads_of_window(self) -> list[int]:
        """Return how much the store's counters have grown since the last call; an empty list without a store."""
        if self._store is None:
            return []
        totals = self._store.totals()
        before, self._reads = self._reads, totals
        return [now - then for now, then in zip(totals, before, strict=True)]

    def _start_window(self) -> None:
        for load in self._load_of_layer.values():
            load.rows_e.zero_()
        self._kept_of_layer: dict[int, Tensor] = {}  # for each layer: the rows of each expert before a switch, [E]
        self._num_steps = self._num_tokens = self._num_padding_tokens = self._num_idle_steps = 0
        self._seconds = 0.0
        self._waited = self._groups.ep.seconds_waited()
        self._bytes = self._groups.ep.num_bytes_sent


def _disk_reads(num_found: int, num_read: int, num_bytes: int, wait_ns: int, num_released: int) -> DiskReads:
    return DiskReads(
        num_found=num_found,
        num_read=num_read,
        num_bytes=num_bytes,
        wait_seconds=wait_ns / NANOSECONDS,
        num_released=num_released,
    )
