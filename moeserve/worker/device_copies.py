"""`DeviceCopies`: the copies of a step's inputs to a rank's device, and of its results to the host.

A GPU computes a step while the host prepares the next one. The host therefore does not wait: sampled tokens are passed
to the next step on the GPU, the block table is kept there, and only a few copies remain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.ops.reading import GpuReading, HostReading, Reading
from moeserve.step_inputs import GroupTable, as_integers
from moeserve.worker.request_table import UNKNOWN_TOKEN, RequestTable

# Offsets of arrays in a copy are multiples of this, because Triton compiles different kernels for other addresses.
ALIGNMENT = 16

Array = npt.NDArray[Any]
# S chunks of a step, L tokens that are sampled, W fields of SAMPLING_SETTINGS


@dataclass(frozen=True)
class HostInputs:
    """The inputs of a step that are known on the host; see `StepInputs`."""

    token_ids: Array  # UNKNOWN_TOKEN for the newest token of a request if only the device has it
    positions: Array
    row_starts: Array
    context_lens: Array
    logits_rows: Array
    padding: Array
    slots: Array
    chunk_slots: Array  # [S] int64: slots of all chunks
    state_rows: Array  # [4, S] in the order of `StateRows`; [4, 0] if the model has no states
    cache_slots: list[Array]  # by cache group

    @property
    def arrays(self) -> list[Array]:
        """All arrays: the fields of `names`, and then `cache_slots`."""
        return [*(getattr(self, name) for name in self.names()), *self.cache_slots]

    @classmethod
    def names(cls) -> list[str]:
        """The names of the fields with one array."""
        return [field.name for field in dataclasses.fields(cls) if field.name != "cache_slots"]


class DeviceCopies(Protocol):
    """The copies to and from one device, made by the thread that runs its steps."""

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Copy arrays to the device. They must not be modified afterwards."""
        ...

    def upload_step(self, inputs: HostInputs, max_blocks: int) -> tuple[dict[str, Tensor], list[GroupTable]]:
        """Copy the inputs of a step to the device. Fill in tokens that only the device has, and add `settings`; see
        `StepInputs`.

        Also return the slots and block table of each cache group.

        Args:
            max_blocks: maximum number of blocks of a chunk's context.
        """
        ...

    def keep_tokens(self, slots_L: Tensor, token_ids_L: Tensor) -> None:
        """Keep the sampled tokens of the requests in these slots for the next step."""
        ...

    def start_reading(self, tensors: Sequence[Tensor]) -> Reading: ...


