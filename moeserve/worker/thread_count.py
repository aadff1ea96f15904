"""Fewer threads while a container may use fewer cores than when its rank started.

With more threads than a quota allows, the system stops all threads for the rest of each period of the quota, 100 ms by
default.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from moeserve.machine import usable_cores
from moeserve.ops.native import set_num_threads

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 5.0  # a look takes 2 ms


class ThreadCount:
    """The number of threads of a rank's steps, adapted to the cores that may be used."""

    def __init__(
        self,
        most: int,
        cores: Callable[[], int] = usable_cores,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            most: number of threads while all cores of the start may be used.
            cores: returns the number of cores that may be used now.
            now: returns seconds.
        """
        self.number = self._most = most
        self._cores, self._now = cores, now
        self._cores_at_start, self._looked_at = cores(), now()
        set_num_threads(most)

    def update(self, prepare_thread: Callable[[], None]) -> None:
        """Adapt the number of threads to the cores that may be used, at most once every few seconds.

        Called between steps.

        Args:
            prepare_thread: prepares the calling thread for steps with `number` threads.
        """
        now = self._now()
        if now - self._looked_at < SECONDS_BETWEEN_LOOKS:
            return
        self._looked_at = now
        cores = self._cores()
        number = max(1, min(self._most, self._most * cores // self._cores_at_start))
        if number != self.number:
            logger.info("%d of %d cores may be used; steps have %d threads", cores, self._cores_at_start, number)
            self.number = number
            set_num_threads(number)
            prepare_thread()
