"""Background threads that store packed weights in the cache, or check them, while requests are served."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref

from torch import Tensor, nn

from moeserve.models.checkpoint.packed_cache import Entry, PackedWeightCache

DELAY_SECONDS = 5.0  # delay before writing, so that the first requests are not slowed down
POLL_SECONDS = 0.1  # interval between checks whether the process is exiting
LOWEST_PRIORITY = 19


class CacheChecker(threading.Thread):
    """A thread that reads the mapped weights of a model once, and removes their cache entry if it is damaged.

    The engine starts without waiting for this check. If the disk is damaged, tokens computed meanwhile may be wrong.
    """

    def __init__(self, model: nn.Module, cache: PackedWeightCache, key: str, entry: Entry) -> None:
        super().__init__(name="packed weight check", daemon=False)  # see `CacheWriter` for the reason
        self.cancelled = threading.Event()
        weakref.finalize(model, self.cancelled.set)
        self.damage = ""  # description of the damage; empty: none found
        self._cache, self._key, self._entry = cache, key, entry

    def run(self) -> None:
        entry = self._entry
        del self._entry  # so that the tensors are released when this method returns
        _yield_to_others()
        name = entry.damaged_tensor(lambda: self.cancelled.is_set() or not threading.main_thread().is_alive())
        if name is not None:
            self._cache.remove(self._key)
            self.damage = f"{entry.path} was damaged (the checksum of {name} differs) and is removed"


class CacheWriter(threading.Thread):
    """A thread that stores the packed weights of a model in the cache.

    Writing is cancelled when the model is deleted, because the thread holds the model's memory. It is also cancelled
    when the process exits, because a short run should not wait for the disk. A longer run completes the entry.
    """

    def __init__(self, model: nn.Module, cache: PackedWeightCache, key: str, state: dict[str, Tensor]) -> None:
        # daemon=False, even if a daemon thread starts this thread, so that Python waits for it at exit. If it freed
        # tensors after the exit, the process would abort.
        super().__init__(name="packed weight cache", daemon=False)
        self.cancelled = threading.Event()
        weakref.finalize(model, self.cancelled.set)
        self._cache = cache
        self._key = key
        self._state = state

    def run(self) -> None:
        state, self._state = self._state, {}  # so that the tensors are released when this method returns
        start = time.monotonic() + DELAY_SECONDS
        while time.monotonic() < start and not self._is_cancelled():
            self.cancelled.wait(POLL_SECONDS)
        _yield_to_others()
        self._cache.store(self._key, state, self._is_cancelled)

    def _is_cancelled(self) -> bool:
        return self.cancelled.is_set() or not threading.main_thread().is_alive()


def _yield_to_others() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # priority of this thread only


def wait_for_cache_writers(*, cancelled_only: bool = False) -> None:
    """Wait until all writers and checkers of this process have finished; with `cancelled_only`, only cancelled ones."""
    for thread in threading.enumerate():
        if isinstance(thread, CacheWriter | CacheChecker) and (thread.cancelled.is_set() or not cancelled_only):
            thread.join()