class CpuCopies:
    """A `DeviceCopies` for the CPU, where nothing is copied, and the host knows all tokens."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def upload_step(self, inputs: HostInputs, max_blocks: int) -> tuple[dict[str, Tensor], list[GroupTable]]:
        self._table.forget_changes()
        table, names, num_groups = self._table, HostInputs.names(), len(inputs.cache_slots)
        block_tables = [of_group[inputs.chunk_slots, :max_blocks] for of_group in table.tables]
        tensors = self.upload([*inputs.arrays, *block_tables, as_integers(table.settings[inputs.slots])])
        on_device = dict(zip([*names, "settings"], [*tensors[: len(names)], tensors[-1]], strict=True))
        of_groups = tensors[len(names) : -1]
        return on_device, list(map(GroupTable, of_groups[:num_groups], of_groups[num_groups:]))

    def keep_tokens(self, slots_L: Tensor, token_ids_L: Tensor) -> None:
        """Do nothing, because the request table has the tokens."""

    def start_reading(self, tensors: Sequence[Tensor]) -> Reading:
        return HostReading(tensors)


class GpuCopies:
    """A `DeviceCopies` for a GPU."""

    def __init__(self, table: RequestTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._block_ids = torch.from_numpy(table.tables).to(device, copy=True)  # [groups, slots, blocks]
        self._tables = list(self._block_ids)
        self._settings = torch.from_numpy(as_integers(table.settings)).to(device, copy=True)
        self._newest_tokens = torch.zeros(table.num_slots, dtype=torch.int64, device=device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return pinned host memory, which torch reuses when a copy has ended."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Copy arrays to the device in one copy. Arrays of the same dtype are contiguous, and one call splits them."""
        by_dtype: dict[np.dtype[Any], list[int]] = {}
        for index, array in enumerate(arrays):
            by_dtype.setdefault(array.dtype, []).append(index)
        pinned = self.pinned((sum(array.nbytes + -array.nbytes % ALIGNMENT for array in arrays),), torch.uint8)
        memory, first = pinned.numpy(), 0
        groups: list[tuple[list[int], slice, torch.dtype, list[int]]] = []
        for dtype, indices in by_dtype.items():
            sizes: list[int] = []  # sizes of each array and of the gap after it, in elements
            for index in indices:
                sizes += (arrays[index].size, -arrays[index].nbytes % ALIGNMENT // dtype.itemsize)
            place = slice(first, first + sum(sizes) * dtype.itemsize)
            numbers, offset = memory[place].view(dtype), 0
            for index, size, gap in zip(indices, sizes[::2], sizes[1::2], strict=True):
                numbers[offset : offset + size] = arrays[index].reshape(-1)
                offset += size + gap
            groups.append((indices, place, torch.from_numpy(numbers).dtype, sizes))
            first = place.stop
        on_device = pinned.to(self._device, non_blocking=True)
        tensors = [on_device] * len(arrays)
        for indices, place, torch_dtype, sizes in groups:
            parts = on_device[place].view(torch_dtype).split(sizes)
            for index, part in zip(indices, parts[::2], strict=True):
                tensors[index] = part if arrays[index].ndim == 1 else part.view(arrays[index].shape)
        return tensors

    def upload_step(self, inputs: HostInputs, max_blocks: int) -> tuple[dict[str, Tensor], list[GroupTable]]:
        unknown_rows = np.flatnonzero(inputs.token_ids == UNKNOWN_TOKEN)
        slots_of_unknown = inputs.chunk_slots[np.searchsorted(inputs.row_starts, unknown_rows, side="right") - 1]
        *tensors, rows, newest, entries, block_ids, added, settings = self.upload(
            [*inputs.arrays, unknown_rows, slots_of_unknown, *self._changes()]
        )
        if len(entries):
            self._block_ids.view(-1).index_put_((entries,), block_ids)
        if len(added):
            self._settings.index_put_((added,), settings)
        names = HostInputs.names()
        on_device, cache_slots = dict(zip(names, tensors, strict=False)), tensors[len(names) :]
        if len(unknown_rows):
            on_device["token_ids"].index_put_((rows,), self._newest_tokens.index_select(0, newest))
        slots = on_device["chunk_slots"]
        block_tables = (table[:, :max_blocks].index_select(0, slots) for table in self._tables)
        on_device["settings"] = self._settings.index_select(0, on_device["slots"])
        return on_device, list(map(GroupTable, cache_slots, block_tables))

    def _changes(self) -> list[Array]:
        """Return the changes since the last update of the device, as four arrays.

        The arrays are flat indices [N] into the block tables, the block ids at these indices [N], slots [L], and the
        sampling settings of these slots [L, W].
        """
        table = self._table
        num_groups, num_slots, width = table.tables.shape
        block_slots, firsts, ends = np.array(table.added_blocks, np.int64).reshape(-1, 3).T
        lengths = ends - firsts
        entries = np.repeat(block_slots * width + ends - np.cumsum(lengths), lengths) + np.arange(lengths.sum())
        entries = (entries + np.arange(num_groups)[:, None] * num_slots * width).reshape(-1)
        slots = np.array(table.added_slots, np.int64)
        table.forget_changes()
        return [entries, table.tables.reshape(-1)[entries], slots, as_integers(table.settings[slots])]

    def keep_tokens(self, slots_L: Tensor, token_ids_L: Tensor) -> None:
        self._newest_tokens.index_put_((slots_L,), token_ids_L)

    def start_reading(self, tensors: Sequence[Tensor]) -> Reading:
        return GpuReading(tensors, [self.pinned(each.shape, each.dtype) for each in tensors])


def copies_for(table: RequestTable, device: torch.device) -> DeviceCopies:
    return CpuCopies(table) if device.type == "cpu" else GpuCopies(table, device)
