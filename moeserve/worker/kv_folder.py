"""Blocks of the KV cache in a folder, which engines share and which outlives them.

Each rank has a folder of its own, named by all that decides the contents of a block beside its tokens. A block is one
safetensors file, named by its digest. Files appear whole, by renaming, and have a checksum, so an engine that is killed
leaves no damaged block; whatever cannot be read is computed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moeserve.private_folder import make_private_folder
from moeserve.protocol import BlockTransfer, TransferOutcome
from moeserve.worker.protocol import BLOCK_FILE_ENDING

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
LOCK = "lock"
SECONDS_TO_LOCK = 5.0
HEADER_BYTES = 2**16  # of a file, at most


class FolderStore:
    """Copies blocks of all layers of one rank between the KV cache and files. At most `max_bytes` are in the folder.

    The files that were not read or written for the longest time are deleted for new ones.
    """

    def __init__(self, caches: Sequence[Any], folder: Path, max_bytes: int) -> None:
        """
        Args:
            caches: of the layers; each has `tensors` whose first dimension is the block.

        Raises:
            SettingsError: the folder cannot be used, or others may write there.
        """
        self._cached = [tensor for cache in caches for tensor in cache.tensors]
        self._block_bytes = sum(tensor[0].nbytes for tensor in self._cached) + HEADER_BYTES
        self._folder, self._max_bytes = folder, max_bytes
        make_private_folder("kv_folder", folder.parent)
        make_private_folder("kv_folder", folder)
        with contextlib.suppress(OSError), self._with_room(0):
            pass  # deletes what is beyond the limit, which may have been higher before

    @torch.inference_mode()
    def run(self, transfer: BlockTransfer) -> TransferOutcome:
        """Run a transfer, and return when it has ended."""
        started, num_copied = time.perf_counter(), 0
        paths = [
            self._folder / f"{digest.hex()}{BLOCK_FILE_ENDING}"
            for digest in transfer.store_keys
            if isinstance(digest, bytes)
        ]
        try:
            with contextlib.nullcontext() if transfer.is_load else self._with_room(len(paths)):
                for block_id, path in zip(transfer.block_ids, paths, strict=True):
                    (self._load if transfer.is_load else self._save)(block_id, path)
                    num_copied += 1
        except FileNotFoundError:
            pass  # another engine has deleted it
        except (OSError, SafetensorError, _DamageError) as error:
            logger.warning("a block of the KV cache could not be copied (%s), and will be computed again", error)
        return TransferOutcome(number=transfer.number, num_copied=num_copied, seconds=time.perf_counter() - started)

    def _save(self, block_id: int, path: Path) -> None:
        if path.exists():
            return
        tensors = {str(index): tensor[block_id].cpu().contiguous() for index, tensor in enumerate(self._cached)}
        partial = self._folder / f"{secrets.token_hex(8)}{PARTIAL}"
        try:
            save_file(tensors, partial, {"checksum": str(_checksum(tensors))})
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _load(self, block_id: int, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, this is no dict
                checksum = (file.metadata() or {}).get("checksum")
            if checksum != str(_checksum(tensors)) or len(tensors) != len(self._cached):
                raise _DamageError(f"{path} is damaged")
        except (SafetensorError, _DamageError):
            path.unlink(missing_ok=True)
            raise
        for index, tensor in enumerate(self._cached):
            tensor[block_id].copy_(tensors[str(index)])
        os.utime(path)

    @contextlib.contextmanager
    def _with_room(self, num_blocks: int) -> Iterator[None]:
        """Delete the oldest files until more blocks fit, and keep other engines from writing meanwhile."""
        num_bytes = num_blocks * self._block_bytes
        if num_bytes > self._max_bytes:
            raise OSError(f"{num_blocks} blocks take {num_bytes} bytes, and the folder may hold {self._max_bytes}")
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
        """Delete the oldest files, and all partial ones: engines that write hold the lock, so theirs were killed."""
        found, total = [], 0
        for entry in os.scandir(self._folder):
            if entry.name.endswith(PARTIAL):
                os.unlink(entry)
            elif entry.name.endswith(BLOCK_FILE_ENDING):
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
