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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeserve.machine import shown_bytes

logger = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes: of every tensor in the file, as kernels like to read them
PARTIAL = ".partial"
LOCK = ".lock"
SECONDS_BETWEEN_LOOKS = 0.1  # for the lock
BLOCK_BYTES = 16 * 2**20  # about so many go to the disk at a time: a writer can be stopped in between
SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
HEADER_BYTES = 1 << 20  # of a shard, read whole: where its tensors are


def _never() -> bool:
    return False


class PackedCopies:
    """A folder of copies, all together not larger than `max_bytes`: the least recently used go first.

    Any number of processes may use the folder; one at a time writes. What one has mapped stays readable when another
    deletes it.
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
        except FileNotFoundError:
            return None
        except SafetensorError as error:
            logger.warning("%s is damaged (%s); it is made anew", path, error)
            self.remove(key)
            return None
        except OSError as error:
            logger.warning("%s cannot be read (%s); the weights are packed anew", path, error)
            return None
        with contextlib.suppress(OSError):  # of a folder that others fill, and where this process may only read
            os.utime(path)
        return tensors

    def remove(self, key: str) -> None:
        """A copy that is of no use, so that `keep` makes it anew. Where it may not be removed, it stays."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def keep(self, key: str, tensors: Mapping[str, Tensor], is_stopped: Callable[[], bool] = _never) -> bool:
        """Write a copy of contiguous tensors, unless there is one. Returns whether there is one now; if not, the reason
        is logged.

        Tensors are stored as bytes, filled up to a multiple of `ALIGNMENT`.

        Args:
            is_stopped: asked again and again; once it is true, the copy is given up, and what there is of it removed.
        """
        header = _header(tensors)
        num_bytes = len(header) + sum(_filled_up(tensor.nbytes) for tensor in tensors.values())
        if num_bytes > self.max_bytes:
            logger.info(
                "the packed weights take %s, more than is kept: %s", *map(shown_bytes, (num_bytes, self.max_bytes))
            )
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked(is_stopped) as is_locked:
                is_kept = is_locked and self._keep_alone(key, header, tensors, num_bytes, is_stopped)
        except OSError as error:
            logger.warning("no packed copy could be kept in %s: %s", self.folder, error)
            return False
        if not is_kept and is_stopped():
            logger.info(
                "no packed copy is kept: the model was shut down before its %s were written; a longer run keeps one",
                shown_bytes(num_bytes),
            )
        return is_kept

    @contextlib.contextmanager
    def _locked(self, is_stopped: Callable[[], bool]) -> Iterator[bool]:
        """Waits for the lock of all writers, which a process that dies gives back. False: stopped before it came."""
        with (self.folder / LOCK).open("ab") as file:
            while not is_stopped():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                else:
                    yield True
                    return
            yield False

    def _keep_alone(
        self,
        key: str,
        header: bytes,
        tensors: Mapping[str, Tensor],
        num_bytes: int,
        is_stopped: Callable[[], bool],
    ) -> bool:
        """With the lock: so what is counted here is all there is until the copy is complete."""
        self._remove_leftovers()
        if self._path(key).exists():  # another process has made it meanwhile
            return True
        self._make_room(num_bytes)
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free // 2:
            logger.info("no packed copy is kept: %s are free in %s", shown_bytes(free), self.folder)
            return False
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=f"{key}.", suffix=PARTIAL, delete=False) as file:
            try:
                is_complete = _write(file, header, tensors, is_stopped)
                if is_complete:
                    os.replace(file.name, self._path(key))
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
            if not is_complete:
                os.unlink(file.name)
        return is_complete

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _make_room(self, num_bytes: int) -> None:
        found = []
        for path in self.folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # a user, or `remove`, was faster
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in found) + num_bytes
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _remove_leftovers(self) -> None:
        """Of processes that ended while they wrote: the lock is here, so nobody writes them."""
        for path in self.folder.glob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)


def key_of(*facts: object) -> str:
    """The name of a copy: facts are what decides over its bytes, and can be written as JSON."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def fingerprint(files: Iterable[Path]) -> str:
    """Tells files' contents apart without reading them whole: by names, sizes, beginnings, samples from end to end, and
    times of change.

    Samples miss a byte changed between them, and the time of change (mtime) can be set back. The time of the file's
    entry (ctime) cannot: the system sets it at each change. So files that were copied or renamed, or got other rights,
    also count as changed.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} ".encode())
            digest.update(file.read(HEADER_BYTES))
            for sample in range(SAMPLES_PER_FILE):
                file.seek(max(0, status.st_size - SAMPLE_BYTES) * sample // (SAMPLES_PER_FILE - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _filled_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Of a safetensors file, filled up with spaces so that tensors begin at multiples of `ALIGNMENT`."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        size = _filled_up(tensor.nbytes)
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write(file: IO[bytes], header: bytes, tensors: Mapping[str, Tensor], is_stopped: Callable[[], bool]) -> bool:
    """Returns whether all of it is on the disk now: False if it was stopped."""
    num_unsynced = file.write(header)
    for piece in _pieces(tensors.values()):
        if is_stopped():
            return False
        num_unsynced += file.write(piece)
        if num_unsynced >= BLOCK_BYTES:  # one sync of all at the end would take long, and could not be stopped
            _sync(file)
            num_unsynced = 0
    _sync(file)
    return True


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _pieces(tensors: Iterable[Tensor]) -> Iterator[memoryview | bytes]:
    """Of `BLOCK_BYTES` or less."""
    for tensor in tensors:
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]
        yield bytes(_filled_up(tensor.nbytes) - tensor.nbytes)
