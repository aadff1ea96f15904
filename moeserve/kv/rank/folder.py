"""Items of the KV cache in a persistent folder that several engines share.

Each rank has a separate folder, whose name is a hash of everything except tokens that an item's contents depend on. An
item is one safetensors file, named by its digest and its kind. Files are renamed into place when complete and have a
checksum, so a killed engine leaves no damaged item. Items that cannot be read are computed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moeserve.cache_kind import CacheKind
from moeserve.kv.connector import ITEM_FILE_ENDING
from moeserve.kv.rank.items import CachedItems
from moeserve.private_folder import make_private_folder
from moeserve.protocol import CachePlace, StoreTransfer, TransferResult

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
LOCK = "lock"
SECONDS_TO_LOCK = 5.0
HEADER_BYTES = 2**16  # maximum size of a file's header


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
        self._file_bytes = {kind: items.bytes_of(kind) + HEADER_BYTES for kind in CacheKind}
        self._folder, self._max_bytes = folder, max_bytes
        make_private_folder("kv_folder", folder.parent)
        make_private_folder("kv_folder", folder)
        with contextlib.suppress(OSError), self._with_room(0):
            pass  # entering the context deletes files beyond the limit, which may have been higher before

    @torch.inference_mode()
    def run(self, transfer: StoreTransfer) -> TransferResult:
        """Run a transfer, and return when it has ended."""
        started, num_copied = time.perf_counter(), 0
        paths = [self._folder / f"{name}{ITEM_FILE_ENDING}" for name in transfer.store_keys]
        num_bytes = sum(self._file_bytes[place.kind] for place in transfer.places)
        try:
            with contextlib.nullcontext() if transfer.is_load else self._with_room(num_bytes):
                for place, path in zip(transfer.places, paths, strict=True):
                    (self._load if transfer.is_load else self._save)(place, path)
                    num_copied += 1
        except FileNotFoundError:
            pass  # another engine has deleted the file
        except (OSError, SafetensorError, _DamageError) as error:
            logger.warning("an item of the KV cache could not be copied (%s), and will be computed again", error)
        return TransferResult(number=transfer.number, num_copied=num_copied, seconds=time.perf_counter() - started)

    def _save(self, place: CachePlace, path: Path) -> None:
        if path.exists():
            return
        parts = [tensor[place.index].cpu().contiguous() for tensor in self._tensors[place.kind]]
        tensors = {str(number): part for number, part in enumerate(parts)}
        partial = self._folder / f"{secrets.token_hex(8)}{PARTIAL}"
        try:
            save_file(tensors, partial, {"checksum": str(_checksum(tensors))})
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _load(self, place: CachePlace, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, this is no dict
                checksum = (file.metadata() or {}).get("checksum")
            if checksum != str(_checksum(tensors)) or len(tensors) != len(self._tensors[place.kind]):
                raise _DamageError(f"{path} is damaged")
        except (SafetensorError, _DamageError):
            path.unlink(missing_ok=True)
            raise
        for number, tensor in enumerate(self._tensors[place.kind]):
            tensor[place.index].copy_(tensors[str(number)])
        os.utime(path)

    @contextlib.contextmanager
    def _with_room(self, num_bytes: int) -> Iterator[None]:
        """Delete the oldest files until `num_bytes` fit, and prevent other engines from writing in this context."""
        if num_bytes > self._max_bytes:
            raise OSError(f"{num_bytes} bytes are to be saved, and the folder may hold {self._max_bytes}")
        with (self._folder / LOCK).open("wb") as file:
            deadline = time.monotonic() + SECONDS_TO_LOCK
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            self._delete_down_to(self._max_bytes - num_bytes)
            yield

    def _delete_down_to(self, num_bytes: int) -> None:
        """Delete the oldest files, and all partial ones.

        Partial files belong to killed engines, because an engine holds the lock while it writes.
        """
        found, total = [], 0
        for entry in os.scandir(self._folder):
            if entry.name.endswith(PARTIAL):
                os.unlink(entry)
            elif entry.name.endswith(ITEM_FILE_ENDING):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, entry.path))
                total += status.st_size
        for _, size, path in sorted(found):
            if total <= num_bytes:
                break
            os.unlink(path)
            total -= size


class _DamageError(Exception):
    pass


def _checksum(tensors: dict[str, Tensor]) -> int:
    checksum = 0
    for name in sorted(tensors, key=int):
        tensor = tensors[name]
        checksum = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode(), checksum)
        checksum = zlib.crc32(tensor.view(torch.uint8).numpy().data, checksum)
    return checksum
