"""A background thread that stores packed weights in the cache while requests are served."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref

from torch import Tensor, nn

from moeserve.models.packed_cache import PackedWeightCache

DELAY_SECONDS = 5.0  # before writing begins, so that the first requests are not slowed
POLL_SECONDS = 0.1  # between checks for the end of the process
LOWEST_PRIORITY = 19


class CacheWriter(threading.Thread):
    """Stores the packed weights of a model.

    Writing is cancelled when the model is deleted, since the thread holds its memory, and when the process exits, since
    a short run should not wait for the disk. A longer run completes the entry.
    """

    def __init__(self, model: nn.Module, cache: PackedWeightCache, key: str, state: dict[str, Tensor]) -> None:
        # Python waits for it at exit, also where a daemon thread starts it. It would abort if tensors were freed later.
        super().__init__(name="packed weight cache", daemon=False)
        self.cancelled = threading.Event()
        weakref.finalize(model, self.cancelled.set)
        self._cache = cache
        self._key = key
        self._state = state

    def run(self) -> None:
        state, self._state = self._state, {}  # released when this returns
        start = time.monotonic() + DELAY_SECONDS
        while time.monotonic() < start and not self._is_cancelled():
            self.cancelled.wait(POLL_SECONDS)
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # of this thread alone
        self._cache.store(self._key, state, self._is_cancelled)

    def _is_cancelled(self) -> bool:
        return self.cancelled.is_set() or not threading.main_thread().is_alive()


def wait_for_cache_writers(*, cancelled_only: bool = False) -> None:
    """Wait until all writers of this process have finished, or only those that are cancelled."""
    for thread in threading.enumerate():
        if isinstance(thread, CacheWriter) and (thread.cancelled.is_set() or not cancelled_only):
            thread.join()
