"""Reads rows of safetensors files from mapped memory, for engines that read tensors again and again.

The library's own slices lose some bytes each time (safetensors 0.8), which adds up over thousands of updates.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from moeserve.models.checkpoint.tensors import StoredTensor

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


class MappedFiles:
    """Mapped files, until this object is deleted. Their headers must have been checked before."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[dict[str, int], Tensor]] = {}  # where each tensor begins, and all bytes

    def read_rows(self, stored: StoredTensor, start: int, stop: int) -> Tensor:
        """Return a view of rows of a tensor that is not encoded. A scalar has one row.

        Raises:
            CheckpointError: the tensor has another dtype.
        """
        if stored.dtype not in _DTYPES:
            raise stored.wrong(f"is {stored.dtype}; supported: {', '.join(_DTYPES)}")
        starts, bytes_B = self._opened(stored.shard)
        dtype, row_shape = _DTYPES[stored.dtype], stored.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        first = starts[stored.name] + start * row_bytes
        rows_B = bytes_B[first : first + (stop - start) * row_bytes]
        if first % dtype.itemsize:
            rows_B = rows_B.clone()
        return rows_B.view(dtype).view(stop - start, *row_shape) if stored.shape else rows_B.view(dtype).view(())

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
