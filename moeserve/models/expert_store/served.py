"""`ServedStore`: a rank's experts on disk while the engine serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from moeserve.machine import free_memory, shown_bytes
from moeserve.ops.products.cpu import CpuExpertStore
from moeserve.protocol import ChunkResult

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0  # a look at free memory takes 2 ms
LEAST_FREE_BYTES = 32 * 2**20
LEAST_FREE_SHARE = 32  # as many bytes must be free as this part of the experts in memory


def least_free(num_bytes: int) -> int:
    """Return the free bytes below which memory for experts of this size shrinks."""
    return max(LEAST_FREE_BYTES, num_bytes // LEAST_FREE_SHARE)


class ServedStore:
    """A store whose errors reach the requests that they concern, and which shrinks when memory becomes scarce."""

    def __init__(
        self,
        store: CpuExpertStore,
        least_slots: int,
        free: Callable[[], int] = free_memory,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            least_slots: experts of each layer that stay in memory at a time, however scarce it is.
            free: returns the bytes that this process could allocate, if others that share the host take as many.
            now: returns seconds.
        """
        self.store = store
        self._least_slots, self._free, self._now = least_slots, free, now
        self._looked_at = now()

    def begin_step(self) -> None:
        """Halve the memory for experts if too little is free. Called before each step; most calls do nothing."""
        now = self._now()
        if now - self._looked_at < SECONDS_BETWEEN_LOOKS:
            return
        self._looked_at = now
        before = self.store.num_bytes
        if (free := self._free()) >= least_free(before):
            return
        self.store.shrink(self._least_slots)
        if (num_bytes := self.store.num_bytes) < before:
            logger.warning(
                "only %s of memory are free: experts now take %s instead of %s, and more are read from disk, until the "
                "next start",
                *map(shown_bytes, (free, num_bytes, before)),
            )

    def with_errors(self, chunks: list[ChunkResult]) -> list[ChunkResult]:
        """Log the experts that the last step could not read, and name the first in the results that lack them."""
        errors = self.store.take_errors()
        for error in errors:
            logger.error(error)
        if not errors:
            return chunks
        return [
            chunk if chunk.error is None else msgspec.structs.replace(chunk, error=f"{chunk.error} ({errors[0]})")
            for chunk in chunks
        ]
