"""Copies of packed weights in a folder, from which the next start maps them instead of packing anew.

A copy is one safetensors file, named by a hash of everything that decides what is in it. It appears complete or not at
all, whatever happens to the process that writes it. Knows names and bytes, no model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeserve.machine import shown_bytes

logger = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes: of every tensor in the file, as kernels like to read them
PARTIAL = ".partial"
SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
HEADER_BYTES = 1 << 20  # of a shard, read whole: where its tensors are


class PackedCopies:
    """A folder of copies, all together not larger than `max_bytes`: the least recently used go first.

    Any number of processes may use the folder. What one of them has mapped stays readable when another deletes it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def find(self, key: str) -> dict[str, Tensor] | None:
        """The tensors of a copy, [bytes] uint8 each, mapped; None if there is none, or none that can be read."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, this is no dict
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            logger.warning("%s cannot be read (%s); it is made anew", path, error)
            return None
        return tensors

    def keep(self, key: str, tensors: Mapping[str, Tensor]) -> bool:
        """Write a copy of contiguous tensors. Returns whether there is one now; what kept it from being made is logged.

        Tensors are stored as bytes, filled up to a multiple of `ALIGNMENT`.
        """
        num_bytes = sum(_filled_up(tensor.nbytes) for tensor in tensors.values())
        if num_bytes > self.max_bytes:
            logger.info(
                "the packed weights take %s, more than is kept: %s", *map(shown_bytes, (num_bytes, self.max_bytes))
            )
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._make_room(num_bytes)
            free = shutil.disk_usage(self.folder).free
            if num_bytes > free // 2:
                logger.info("no packed copy is kept: %s are free in %s", shown_bytes(free), self.folder)
                return False
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=f"{key}.", suffix=PARTIAL, delete=False) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or this process ends
                try:
                    _write(file, tensors)
                    os.replace(file.name, self._path(key))
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            logger.warning("no packed copy could be kept in %s: %s", self.folder, error)
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _make_room(self, num_bytes: int) -> None:
        found = []
        for path in self.folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # another process makes room too
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in found) + num_bytes
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _remove_leftovers(self) -> None:
        """Of processes that ended while they wrote: nobody holds their locks."""
        for path in self.folder.glob(f"*{PARTIAL}"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)


def key_of(*facts: object) -> str:
    """The name of a copy: facts are what decides over its bytes, and can be written as JSON."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def fingerprint(files: Iterable[Path]) -> str:
    """Of files' contents: names, sizes, times of change, beginnings, and samples from end to end."""
    digest = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} ".encode())
            digest.update(file.read(HEADER_BYTES))
            for sample in range(SAMPLES_PER_FILE):
                file.seek(max(0, status.st_size - SAMPLE_BYTES) * sample // (SAMPLES_PER_FILE - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _filled_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _write(file: IO[bytes], tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file whose header is filled up with spaces so that tensors begin at multiples of `ALIGNMENT`."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        size = _filled_up(tensor.nbytes)
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for piece in _pieces(tensors.values()):
        file.write(piece)
    file.flush()
    os.fsync(file.fileno())


def _pieces(tensors: Iterable[Tensor]) -> Iterator[memoryview | bytes]:
    for tensor in tensors:
        yield tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        yield bytes(_filled_up(tensor.nbytes) - tensor.nbytes)
