"""A cache folder of packed weights. The next start maps these weights instead of packing them again.

An entry is one safetensors file, named by a hash of everything that its contents depend on. The file gets this name
only when it is complete, so a killed process leaves no damaged entry.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeserve.machine import shown_bytes
from moeserve.ops.native import native_kernels

logger = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes; kernels need every tensor to begin at a multiple of it
PAGE_BYTES = 4096  # experts on disk begin at multiples of this, so that no page is read for two
PARTIAL = ".partial"
NEW_SECONDS = 10  # age below which a partial file is kept, because its writer may not have locked it yet
BLOCK_BYTES = 16 * 2**20  # bytes written between two syncs, at which writing can be cancelled
HEADER_BYTES = 1 << 20  # leading bytes of a file that `fingerprint` hashes
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096  # parts of a file that `sampled_digest` hashes


@dataclass(frozen=True)
class Entry:
    """Packed weights that are mapped from a file."""

    path: Path
    tensors: dict[str, Tensor]  # [bytes] uint8 each, padded to a multiple of `ALIGNMENT`
    checksums: dict[str, str]  # by tensor name: number of bytes before the padding, and their checksum

    def damaged_tensor(self, is_cancelled: Callable[[], bool]) -> str | None:
        """Read all tensors, and return the name of a tensor with a wrong checksum; None if there is none.

        Args:
            is_cancelled: called repeatedly; once it returns True, the remaining tensors are not read.
        """
        for name, stored in self.checksums.items():
            if is_cancelled():
                return None
            size, _, _ = stored.partition(" ")
            if not size.isdecimal() or _checksum(self.tensors[name][: int(size)]) != stored:
                return name
        return None


class PackedWeightCache:
    """A folder of packed weights of at most `max_bytes` bytes, which evicts the least recently used entries.

    Several processes may use the folder at the same time. Mapped entries stay readable after eviction.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def load(self, key: str) -> Entry | None:
        """Map an entry. Return None if it does not exist, cannot be read, or others could have written it."""
        path = self._path(key)
        try:
            status = path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                logger.warning("%s belongs to another user, or others may write it; the weights are packed again", path)
                return None
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, this is no dict
                checksums = file.metadata() or {}
            if checksums.keys() != tensors.keys():
                raise SafetensorError("there are no checksums of its tensors")
        except FileNotFoundError:
            return None
        except SafetensorError as error:
            logger.warning("%s is damaged (%s); it is written again", path, error)
            self.remove(key)
            return None
        except (OSError, MemoryError, RuntimeError) as error:  # the last two: limited address space
            logger.warning("%s cannot be read (%s); the weights are packed again", path, error)
            return None
        if (kernels := native_kernels()) is not None:
            for tensor in tensors.values():
                kernels.advise_large_pages(tensor)  # parts that are not in the page cache are read in large pages
        with contextlib.suppress(OSError):  # the folder may be read-only for this process
            os.utime(path)
        return Entry(path, tensors, checksums)

    def remove(self, key: str) -> None:
        """Delete an entry if permissions allow it."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def store(self, key: str, tensors: Mapping[str, Tensor], is_cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Write an entry of contiguous tensors, unless it exists. Return True if it exists now, else log the reason.

        Tensors are stored as bytes, padded to a multiple of `ALIGNMENT`.

        Args:
            is_cancelled: called repeatedly; once it returns True, writing stops and the partial file is removed.
        """
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        _, _, num_bytes = header_of(sizes, {name: _checksum_text(size, 0) for name, size in sizes.items()})
        if num_bytes > self.max_bytes:
            logger.info(
                "packed weights are not cached: they take %s, and packed_cache allows %s",
                *map(shown_bytes, (num_bytes, self.max_bytes)),
            )
            return False
        partial = self.folder / f"{key}.{secrets.token_hex(4)}{PARTIAL}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._path(key).exists():  # another process has written the entry in the meantime
                return True
            self._evict(num_bytes)
            free = shutil.disk_usage(self.folder).free
            if num_bytes > free // 2:
                logger.info("packed weights are not cached: only %s are free in %s", shown_bytes(free), self.folder)
                return False
            with partial.open("xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # held until this process closes the file or exits
                is_complete = _write(file, tensors, is_cancelled)
            if is_complete:
                os.replace(partial, self._path(key))
        except OSError as error:
            logger.warning("packed weights are not cached: %s cannot be written (%s)", self.folder, error)
            return False
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        if not is_complete:
            logger.info(
                "packed weights are not cached: the model was shut down before %s were written; a longer run caches "
                "them",
                shown_bytes(num_bytes),
            )
        return is_complete

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _evict(self, num_bytes: int) -> None:
        """Delete partial files of killed processes, and the least recently used entries until `num_bytes` fit."""
        remove_abandoned(self.folder)
        found = []
        for path in self.folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # deleted by the user or by `remove`
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in found) + num_bytes
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def remove_abandoned(folder: Path) -> None:
    """Delete partial files of killed processes."""
    for path in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError), path.open("rb") as file:  # OSError: another process removed or locked it
            if time.time() - path.stat().st_mtime > NEW_SECONDS:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def hash_key(*facts: object) -> str:
    """Return the key of an entry.

    Args:
        facts: everything that the contents of the entry depend on, as values that JSON can represent.
    """
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def fingerprint(files: Iterable[Path]) -> str:
    """Return a hash that changes if the contents of the files change, without reading large files completely.

    The hash covers names, sizes, first bytes, and times of change. A file's ctime cannot be set back, so every change
    of the contents changes the hash. Copying or renaming a file, or changing its permissions, changes the hash too.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} ".encode())
            digest.update(file.read(HEADER_BYTES))
    return digest.hexdigest()


def sampled_digest(files: Iterable[Path]) -> str:
    """Return a hash of files' sizes and parts of their contents, which is the same for all copies of the files.

    Two models have the same hash only if all these parts are equal.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.exists()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEADER_BYTES))
            for place in range(NUM_SAMPLES):
                file.seek(size * place // NUM_SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as [bytes] uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _checksum(content_B: Tensor) -> str:
    """Return the number of bytes and their checksum as text. The checksum is 0 without C++ kernels, which it needs."""
    kernels = native_kernels()
    return _checksum_text(len(content_B), 0 if kernels is None else kernels.checksums(content_B[None])[0])


def _checksum_text(num_bytes: int, checksum: int) -> str:
    return f"{num_bytes} {checksum:016x}"


def _padded(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment


def header_of(
    sizes: Mapping[str, int], metadata: Mapping[str, str] | None = None, alignment: int = ALIGNMENT
) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a safetensors file, the offset of each tensor in the file, and the file's size in bytes.

    Args:
        sizes: bytes of each tensor.
        metadata: metadata of the file; None: no metadata.
        alignment: tensors are padded so that each begins at a multiple of this number of bytes.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    starts, end = {}, 0
    for name, num_bytes in sizes.items():
        size = _padded(num_bytes, alignment)
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        starts[name], end = end, end + size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + first for name, first in starts.items()}, start + end


def _write(file: IO[bytes], tensors: Mapping[str, Tensor], is_cancelled: Callable[[], bool]) -> bool:
    """Write an entry and sync it to disk. Return False if cancelled."""
    checksums: dict[str, str] = {}
    for name, tensor in tensors.items():
        if is_cancelled():
            return False
        checksums[name] = _checksum(bytes_of(tensor))
    header, _, _ = header_of({name: tensor.nbytes for name, tensor in tensors.items()}, checksums)
    num_unsynced = file.write(header)
    for tensor in tensors.values():
        data = bytes_of(tensor).numpy().data
        for start in range(0, len(data), BLOCK_BYTES):
            if is_cancelled():
                return False
            num_unsynced += file.write(data[start : start + BLOCK_BYTES])
            if num_unsynced >= BLOCK_BYTES:  # a single sync at the end would take long and could not be cancelled
                _sync(file)
                num_unsynced = 0
        file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))
    _sync(file)
    return True


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
