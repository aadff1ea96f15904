"""The file with a rank's packed weights, from which experts are read while the model runs.

The file is a safetensors file. Its last tensor holds a checksum of each row of the other tensors.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.machine import shown_bytes
from moeserve.models.checkpoint.packed_cache import PAGE_BYTES, PARTIAL, header_of, remove_abandoned

CHECKSUMS = "checksums"


@dataclass(frozen=True)
class Rows:
    """The size of a tensor [number, bytes] uint8. Rows are the experts of a layer; other tensors have a single row."""

    number: int
    num_bytes: int  # bytes of each row


def _header_of(sizes: Mapping[str, Rows]) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a file, the offset of each tensor in the file, and the file's size in bytes."""
    num_bytes = {name: rows.number * rows.num_bytes for name, rows in sizes.items()}
    checksum_bytes = 8 * sum(rows.number for rows in sizes.values())
    return header_of(num_bytes | {CHECKSUMS: checksum_bytes}, alignment=PAGE_BYTES)


class NewStore:
    """A file that is being filled. It gets its name only when complete, so a killed process leaves no damaged file."""

    def __init__(self, native: ModuleType, path: Path, sizes: Mapping[str, Rows]) -> None:
        """
        Args:
            sizes: the size of each tensor to store, by name.

        Raises:
            CheckpointError: the folder cannot be written, or has too little room.
        """
        self._native, self._path, self._sizes = native, path, sizes
        header, self._offsets, self._num_bytes = _header_of(sizes)
        self._partial = path.with_name(f"{path.stem}.{secrets.token_hex(4)}{PARTIAL}")
        self._checksums: dict[str, list[int]] = {}
        try:
            remove_abandoned(path.parent)
            free = shutil.disk_usage(path.parent).free
            if self._num_bytes > free:
                raise CheckpointError(
                    f"expert_store={str(path.parent)!r} has too little room: the packed weights take "
                    f"{shown_bytes(self._num_bytes)}, and {shown_bytes(free)} are free; set expert_store to a folder "
                    "on another disk"
                )
            self._file = self._partial.open("x+b")
            os.fchmod(self._file.fileno(), 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)  # held until the file is closed, so that no process removes it
            self._file.truncate(self._num_bytes)
            if sys.platform == "linux":  # reserve the space now, so that a full disk is an error here
                os.posix_fallocate(self._file.fileno(), 0, self._num_bytes)
            self._file.write(header)
            self._file.flush()
            self._map = mmap.mmap(self._file.fileno(), self._num_bytes)
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise CheckpointError(f"expert_store={str(path.parent)!r} cannot be written: {error}") from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def rows_of(self, name: str) -> Tensor:
        """Return a tensor [number, bytes] uint8 as a view of the mapped file."""
        start, rows = self._offsets[name], self._sizes[name]
        return self._bytes[start : start + rows.number * rows.num_bytes].view(rows.number, rows.num_bytes)

    def finish_rows(self, name: str) -> None:
        """Compute the checksums of a filled tensor, and write it to the disk, which releases its memory."""
        rows_RB = self.rows_of(name)
        self._checksums[name] = self._native.checksums(rows_RB)
        begin = self._offsets[name] // mmap.PAGESIZE * mmap.PAGESIZE
        size = self._offsets[name] + rows_RB.nbytes - begin
        self._map.flush(begin, size)
        self._map.madvise(mmap.MADV_DONTNEED, begin, size)
        if sys.platform == "linux":
            os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Complete the file. All tensors must be finished."""
        assert self._checksums.keys() == self._sizes.keys()
        sums = np.array([each for name in self._sizes for each in self._checksums[name]], dtype="<u8")
        start = self._offsets[CHECKSUMS]
        self._bytes[start : start + sums.nbytes] = torch.from_numpy(sums.view(np.uint8))
        self._map.flush()
        os.fsync(self._file.fileno())
        os.replace(self._partial, self._path)
        self.close()

    def close(self) -> None:
        """Close the file. Remove the file if it is not complete."""
        self._partial.unlink(missing_ok=True)
        self._file.close()  # the mapping lives as long as tensors refer to it


class StoreFile:
    """A complete file of packed weights."""

    def __init__(self, native: ModuleType, path: Path, sizes: Mapping[str, Rows]) -> None:
        """
        Raises:
            ValueError: the file is damaged, or does not have tensors of these sizes.
            OSError: the file cannot be read.
        """
        self._native, self.path, self._sizes = native, path, sizes
        header, self.offsets, num_bytes = _header_of(sizes)
        with path.open("rb") as file:
            if file.read(len(header)) != header or os.fstat(file.fileno()).st_size != num_bytes:
                raise ValueError("its size or header differs from what this model's would be")
        try:
            opened: Any = safe_open(path, framework="pt")
            self._file = opened
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        sums = self._file.get_tensor(CHECKSUMS).numpy().view("<u8").tolist()  # padded with zeros
        self.checksums: dict[str, list[int]] = {}
        for name, rows in sizes.items():
            self.checksums[name], sums = sums[: rows.number], sums[rows.number :]

    def mapped_rows(self, name: str) -> Tensor:
        """Return a mapped tensor [number, bytes] uint8. Pages are read from the file when they are used."""
        rows = self._sizes[name]
        tensor: Tensor = self._file.get_tensor(name)
        return tensor[: rows.number * rows.num_bytes].view(rows.number, rows.num_bytes)

    def is_intact(self, name: str, rows_RB: Tensor) -> bool:
        """Return True if `rows_RB`, a copy of a tensor, has the checksums that the file stores."""
        return bool(self._native.checksums(rows_RB) == self.checksums[name])
