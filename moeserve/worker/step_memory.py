"""`StepMemory`: how the inputs of a step reach a rank's device, and how its results come back.

A GPU computes a step while the host prepares the next one. So the host waits for nothing: the tokens of a step go to
the next one on the GPU, the block table is kept there, and few copies are left.
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

from moeserve.worker.request_table import UNKNOWN_TOKEN, Chunk, RequestTable

# Offsets of arrays in a copy. Triton compiles other kernels for addresses that are no multiples of this.
ALIGNMENT = 16

Array = npt.NDArray[Any]
# S chunks of a step, T tokens, L tokens that are sampled


@dataclass(frozen=True)
class HostInputs:
    """The inputs of a step as the host knows them; see `StepInputs`."""

    token_ids: Array  # UNKNOWN_TOKEN for the newest token of a request, if the device has it only
    positions: Array
    cache_slots: Array
    row_starts: Array
    context_lens: Array
    logits_rows: Array
    padding: Array

    @property
    def arrays(self) -> list[Array]:
        return [getattr(self, name) for name in self.names()]

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]


class Reading(Protocol):
    """Tensors on their way to the host."""

    @property
    def is_done(self) -> bool:
        """True if `wait` returns at once."""
        ...

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host, once the device has computed them."""
        ...


class StepMemory(Protocol):
    """The memory of one device, in the thread that runs its steps."""

    is_asynchronous: bool  # the device computes while the host goes on

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return arrays on the device. They must not be changed afterwards."""
        ...

    def upload_step(self, inputs: HostInputs, chunks: Sequence[Chunk], max_blocks: int) -> tuple[list[Tensor], Tensor]:
        """Return `inputs.arrays` on the device, with all tokens, and the block table [S, max_blocks] int32."""
        ...

    def keep_tokens(self, sampling: Sequence[Chunk], token_ids_L: Tensor) -> None:
        """Keep the tokens that these chunks sample, for the next step."""
        ...

    def start_reading(self, tensors: Sequence[Tensor]) -> Reading: ...


class HostReading:
    """See `Reading`."""

    is_done = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def wait(self) -> list[Tensor]:
        return self._tensors


class HostMemory:
    """See `StepMemory`. The device is the CPU: nothing is copied, and the host knows all tokens."""

    is_asynchronous = False

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def upload_step(self, inputs: HostInputs, chunks: Sequence[Chunk], max_blocks: int) -> tuple[list[Tensor], Tensor]:
        slots_S = [chunk.slot for chunk in chunks]
        return self.upload(inputs.arrays), torch.from_numpy(self._table.block_table[slots_S, :max_blocks])

    def keep_tokens(self, sampling: Sequence[Chunk], token_ids_L: Tensor) -> None:
        """Do nothing: the table of requests has them."""

    def start_reading(self, tensors: Sequence[Tensor]) -> Reading:
        return HostReading(tensors)


class GpuReading:
    """See `Reading`."""

    def __init__(self, tensors: Sequence[Tensor], pinned: Sequence[Tensor]) -> None:
        """
        Args:
            pinned: memory of the host for the tensors.
        """
        self._on_host = list(pinned)
        for host, each in zip(self._on_host, tensors, strict=True):
            host.copy_(each, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    @property
    def is_done(self) -> bool:
        return self._copied.query()

    def wait(self) -> list[Tensor]:
        self._copied.synchronize()
        return self._on_host


class GpuMemory:
    """See `StepMemory`."""

    is_asynchronous = True

    def __init__(self, table: RequestTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._block_table = torch.from_numpy(table.block_table).to(device, copy=True)
        self._newest_tokens = torch.zeros(len(table.block_table), dtype=torch.int64, device=device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the host that the GPU reads and writes by itself. torch reuses it when a copy has ended."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        arrays = [np.ascontiguousarray(array) for array in arrays]
        offsets = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
        pinned = self.pinned((offsets[-1],), torch.uint8)
        memory = pinned.numpy()
        for array, offset in zip(arrays, offsets, strict=False):
            memory[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        on_device = pinned.to(self._device, non_blocking=True)
        return [
            on_device[offset : offset + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=False)
        ]

    def upload_step(self, inputs: HostInputs, chunks: Sequence[Chunk], max_blocks: int) -> tuple[list[Tensor], Tensor]:
        slots_S = np.array([chunk.slot for chunk in chunks], np.int64)
        unknown_rows = np.flatnonzero(inputs.token_ids == UNKNOWN_TOKEN)
        slots_of_unknown = slots_S[np.searchsorted(inputs.row_starts, unknown_rows, side="right") - 1]
        entries, block_ids = self._changed_entries(chunks)
        *tensors, slots, rows, newest, changed, changed_ids = self.upload(
            [*inputs.arrays, slots_S, unknown_rows, slots_of_unknown, entries, block_ids]
        )
        if len(entries):
            self._block_table.view(-1).index_copy_(0, changed, changed_ids)
        if len(unknown_rows):
            tensors[0].index_copy_(0, rows, self._newest_tokens.index_select(0, newest))
        return tensors, self._block_table[:, :max_blocks].index_select(0, slots)

    def _changed_entries(self, chunks: Sequence[Chunk]) -> tuple[Array, Array]:
        """Return the entries of the block table that the device lacks, counted row by row, and their block ids."""
        entries, block_ids = [], []
        width = self._table.block_table.shape[1]
        for chunk in chunks:
            request = chunk.request
            first, end = request.num_blocks_on_device, request.num_blocks
            if first < end:
                request.num_blocks_on_device = end
                entries.append(np.arange(chunk.slot * width + first, chunk.slot * width + end))
                block_ids.append(self._table.block_table[chunk.slot, first:end])
        if not entries:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        return np.concatenate(entries), np.concatenate(block_ids)

    def keep_tokens(self, sampling: Sequence[Chunk], token_ids_L: Tensor) -> None:
        (slots,) = self.upload([np.array([chunk.slot for chunk in sampling], np.int64)])
        self._newest_tokens.index_copy_(0, slots, token_ids_L)

    def start_reading(self, tensors: Sequence[Tensor]) -> Reading:
        return GpuReading(tensors, [self.pinned(each.shape, each.dtype) for each in tensors])


def memory_of(table: RequestTable, device: torch.device) -> StepMemory:
    return HostMemory(table) if device.type == "cpu" else GpuMemory(table, device)
