"""`GrowingBack`: when an engine starts replicas again that it has left out because they could not be replaced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from moeserve.config.engine_config import EngineConfig
from moeserve.errors import SettingsError

logger = logging.getLogger(__name__)

FIRST_DELAY_S, LONGEST_DELAY_S = 5.0, 600.0


class GrowingBack:
    """Decides when to try again to start replicas that were left out. Each delay is twice the previous delay."""

    def __init__(self, num_wanted: int) -> None:
        self.num_wanted = num_wanted  # number of replicas that the user has set
        self._delay_s = FIRST_DELAY_S
        self._next_s: float | None = None  # time of the next attempt; None: no replica is missing

    def advance(
        self,
        config: EngineConfig,
        config_of: Callable[[int], EngineConfig],
        begin: Callable[[EngineConfig], Future[None]],
    ) -> None:
        """Begin the next attempt if its time has come.

        Args:
            config: the config of the replicas that serve.
            config_of: returns the config of a number of replicas, or raises SettingsError.
            begin: starts replicas beside those that serve.
        """
        if config.failure.on_failure != "recover" or not self._is_due(config.parallel.data_parallel_size):
            return
        try:
            begin(config_of(self.num_wanted)).add_done_callback(_log_failure)
        except SettingsError as error:
            logger.warning("replicas that were left out cannot be started again: %s", error)

    def _is_due(self, num_replicas: int) -> bool:
        now_s = time.monotonic()
        if num_replicas >= self.num_wanted:
            self._delay_s, self._next_s = FIRST_DELAY_S, None
        elif self._next_s is None:
            self._next_s = now_s + self._delay_s
        elif now_s >= self._next_s:
            self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)
            self._next_s = now_s + self._delay_s
            return True
        return False


def _log_failure(done: Future[None]) -> None:
    """Log why an attempt has failed, if it has."""
    if (error := done.exception()) is not None:
        logger.warning("replicas that were left out could not be started again: %s", error)
