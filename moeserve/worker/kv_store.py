"""The store behind the KV cache of one rank. `HostStore` has blocks in the host's memory, or in a file without a name.

`kv_folder.py` has the store in a folder.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moeserve.errors import SettingsError
from moeserve.protocol import BlockTransfer, TransferOutcome
from moeserve.worker.kv_copies import CopyStream

logger = logging.getLogger(__name__)


class KVStore(Protocol):
    def run(self, transfer: BlockTransfer) -> TransferOutcome:
        """Run a transfer, and return when it has ended. Raises nothing: `num_copied` counts blocks up to a failure."""
        ...


class HostStore:
    """Copies blocks of all layers between the KV cache and the store."""

    def __init__(self, caches: Sequence[Any], num_blocks: int, folder: str | None) -> None:
        """
        Args:
            caches: of the layers; each has `tensors` whose first dimension is the block.
            folder: where the file of the store lies, which nobody else can open; None: in memory.

        Raises:
            SettingsError: the file cannot be made.
        """
        cached = [tensor for cache in caches for tensor in cache.tensors]
        sizes = [num_blocks * tensor[0].nbytes for tensor in cached]
        self._stream = CopyStream(caches)
        memory = _file(Path(folder), sum(sizes)) if folder is not None else None
        self._pairs: list[tuple[Tensor, Tensor]] = []  # of the cache and of the store
        offset = 0
        for tensor, size in zip(cached, sizes, strict=True):
            shape = num_blocks, *tensor.shape[1:]
            if memory is None:
                stored = torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            else:
                stored = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
                stored = stored.view(tensor.dtype).view(shape)
            self._pairs.append((tensor, stored))
            offset += size

    def run(self, transfer: BlockTransfer) -> TransferOutcome:
        """Run a transfer, and return when it has ended."""
        started, num_copied = time.perf_counter(), len(transfer.block_ids)
        try:
            self._copy(transfer)
        except Exception:
            logger.exception("KV cache blocks could not be copied, and will be computed again")
            num_copied = 0
        return TransferOutcome(number=transfer.number, num_copied=num_copied, seconds=time.perf_counter() - started)

    @torch.inference_mode()
    def _copy(self, transfer: BlockTransfer) -> None:
        places = torch.tensor(transfer.store_keys)
        block_ids = torch.tensor(transfer.block_ids)
        with self._stream.copying():
            for cached, stored in self._pairs:
                source, target = (stored, cached) if transfer.is_load else (cached, stored)
                read, written = (places, block_ids) if transfer.is_load else (block_ids, places)
                blocks = source.index_select(0, read.to(source.device))
                target.index_copy_(0, written.to(target.device), blocks.to(target.device))


def _file(folder: Path, num_bytes: int) -> mmap.mmap:
    """Return the memory of a new file without a name, which the system frees with this process."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk is noticed now
            else:
                file.truncate(num_bytes)
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise SettingsError(f"kv_file={str(folder)!r}: a file of {num_bytes} bytes cannot be made: {error}") from None
