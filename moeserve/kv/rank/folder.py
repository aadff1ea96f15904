"""Items of the KV cache in a persistent folder that several engines share.

Each rank has a separate folder, whose name is a hash of everything that an item's contents depend on, except tokens. An
item is one safetensors file, named by its digest and its kind. Files are renamed into place when complete and have a
checksum, so a killed engine leaves no damaged item. Items that cannot be read are deleted, and computed again.

No engine waits for another. Before an engine deletes old items, it reserves the bytes that it is about to write, with
an empty file whose name states the number of bytes. If several engines do so at once, the last engine sees the
reservations of all others, so the folder never grows beyond its limit. Reservations and partial files are locked while
their engine runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import torch
from safetensors.torch import load, save
from torch import Tensor

from moeserve.cache_kind import CacheKind
from moeserve.errors import SettingsError
from moeserve.kv.connector import ITEM_FILE_ENDING
from moeserve.kv.rank.items import CachedItems
from moeserve.private_folder import make_private_folder
from moeserve.protocol import CachePlace, StoreTransfer, TransferResult

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
RESERVED = ".reserved"
RESERVATION = re.compile(r"[0-9a-f]+\.(?P<num_bytes>\d+)" + re.escape(RESERVED))
CHECKSUM = "checksum"  # name of the tensor beside an item's parts, which are numbered
HEADER_BYTES = 256  # maximum bytes of a file's header for each tensor, and for all else
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
SECONDS_BETWEEN_WARNINGS = 60.0


class FolderStore:
    """A store that copies items of one rank's layers between the KV cache and files of at most `max_bytes` in total.

    The least recently read or written files are deleted to make room for new ones.
    """

    def __init__(self, items: CachedItems, folder: Path, max_bytes: int) -> None:
        """
        Raises:
            SettingsError: the folder cannot be used, or other users may write to it.
        """
        self._tensors = {kind: items.of(kind) for kind in CacheKind}
        self._file_bytes = {
            kind: items.bytes_of(kind) + HEADER_BYTES * (len(tensors) + 2) for kind, tensors in self._tensors.items()
        }
        self._folder, self._max_bytes = folder, max_bytes
        self._next_warning_s = 0.0
        self._make_folders()
        self._device = folder.stat().st_dev
        with contextlib.suppress(OSError):
            self._delete_oldest()  # the limit may have been higher before

    @torch.inference_mode()
    def run(self, transfer: StoreTransfer) -> TransferResult:
        """Run a transfer, and return when it has ended."""
        started, num_copied = time.perf_counter(), 0
        try:
            for _ in self._load_all(transfer) if transfer.is_load else self._save_all(transfer):
                num_copied += 1
        except FileNotFoundError:
            pass  # another engine has deleted an item, or a user has deleted the folder
        except (OSError, SettingsError) as error:
            if time.monotonic() >= self._next_warning_s:
                self._next_warning_s = time.monotonic() + SECONDS_BETWEEN_WARNINGS
                logger.warning("items of the KV cache could not be copied (%s), and will be computed again", error)
        return TransferResult(number=transfer.number, num_copied=num_copied, seconds=time.perf_counter() - started)

    def _paths(self, transfer: StoreTransfer) -> Iterator[tuple[CachePlace, Path]]:
        for place, name in zip(transfer.places, transfer.store_keys, strict=True):
            yield place, self._folder / f"{name}{ITEM_FILE_ENDING}"

    def _save_all(self, transfer: StoreTransfer) -> Iterator[None]:
        """Save items, and yield after each."""
        num_bytes = sum(self._file_bytes[place.kind] for place in transfer.places)
        if num_bytes > self._max_bytes:
            raise OSError(f"{num_bytes} bytes are to be saved, and the folder may hold {self._max_bytes}")
        self._make_folders()  # they may have been deleted
        if self._folder.stat().st_dev != self._device:
            raise OSError(f"{self._folder} is no longer on the file system that it was on at the start")
        with self._locked_file(f".{num_bytes}{RESERVED}"):
            self._delete_oldest()
            for place, path in self._paths(transfer):
                try:
                    self._save(place, path)
                except OSError as error:
                    if error.errno in FULL_DISK:
                        self._delete_oldest(num_bytes)  # so that the next transfer is saved
                    raise
                yield

    def _save(self, place: CachePlace, path: Path) -> None:
        if path.exists():
            return
        parts = [tensor[place.index].cpu().contiguous() for tensor in self._tensors[place.kind]]
        tensors = {str(number): part for number, part in enumerate(parts)}
        tensors[CHECKSUM] = torch.tensor([_checksum(parts)])
        with self._locked_file(PARTIAL) as file:
            file.write(save(tensors))
            file.flush()
            os.replace(file.name, path)

    def _load_all(self, transfer: StoreTransfer) -> Iterator[None]:
        """Load items, and yield after each item.

        An item that cannot be read is deleted, and so are the items after it: all are computed now, and then saved
        again.
        """
        items = list(self._paths(transfer))
        for number, (place, path) in enumerate(items):
            targets = [tensor[place.index] for tensor in self._tensors[place.kind]]
            try:
                with path.open("rb") as file:  # not mapped: a file that shrinks must not end this process
                    parts = _parts(file.read(self._file_bytes[place.kind]), targets)
            except FileNotFoundError:
                raise
            except (OSError, ValueError) as error:
                for _, unread in items[number:]:
                    with contextlib.suppress(OSError):
                        unread.unlink()
                raise OSError(f"{path} cannot be read: {error}") from error
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)
            os.utime(path)
            yield

    def _make_folders(self) -> None:
        make_private_folder("kv_folder", self._folder.parent)
        make_private_folder("kv_folder", self._folder)

    @contextlib.contextmanager
    def _locked_file(self, ending: str) -> Iterator[IO[bytes]]:
        """Make a file that is deleted at the end of the context unless it was renamed.

        The file's lock shows other engines that this engine runs. If this process is killed, they delete the file.
        """
        file = _new_locked_file(self._folder, ending)
        try:
            with file:
                yield file
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name)

    def _delete_oldest(self, num_bytes: int = 0) -> None:
        """Delete the oldest items until the other items and all reservations are within the limit.

        Args:
            num_bytes: delete at least this many bytes of items.
        """
        items, total = [], 0
        for entry in os.scandir(self._folder):
            if entry.name.endswith((PARTIAL, RESERVED)):
                reservation = RESERVATION.fullmatch(entry.name)
                if not _delete_if_abandoned(entry.path) and reservation is not None:
                    total += int(reservation["num_bytes"])
            elif entry.name.endswith(ITEM_FILE_ENDING):
                with contextlib.suppress(FileNotFoundError):  # deleted by another engine
                    status = entry.stat(follow_symlinks=False)
                    items.append((status.st_mtime_ns, status.st_size, entry.path))
                    total += status.st_size
        surplus = max(total - self._max_bytes, num_bytes)
        for _, size, path in sorted(items):
            if surplus <= 0:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            surplus -= size


def _new_locked_file(folder: Path, ending: str) -> IO[bytes]:
    """Return a new file with a lock, which only engines that delete abandoned files try to take."""
    while True:
        file = (folder / f"{secrets.token_hex(8)}{ending}").open("xb")
        with contextlib.suppress(BlockingIOError):  # another engine has locked the file before, and deletes it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:  # else it was deleted before
                return file
        file.close()


def _delete_if_abandoned(path: str) -> bool:
    """Delete a file if the engine that made it was killed. Return True if it was deleted."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    return False


def _parts(data: bytes, targets: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of an item from its file.

    Args:
        targets: tensors of the same shapes and dtypes as the parts.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        tensors = load(data)
    except Exception as error:  # a damaged header can cause errors of many kinds
        raise ValueError(error) from error
    checksum = tensors.pop(CHECKSUM, torch.empty(0))
    expected = {str(number): target for number, target in enumerate(targets)}
    if _forms(tensors) != _forms(expected):
        raise ValueError("it holds other tensors")
    parts = [tensors[name] for name in expected]
    if checksum.tolist() != [_checksum(parts)]:
        raise ValueError("the checksum is wrong")
    return parts


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _checksum(parts: Sequence[Tensor]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part.view(torch.uint8).numpy().data, checksum)
    return checksum
