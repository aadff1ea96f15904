"""Several replicas as one engine: chooses one for each request, watches their processes, ends them.

Knows messages and deaths. What a replica does between them, `process.py` knows.
"""

from __future__ import annotations

import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterable

from moeserve.config.settings import EngineConfig
from moeserve.engine.base import fit_to_cache, shrinkage
from moeserve.engine.protocol import Delivery, EngineMessage, Ready
from moeserve.engine.worker_group import WorkerGroup
from moeserve.errors import EngineError, RequestError
from moeserve.processes.failures import as_error, root_cause
from moeserve.processes.supervision import WatchedProcess, wait_for_messages
from moeserve.protocol import AbortRequest, AddRequest, CollectLoad, Request, RequestUpdate, Shutdown, Wake
from moeserve.scheduling.dp_router import DPRouter
from moeserve.telemetry.expert_load import LoadWindow

logger = logging.getLogger(__name__)

# How long the replicas may take to finish their step and agree to leave. Seconds.
SECONDS_TO_LEAVE = 5.0


class Replicas:
    """See `Engine`.

    When one of the processes dies, or fails, all requests end with an error that names it, all processes are ended,
    and nothing is admitted any more.
    """

    def __init__(self, config: EngineConfig, start_worker_group: Callable[[], WorkerGroup]) -> None:
        """Returns when all replicas have loaded the model.

        Raises:
            CheckpointError, SettingsError: as the ranks found.
            EngineError: a process died, or could not be started.
        """
        self._owner = os.getpid()
        self._in_flight: dict[str, WatchedProcess[EngineMessage]] = {}  # by request: the replica that serves it
        self._undelivered: list[RequestUpdate] = []  # what came outside a step: the next one returns it
        self._loads: list[LoadWindow] = []  # that nobody has taken
        self._awaits_load = False  # one was asked for, and has not come
        self._closed_because = ""
        self._worker_group = start_worker_group()
        self._end_worker_group = weakref.finalize(self, self._worker_group.end)  # also where nobody calls shutdown
        try:
            num_blocks = self._wait_until_ready()
        except BaseException:
            self._end_worker_group()
            raise
        self._chooser = DPRouter(
            len(self._worker_group.engines),
            num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            salt=secrets.token_bytes(32),
        )
        self.config = fit_to_cache(config, num_blocks)
        if told := shrinkage(config, self.config):
            logger.warning(told)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._undelivered)

    @property
    def has_failed(self) -> bool:
        """Whether a process has died. Looks for deaths; what there is to tell of them, the next step returns."""
        if not self._closed_because:
            self._undelivered = self._news()
        return bool(self._closed_because)

    def add(self, request: Request) -> None:
        self._require_owner()
        self._undelivered = self._news()  # which holds what was undelivered before
        self._require_open()
        if request.request_id in self._in_flight:
            raise RequestError(f"request {request.request_id!r} is still being served; give each request its own id")
        chosen = self._worker_group.engines[self._chooser.choose(request)]
        self._in_flight[request.request_id] = chosen
        chosen.channel.send(AddRequest(request))
        for engine in self._worker_group.engines:
            if engine is not chosen:  # it may be asleep, and no step begins without it
                engine.channel.send(Wake())

    def abort(self, request_id: str) -> None:
        self._require_owner()
        engine = self._in_flight.get(request_id)
        if engine is not None:
            engine.channel.send(AbortRequest(request_id))

    def step(self) -> list[RequestUpdate]:
        self._require_owner()
        updates = self._news()
        while not updates and self._in_flight:
            wait_for_messages(self._worker_group.members, None)
            updates = self._news()
        if not updates:
            self._require_open()
        return updates

    def collect_load(self) -> None:
        self._require_owner()
        self._undelivered = self._news()
        self._require_open()
        first, *others = self._worker_group.engines
        self._awaits_load = True
        first.channel.send(CollectLoad())
        for engine in others:
            engine.channel.send(Wake())

    def take_loads(self, *, wait: bool = False) -> list[LoadWindow]:
        self._require_owner()
        while wait and self._awaits_load:  # one that was not asked for may come first
            self._require_open()
            wait_for_messages(self._worker_group.members, None)
            self._undelivered = self._news()
        loads, self._loads = self._loads, []
        return loads

    def shutdown(self) -> None:
        if self._closed_because or os.getpid() != self._owner:  # a fork of its owner leaves it alone
            return
        self._closed_because = "the engine was shut down; make a new one"
        self._undelivered += self._end_requests(error=None)
        for engine in self._worker_group.engines:
            engine.channel.send(Shutdown())
        self._worker_group.end(SECONDS_TO_LEAVE)
        self._end_worker_group.detach()

    def _wait_until_ready(self) -> int:
        """Blocks of KV cache of each rank, when all are ready."""
        waiting = {engine.name for engine in self._worker_group.engines}
        num_blocks = 0
        while waiting:
            wait_for_messages(self._worker_group.members, None)
            for engine in self._worker_group.engines:
                for message in engine.receive():
                    if isinstance(message, Ready):  # the first deliveries of those that are ready tell nothing
                        num_blocks = message.num_blocks
                        waiting.remove(engine.name)
            if any(member.failures() for member in self._worker_group.members):
                raise as_error(root_cause(self._worker_group.collect_failures()), "while the model was loaded")
        return num_blocks

    def _news(self) -> list[RequestUpdate]:
        """What has come, without waiting. A death is the end of all requests."""
        updates, self._undelivered = self._undelivered, []
        if self._closed_because:
            return updates
        updates += self._received()
        if any(member.failures() for member in self._worker_group.members):
            cause = root_cause(self._worker_group.collect_failures())
            error = str(as_error(cause, f"the engine failed while it served {len(self._in_flight)} requests"))
            self._closed_because = f"the engine has failed and takes no requests; make a new one. It failed so: {error}"
            updates += self._received()
            updates += self._end_requests(error=error)
            self._end_worker_group()
        return updates

    def _received(self) -> list[RequestUpdate]:
        updates: list[RequestUpdate] = []
        for index, engine in enumerate(self._worker_group.engines):
            for message in engine.receive():
                assert isinstance(message, Delivery), message
                self._chooser.note_free_blocks(index, message.stats.num_free_blocks)
                self._loads += [] if message.load is None else [message.load]
                self._awaits_load &= not message.answers
                updates += self._known(message.updates)
        return updates

    def _known(self, updates: Iterable[RequestUpdate]) -> Iterable[RequestUpdate]:
        """The updates of requests that have not ended; strikes off those that end."""
        for update in updates:
            if update.request_id not in self._in_flight:
                continue
            has_ended = update.finish_reason is not None
            self._chooser.note_update(update.request_id, has_ended=has_ended)
            if has_ended:
                del self._in_flight[update.request_id]
            yield update

    def _end_requests(self, *, error: str | None) -> list[RequestUpdate]:
        request_ids, self._in_flight = list(self._in_flight), {}
        return [RequestUpdate(request_id=name, finish_reason="abort", error=error) for name in request_ids]

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise EngineError(
                f"this engine belongs to process {self._owner}, of which this one ({os.getpid()}) is a fork; make an "
                "LLM of its own here, or use it there"
            )

    def _require_open(self) -> None:
        if self._closed_because:
            raise EngineError(self._closed_because)
