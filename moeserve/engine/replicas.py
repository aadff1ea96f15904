"""Several replicas as one engine: chooses one for each request, watches their processes, ends them.

Knows messages and deaths. What a replica does between them, `process.py` knows.
"""

from __future__ import annotations

import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moeserve.config import EngineConfig
from moeserve.engine.base import fit_to_cache, shrinkage
from moeserve.engine.border import Delivery, EngineMessage, Ready
from moeserve.engine.gang import Gang
from moeserve.errors import EngineError, RequestError
from moeserve.messages import (
    AbortRequest,
    AddRequest,
    CollectLoad,
    Request,
    RequestUpdate,
    Shutdown,
    Wake,
)
from moeserve.processes import Watched, as_error, root_cause, wait_for_news
from moeserve.scheduling.block_pool import num_blocks_for
from moeserve.scheduling.choice import Candidate, PrefixMemory, choose_replica, prompt_digests
from moeserve.telemetry.expert_load import LoadWindow

logger = logging.getLogger(__name__)

# How long the replicas may take to finish their step and agree to leave. Seconds.
SECONDS_TO_LEAVE = 5.0


@dataclass(eq=False)
class ReplicaProcess:
    """A replica, as the user's process sees it."""

    process: Watched[EngineMessage]
    memory: PrefixMemory  # of its prefix cache
    num_free_blocks: int  # as it last said
    num_requests: int = 0  # in flight
    num_blocks_waiting: int = 0  # of prompts whose first token has not come


@dataclass(eq=False)
class InFlight:
    """A request that has not ended."""

    replica: ReplicaProcess
    num_blocks_waiting: int  # of its prompt; 0 once there was news of it


class Replicas:
    """See `Engine`.

    When one of the processes dies, or fails, all requests end with an error that names it, all processes are ended,
    and nothing is admitted any more.
    """

    def __init__(self, config: EngineConfig, start_gang: Callable[[], Gang]) -> None:
        """Returns when all replicas have loaded the model.

        Raises:
            CheckpointError, SettingsError: as the ranks found.
            EngineError: a process died, or could not be started.
        """
        self._owner = os.getpid()
        self._in_flight: dict[str, InFlight] = {}
        self._undelivered: list[RequestUpdate] = []  # what came outside a step: the next one returns it
        self._loads: list[LoadWindow] = []  # that nobody has taken
        self._closed_because = ""
        self._salt = secrets.token_bytes(32)
        self._gang = start_gang()
        self._end_gang = weakref.finalize(self, self._gang.end)  # also where nobody calls shutdown
        try:
            num_blocks = self._wait_until_ready()
        except BaseException:
            self._end_gang()
            raise
        self._replicas = [ReplicaProcess(each, PrefixMemory(num_blocks), num_blocks) for each in self._gang.engines]
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
        chosen, num_blocks = self._choose(request)
        self._in_flight[request.request_id] = InFlight(chosen, num_blocks)
        chosen.num_requests += 1
        chosen.num_blocks_waiting += num_blocks
        chosen.process.channel.send(AddRequest(request))
        for replica in self._replicas:
            if replica is not chosen:  # it may be asleep, and no step begins without it
                replica.process.channel.send(Wake())

    def abort(self, request_id: str) -> None:
        self._require_owner()
        request = self._in_flight.get(request_id)
        if request is not None:
            request.replica.process.channel.send(AbortRequest(request_id))

    def step(self) -> list[RequestUpdate]:
        self._require_owner()
        updates = self._news()
        while not updates and self._in_flight:
            wait_for_news(self._gang.members, None)
            updates = self._news()
        if not updates:
            self._require_open()
        return updates

    def collect_load(self) -> None:
        self._require_owner()
        self._undelivered = self._news()
        self._require_open()
        first, *others = self._replicas
        first.process.channel.send(CollectLoad())
        for replica in others:
            replica.process.channel.send(Wake())

    def take_loads(self, *, wait: bool = False) -> list[LoadWindow]:
        self._require_owner()
        while wait and not self._loads:
            self._require_open()
            wait_for_news(self._gang.members, None)
            self._undelivered = self._news()
        loads, self._loads = self._loads, []
        return loads

    def shutdown(self) -> None:
        if self._closed_because or os.getpid() != self._owner:  # a fork of its owner leaves it alone
            return
        self._closed_because = "the engine was shut down; make a new one"
        self._undelivered += self._end_requests(error=None)
        for engine in self._gang.engines:
            engine.channel.send(Shutdown())
        self._gang.end(SECONDS_TO_LEAVE)
        self._end_gang.detach()

    def _wait_until_ready(self) -> int:
        """Blocks of KV cache of each rank, when all are ready."""
        waiting = {engine.name for engine in self._gang.engines}
        num_blocks = 0
        while waiting:
            wait_for_news(self._gang.members, None)
            for engine in self._gang.engines:
                for message in engine.receive():
                    if isinstance(message, Ready):  # the first deliveries of those that are ready tell nothing
                        num_blocks = message.num_blocks
                        waiting.remove(engine.name)
            if any(member.deaths() for member in self._gang.members):
                raise as_error(root_cause(self._gang.collect_deaths()), "while the model was loaded")
        return num_blocks

    def _choose(self, request: Request) -> tuple[ReplicaProcess, int]:
        """A replica for a request, and how many blocks of its prompt it will have to compute."""
        num_blocks = num_blocks_for(len(request.prompt_token_ids), self.config.block_size)
        digests: list[bytes] = []
        if self.config.enable_prefix_caching and len(self._replicas) > 1:
            digests = prompt_digests(request, self.config.block_size, self._salt)
        candidates = [
            Candidate(
                num_free_blocks=replica.num_free_blocks,
                num_requests=replica.num_requests,
                num_blocks_waiting=replica.num_blocks_waiting,
                num_cached_blocks=replica.memory.num_known(digests),
            )
            for replica in self._replicas
        ]
        index = choose_replica(candidates, num_blocks)
        self._replicas[index].memory.remember(digests)
        return self._replicas[index], num_blocks - candidates[index].num_cached_blocks

    def _news(self) -> list[RequestUpdate]:
        """What has come, without waiting. A death is the end of all requests."""
        updates, self._undelivered = self._undelivered, []
        if self._closed_because:
            return updates
        updates += self._received()
        if any(member.deaths() for member in self._gang.members):
            cause = root_cause(self._gang.collect_deaths())
            error = str(as_error(cause, f"the engine failed while it served {len(self._in_flight)} requests"))
            self._closed_because = f"the engine has failed and takes no requests; make a new one. It failed so: {error}"
            updates += self._received()
            updates += self._end_requests(error=error)
            self._end_gang()
        return updates

    def _received(self) -> list[RequestUpdate]:
        updates: list[RequestUpdate] = []
        for replica in self._replicas:
            for message in replica.process.receive():
                assert isinstance(message, Delivery), message
                replica.num_free_blocks = message.stats.num_free_blocks
                self._loads += [] if message.load is None else [message.load]
                updates += self._known(message.updates)
        return updates

    def _known(self, updates: Iterable[RequestUpdate]) -> Iterable[RequestUpdate]:
        """The updates of requests that have not ended; strikes off those that end."""
        for update in updates:
            request = self._in_flight.get(update.request_id)
            if request is None:
                continue
            request.replica.num_blocks_waiting -= request.num_blocks_waiting
            request.num_blocks_waiting = 0
            if update.finish_reason is not None:
                request.replica.num_requests -= 1
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
