"""Several replicas whose processes are started anew when one has died. How they serve, `replicas.py` knows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from moeserve.config.settings import EngineConfig
from moeserve.engine.replicas import Replicas
from moeserve.errors import EngineError
from moeserve.interrupts import interrupts_allowed
from moeserve.protocol import Request, RequestUpdate
from moeserve.telemetry.expert_load import LoadWindow

if TYPE_CHECKING:
    from moeserve.executor.ray import Cluster

logger = logging.getLogger(__name__)

# How long a request waits for the resources of a worker group that has failed to be back. Seconds.
SECONDS_TO_REBUILD = 110.0
SECONDS_BETWEEN_TRIALS = 1.0


class RestartingReplicas:
    """See `Engine`. After a failure, which ends all requests in flight, the next request finds a new worker group.

    The worker group is built when that request comes, and waits for what it needs: a node that has died is replaced by
    whoever runs the cluster.
    """

    def __init__(self, start: Callable[[], Replicas], close: Callable[[], None]) -> None:
        """
        Args:
            start: a worker group that has loaded the model.
            close: gives back what all worker groups used, after the last one.
        """
        self._start = start
        self._close = close
        self._owner = os.getpid()
        try:
            self._replicas = start()
        except BaseException:
            close()
            raise
        self.config = self._replicas.config
        self._left_over: list[RequestUpdate] = []  # of worker groups that have failed
        self._is_open = True

    @classmethod
    def over(cls, config: EngineConfig, cluster: Cluster, *, show_progress: bool) -> RestartingReplicas:
        """On the nodes of a Ray cluster."""
        from moeserve.engine.ray_replica import EngineProcess
        from moeserve.executor.ray import RayWorkerGroup

        def start() -> Replicas:
            return Replicas(config, lambda: RayWorkerGroup(config, cluster, EngineProcess, show_progress=show_progress))

        return cls(start, cluster.close)

    @property
    def has_work(self) -> bool:
        return bool(self._left_over) or self._replicas.has_work

    def add(self, request: Request) -> None:
        if self._is_open and self._owner == os.getpid() and self._replicas.has_failed:
            if self._replicas.has_work:  # the ends of what was in flight: returned at once
                self._left_over += self._replicas.step()
            self._replicas = self._started_anew()
        self._replicas.add(request)

    def abort(self, request_id: str) -> None:
        self._replicas.abort(request_id)

    def step(self) -> list[RequestUpdate]:
        if self._left_over:
            updates, self._left_over = self._left_over, []
            return updates
        return self._replicas.step()

    def collect_load(self) -> None:
        self._replicas.collect_load()

    def take_loads(self, *, wait: bool = False) -> list[LoadWindow]:
        return self._replicas.take_loads(wait=wait)

    def shutdown(self) -> None:
        self._replicas.shutdown()
        if self._is_open and self._owner == os.getpid():
            self._is_open = False
            self._close()

    def _started_anew(self) -> Replicas:
        """Tries until the resources are back, or too long.

        Raises:
            EngineError: as the last trial. The next request tries again.
        """
        deadline = time.monotonic() + SECONDS_TO_REBUILD
        while True:
            logger.warning("the engine has failed and is started anew")
            try:
                with interrupts_allowed():
                    return self._start()
            except (EngineError, ValueError) as error:  # a node that comes back may be half there
                if time.monotonic() > deadline:
                    raise EngineError(f"the engine has failed and could not be started anew: {error}") from error
                logger.warning("not yet: %s", error)
                with interrupts_allowed():
                    time.sleep(SECONDS_BETWEEN_TRIALS)
