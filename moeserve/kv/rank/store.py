"""The store behind the KV cache of one rank. `HostStore` holds items in host memory, or in a file without a name.

The store in a folder is in `folder.py`.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moeserve.cache_kind import CacheKind
from moeserve.errors import SettingsError
from moeserve.kv.rank.items import CachedItems, indices_by_kind
from moeserve.protocol import StoreTransfer, TransferResult

logger = logging.getLogger(__name__)


class KVStore(Protocol):
    def run(self, transfer: StoreTransfer) -> TransferResult:
        """Run a transfer, and return when it has ended.

        Does not raise exceptions; `num_copied` of the result is the number of items copied before a failure.
        """
        ...


class HostStore:
    """A store that copies items of all layers between the KV cache and host memory or a file."""

    def __init__(self, items: CachedItems, num_places: Mapping[CacheKind, int], folder: str | None) -> None:
        """
        Args:
            num_places: number of places of the store for items of each kind.
            folder: folder of the store's file, which no other process can open; None: the store is in memory.

        Raises:
            SettingsError: the file cannot be created.
        """
        self._items = items
        sizes = {kind: items.bytes_of(kind) * number for kind, number in num_places.items()}
        memory = _file(Path(folder), sum(sizes.values())) if folder is not None else None
        self._pairs: dict[CacheKind, list[tuple[Tensor, Tensor]]] = {}  # pairs of a cache tensor and a store tensor
        offset = 0
        for kind, number in num_places.items():
            self._pairs[kind] = pairs = []
            for tensor in items.of(kind):
                shape = number, *tensor.shape[1:]
                size = number * tensor.nbytes // max(len(tensor), 1)
                if memory is None or not size:
                    stored = torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                else:
                    stored = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
                    stored = stored.view(tensor.dtype).view(shape)
                pairs.append((tensor, stored))
                offset += size

    def run(self, transfer: StoreTransfer) -> TransferResult:
        """Run a transfer, and return when it has ended."""
        started, num_copied = time.perf_counter(), len(transfer.places)
        try:
            self._copy(transfer)
        except Exception:
            logger.exception("items of the KV cache could not be copied, and will be computed again")
            num_copied = 0
        return TransferResult(number=transfer.number, num_copied=num_copied, seconds=time.perf_counter() - started)

    @torch.inference_mode()
    def _copy(self, transfer: StoreTransfer) -> None:
        with self._items.copying():
            for kind, numbers in indices_by_kind(transfer.places).items():
                in_store = torch.tensor([transfer.store_keys[number] for number in numbers])
                in_cache = torch.tensor([transfer.places[number].index for number in numbers])
                for cached, stored in self._pairs[kind]:
                    source, target = (stored, cached) if transfer.is_load else (cached, stored)
                    read, written = (in_store, in_cache) if transfer.is_load else (in_cache, in_store)
                    copies = source.index_select(0, read.to(source.device))
                    target.index_copy_(0, written.to(target.device), copies.to(target.device))


def _file(folder: Path, num_bytes: int) -> mmap.mmap:
    """Return the mapped memory of a new file without a name, which the system deletes when this process exits."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # so that a full disk is an error now, not later
            else:
                file.truncate(num_bytes)
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise SettingsError(f"kv_file={str(folder)!r}: a file of {num_bytes} bytes cannot be made: {error}") from None
