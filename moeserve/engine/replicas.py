"""Several replicas as one engine: assigns requests to replicas, receives their results, notices failures, restarts."""

from __future__ import annotations

import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from moeserve.config.settings import EngineConfig
from moeserve.engine.base import fit_to_cache, log_lowered_length
from moeserve.engine.protocol import Delivery, EngineMessage, Ready
from moeserve.errors import EngineError, RequestError
from moeserve.interrupts import interrupts_allowed
from moeserve.processes.failures import as_error, root_cause
from moeserve.processes.supervision import WatchedProcess, wait_for_messages
from moeserve.processes.worker_group import WorkerGroup
from moeserve.protocol import AbortRequest, AddRequest, CollectLoad, Request, RequestUpdate, Shutdown, Wake
from moeserve.scheduling.dp_router import DPRouter
from moeserve.telemetry.expert_load import LoadWindow

logger = logging.getLogger(__name__)

# Time for the replicas to finish their step and agree to end. Seconds.
SECONDS_TO_END = 5.0
# Time that a request waits until the resources of a failed worker group are back. Seconds.
SECONDS_TO_RESTART = 110.0
SECONDS_BETWEEN_STARTS = 1.0


class Replicas:
    """See `Engine`.

    When a process fails, all requests end with an error that names it, all processes are ended, and further
    requests are refused. An engine that restarts starts new processes at the next request instead. It retries for a
    while, until the operator of the cluster has replaced a failed node.
    """

    def __init__(
        self,
        config: EngineConfig,
        start_group: Callable[[], WorkerGroup],
        *,
        restarts: bool = False,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Return when all replicas have loaded the model.

        Args:
            start_group: starts the processes of all replicas.
            close: frees what all worker groups have used, after the last one.

        Raises:
            CheckpointError, SettingsError: found by a rank.
            EngineError: a process failed, or could not be started.
        """
        self.config = config
        self._start_group = start_group
        self._restarts = restarts
        self._close = close
        self._owner = os.getpid()
        self._undelivered: list[RequestUpdate] = []  # received outside a step: the next one returns them
        self._loads: list[LoadWindow] = []  # not returned by `take_loads` yet
        self._in_flight: dict[str, WatchedProcess[EngineMessage]] = {}  # by request: its replica
        self._awaits_load = False  # a window was requested and has not been received
        self._refusal = ""  # why no requests are accepted
        self._is_shut_down = False
        try:
            num_blocks = self._start()
        except BaseException:
            close()
            raise
        self.config = fit_to_cache(config, num_blocks)
        log_lowered_length(config, self.config)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._undelivered)

    @property
    def num_free_blocks(self) -> list[int]:
        """KV cache blocks that each replica has free, as it reported last."""
        self._undelivered = self._receive()
        return list(self._num_free_blocks)

    def add(self, request: Request) -> None:
        self._require_owner()
        self._undelivered = self._receive()  # which returns what was undelivered before
        if self._refusal and self._restarts and not self._is_shut_down:
            self._restart()
        self._require_open()
        if request.request_id in self._in_flight:
            raise RequestError(f"request {request.request_id!r} is still being served; give each request its own id")
        chosen = self._group.engines[self._router.choose(request)]
        self._in_flight[request.request_id] = chosen
        chosen.channel.send(AddRequest(request))
        self._wake_all_but(chosen)

    def abort(self, request_id: str) -> None:
        self._require_owner()
        engine = self._in_flight.get(request_id)
        if engine is not None:
            engine.channel.send(AbortRequest(request_id))

    def step(self, *, interruptible: bool = True) -> list[RequestUpdate]:
        # A Ctrl-C while this process waits ends no request, so it may always be raised.
        self._require_owner()
        updates = self._receive()
        while not updates and self._in_flight:
            wait_for_messages(self._group.members, None)
            updates = self._receive()
        if not updates:
            self._require_open()
        return updates

    def collect_load(self) -> None:
        self._require_owner()
        self._undelivered = self._receive()
        self._require_open()
        self._awaits_load = True
        first = self._group.engines[0]
        first.channel.send(CollectLoad())
        self._wake_all_but(first)

    def take_loads(self, *, wait: bool = False) -> list[LoadWindow]:
        self._require_owner()
        while wait and self._awaits_load:  # a periodic window may arrive before the requested one
            self._require_open()
            wait_for_messages(self._group.members, None)
            self._undelivered = self._receive()
        loads, self._loads = self._loads, []
        return loads

    def shutdown(self) -> None:
        if self._is_shut_down or os.getpid() != self._owner:  # a fork of the owner must leave the engine alone
            return
        self._is_shut_down = True
        if not self._refusal:
            self._refusal = "the engine was shut down; make a new one"
            self._undelivered += self._end_requests(error=None)
            for engine in self._group.engines:
                engine.channel.send(Shutdown())
            self._group.end(SECONDS_TO_END)
            self._end_group.detach()
        self._close()

    def _start(self) -> int:
        """Start the processes. Return the KV cache blocks of each rank once all replicas have loaded the model."""
        self._group = self._start_group()
        self._end_group = weakref.finalize(self, self._group.end)  # also without a call of shutdown
        try:
            num_blocks = self._wait_until_ready()
        except BaseException:
            self._end_group()
            raise
        self._num_free_blocks = [num_blocks] * len(self._group.engines)
        self._router = DPRouter(
            len(self._group.engines),
            num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            salt=secrets.token_bytes(32),
        )
        return num_blocks

    def _restart(self) -> None:
        """Start new processes, and try again until the resources for them are there.

        Raises:
            EngineError: they are not there in time. The next request tries again.
        """
        deadline = time.monotonic() + SECONDS_TO_RESTART
        while True:
            logger.warning("the engine has failed and is restarted")
            try:
                with interrupts_allowed():
                    self._start()
                self._refusal, self._awaits_load = "", False
                return
            except (EngineError, ValueError) as error:  # a node that comes back may be incomplete for a while
                if time.monotonic() > deadline:
                    raise EngineError(f"the engine has failed and could not be restarted: {error}") from error
                logger.warning("restarting failed, trying again: %s", error)
                with interrupts_allowed():
                    time.sleep(SECONDS_BETWEEN_STARTS)

    def _wait_until_ready(self) -> int:
        waiting = {engine.name for engine in self._group.engines}
        num_blocks = 0
        while waiting:
            wait_for_messages(self._group.members, None)
            for engine in self._group.engines:
                for message in engine.receive():
                    if isinstance(message, Ready):  # a replica that is ready may send an empty delivery
                        num_blocks = message.num_blocks
                        waiting.remove(engine.name)
            if self._group.has_failed:
                raise as_error(root_cause(self._group.collect_failures()), "while the model was loaded")
        return num_blocks

    def _wake_all_but(self, engine: WatchedProcess[Any]) -> None:
        """Wake replicas that may be asleep: no step begins without them."""
        for other in self._group.engines:
            if other is not engine:
                other.channel.send(Wake())

    def _receive(self) -> list[RequestUpdate]:
        """Return all updates that have arrived, without waiting. A failure ends all requests."""
        updates, self._undelivered = self._undelivered, []
        if self._refusal:
            return updates
        updates += self._received()
        if self._group.has_failed:
            cause = root_cause(self._group.collect_failures())
            error = str(as_error(cause, f"the engine failed with {len(self._in_flight)} request(s) in flight"))
            self._refusal = f"the engine has failed and takes no requests; make a new one. The failure: {error}"
            updates += self._received()
            updates += self._end_requests(error=error)
            self._end_group()
        return updates

    def _received(self) -> list[RequestUpdate]:
        updates: list[RequestUpdate] = []
        for index, engine in enumerate(self._group.engines):
            for message in engine.receive():
                assert isinstance(message, Delivery), message
                self._num_free_blocks[index] = message.stats.num_free_blocks
                self._router.note_free_blocks(index, message.stats.num_free_blocks)
                self._loads += [] if message.load is None else [message.load]
                self._awaits_load &= not message.answers
                updates += self._of_live_requests(message.updates)
        return updates

    def _of_live_requests(self, updates: Iterable[RequestUpdate]) -> Iterable[RequestUpdate]:
        """Yield the updates of requests that have not ended, and forget requests that end."""
        for update in updates:
            if update.request_id not in self._in_flight:
                continue
            has_ended = update.finish_reason is not None
            self._router.note_update(update.request_id, has_ended=has_ended)
            if has_ended:
                del self._in_flight[update.request_id]
            yield update

    def _end_requests(self, *, error: str | None) -> list[RequestUpdate]:
        request_ids, self._in_flight = list(self._in_flight), {}
        return [RequestUpdate(request_id=name, finish_reason="abort", error=error) for name in request_ids]

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise EngineError(
                f"this engine belongs to process {self._owner} and cannot be used in a fork of it, such as this "
                f"process ({os.getpid()}); make a new LLM here"
            )

    def _require_open(self) -> None:
        if self._refusal:
            raise EngineError(self._refusal)
