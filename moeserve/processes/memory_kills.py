"""`MemoryKills`: which of the processes that end by SIGKILL were killed by the kernel for lack of memory."""

from __future__ import annotations

import threading
from pathlib import Path

from moeserve.cgroups import ROOT, memory_kills, memory_limit
from moeserve.machine import shown_bytes


class MemoryKills:
    """The kernel's count of processes killed for lack of memory. Each kill is the cause of one process's end.

    The kernel only counts the kills of a cgroup. A kill is taken as the cause if the process was alive before it, and
    no other process has ended by it.
    """

    def __init__(self, root: Path = ROOT) -> None:
        """
        Args:
            root: root of the file system with /proc and the mounted cgroups.
        """
        self.root = root
        self._num_explained = 0  # kills that are no cause of a later end
        self._lock = threading.Lock()

    def count(self) -> int:
        """Return the number of kills so far."""
        return memory_kills(self.root)

    def take_cause(self, count_at_start: int) -> str:
        """Return why the kernel has killed a process that ended by SIGKILL, or "" if someone else has.

        Args:
            count_at_start: `count` when the process was started.
        """
        with self._lock:
            num_before = max(count_at_start, self._num_explained)
            if self.count() <= num_before:
                return ""
            self._num_explained = num_before + 1
        limit = memory_limit(self.root)
        shown = "" if limit is None else f" (limit {shown_bytes(limit)})"
        return f"the kernel killed it for lack of memory{shown}"

    def forget(self) -> None:
        """Take earlier kills as the cause of no later end: they were of processes that other processes watch."""
        with self._lock:
            self._num_explained = self.count()


MEMORY_KILLS = MemoryKills()  # of all processes that this process has started
