"""The restart after a failure, retried until there are resources for new processes, if need be with fewer replicas."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from moeserve.config.engine_config import EngineConfig
from moeserve.errors import EngineError, SettingsError, WeightsChangedError
from moeserve.interrupts import interrupts_allowed

logger = logging.getLogger(__name__)

# Seconds within which the resources of a failed worker group must be available again.
SECONDS_TO_RESTART = 110.0
SECONDS_BETWEEN_STARTS = 1.0
# Seconds for which starts of one size may fail before another replica is dropped.
SECONDS_TO_SHRINK = 10.0


def restart(
    start: Callable[[EngineConfig], None],
    config: EngineConfig,
    shrink: Callable[[EngineConfig], EngineConfig],
    is_cancelled: Callable[[], bool],
) -> None:
    """Start new processes, and retry until the resources for them are available.

    Args:
        start: starts the processes, and returns when they serve.
        shrink: returns the config to use after starts have failed for a while; it may be the same config.

    Raises:
        EngineError: the resources are not available in time, or the restart was cancelled.
        WeightsChangedError: other attempts would find the same changed files.
    """
    deadline = time.monotonic() + SECONDS_TO_RESTART
    first_failure_s: float | None = None  # time of the first failure of this size
    while True:
        try:
            with interrupts_allowed():
                start(config)
            return
        except WeightsChangedError:
            raise
        except (EngineError, ValueError, OSError) as error:  # a node that rejoins may be incomplete for a while
            now = time.monotonic()
            if now > deadline or is_cancelled():
                raise EngineError(f"the engine could not be restarted: {error}") from error
            logger.warning("restarting failed, trying again: %s", error)
            with interrupts_allowed():
                time.sleep(SECONDS_BETWEEN_STARTS)
            first_failure_s = now if first_failure_s is None else first_failure_s
            if now - first_failure_s >= SECONDS_TO_SHRINK:
                config, first_failure_s = shrink(config), None


def next_smaller(config: EngineConfig, config_of: Callable[[int], EngineConfig]) -> EngineConfig:
    """Return the config of the next smaller number of replicas that is possible; `config` if there is none.

    Args:
        config_of: returns the config of a number of replicas, or raises an error.
    """
    for size in range(config.parallel.data_parallel_size - 1, 0, -1):
        try:
            return config_of(size)
        except (SettingsError, EngineError) as error:
            logger.warning("the engine cannot have %d replica(s): %s", size, error)
    return config
