"""Reads rows of safetensors files from mapped memory or elsewhere, for engines that read tensors again and again.

The slices of the safetensors library leak some bytes at each read (version 0.8), which adds up over thousands of
updates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from moeserve.models.checkpoint.tensors import StoredTensor

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


class MappedFiles:
    """Files that stay mapped until this object is deleted. Their headers must have been checked before."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[dict[str, int], Tensor]] = {}  # offset of each tensor, and all bytes of the file

    def read_rows(self, stored: StoredTensor, start: int, stop: int) -> Tensor:
        """Return a view of rows `start` to `stop` of a tensor. See `rows_of`."""
        starts, bytes_B = self._opened(stored.shard)
        first = starts[stored.name]
        return rows_of(stored, start, stop, lambda begin, end: bytes_B[first + begin : first + end])

    def _opened(self, path: Path) -> tuple[dict[str, int], Tensor]:
        if path not in self._files:
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(header_bytes))
            starts = {
                name: 8 + header_bytes + entry["data_offsets"][0]
                for name, entry in header.items()
                if name != "__metadata__"
            }
            size = path.stat().st_size
            self._files[path] = starts, torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        return self._files[path]


def rows_of(stored: StoredTensor, start: int, stop: int, read_bytes: Callable[[int, int], Tensor]) -> Tensor:
    """Return rows `start` to `stop` of a tensor that is not encoded. A scalar has one row.

    Args:
        read_bytes: returns the tensor's bytes from a start to an end.

    Raises:
        CheckpointError: the tensor has a dtype that is not in `DTYPES`.
    """
    if stored.dtype not in DTYPES:
        raise stored.wrong(f"is {stored.dtype}; supported: {', '.join(DTYPES)}")
    dtype, row_shape = DTYPES[stored.dtype], stored.shape[1:]
    row_bytes = math.prod(row_shape) * dtype.itemsize
    rows_B = read_bytes(start * row_bytes, stop * row_bytes)
    if rows_B.storage_offset() % dtype.itemsize:
        rows_B = rows_B.clone()
    return rows_B.view(dtype).view(stop - start, *row_shape) if stored.shape else rows_B.view(dtype).view(())
