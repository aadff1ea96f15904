"""Several replicas as one engine: assigns requests to replicas, receives their results, notices failures, restarts."""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from moeserve.config.settings import EngineConfig
from moeserve.engine.base import (
    Ownership,
    fit_to_cache,
    log_lowered_length,
    require_encodable,
    require_new,
    stats_at_start,
)
from moeserve.engine.protocol import Delivery, EngineMessage, Ready
from moeserve.errors import EngineError
from moeserve.interrupts import interrupts_allowed
from moeserve.processes.channel import frame
from moeserve.processes.failures import FailureReport, as_error, root_cause
from moeserve.processes.supervision import ProcessPoll, WatchedProcess, wait_for_messages
from moeserve.processes.wake_up import WakeUp
from moeserve.processes.worker_group import WorkerGroup
from moeserve.protocol import AbortRequest, AddRequest, CollectLoad, Request, RequestUpdate, Sample, Shutdown, Wake
from moeserve.scheduling.dp_router import DPRouter
from moeserve.telemetry.expert_load import LoadWindow

logger = logging.getLogger(__name__)

# Time for the replicas to finish their step and agree to end. Seconds.
SECONDS_TO_END = 5.0
# Time in which the resources of a failed worker group must be back. Seconds.
SECONDS_TO_RESTART = 110.0
SECONDS_BETWEEN_STARTS = 1.0
# Interval in which a start looks whether the engine is to end. Seconds.
SECONDS_BETWEEN_LOOKS = 0.2
# Time for ranks that have loaded the model to name those that have not. Seconds.
SECONDS_TO_NAME_A_RANK = 10.0
# Restarts without a new token of a request, after which the next failure ends it: it may be the cause.
MAX_FRUITLESS_RESTARTS = 3
WAKE = frame(Wake())
# Times `step_timeout` without a message, after which the replicas' processes hang. They report ranks that hang earlier.
MOST_SILENT_STEPS = 2


@dataclass(eq=False)
class _InFlight:
    """A request that has not ended."""

    request: Request
    engine: WatchedProcess[EngineMessage]  # of its replica
    token_ids: list[int] = field(default_factory=list)  # received
    is_aborted: bool = False  # its end is on its way
    num_failures: int = 0  # of the engine since its last token

    def resumed(self) -> Request:
        """Return the request that continues after the tokens that were received."""
        return msgspec.structs.replace(self.request, output_token_ids=self.request.output_token_ids + self.token_ids)


class Replicas:
    """See `Engine`.

    When a process fails, all processes are ended. Then either all requests end with an error that names the process,
    and further requests are refused; or, with on_failure="restart", new processes are started and the requests continue
    after the tokens that were received. A restart is retried for a while, until the operator of the cluster has
    replaced a failed node. Without requests the next one restarts the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        start_group: Callable[[], WorkerGroup],
        *,
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
        self._close = close
        self._ownership = Ownership()
        self._wake_up = WakeUp()
        self._undelivered: list[RequestUpdate] = []  # received, and not returned by `step` yet
        self._loads: list[LoadWindow] = []  # not returned by `take_loads` yet
        self._in_flight: dict[str, _InFlight] = {}
        self._awaits_load = False  # a window was requested and has not been received
        self._must_wake = False  # replicas may be asleep, and one has work
        self._has_sleepers = False  # a request was sent while others ran, without waking the other replicas
        self._last_message_s = 0.0  # or the first request, if that was later
        self._failure = ""  # why there are no processes; empty while they run
        self._is_shut_down = False
        self._is_ending = False  # no restart should go on
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
    def has_failed(self) -> bool:
        return bool(self._failure)

    @property
    def refusal(self) -> str:
        if self._failure and self.config.on_failure == "end":
            return f"the engine has failed and takes no requests; make a new one. The failure: {self._failure}"
        return "the engine was shut down; make a new one" if self._is_shut_down else ""

    @property
    def num_free_blocks(self) -> list[int]:
        """KV cache blocks that each replica has free, as it reported last. A failure is noticed here too."""
        self._receive()
        return [stats.num_free_blocks for stats in self.replica_stats]

    def add(self, request: Request, samples: Sequence[Sample] = ()) -> None:
        self._ownership.require()
        self._receive()
        if self._failure and not self.refusal:
            self._awaits_load = False  # the call that waited has raised
            self._restart()
        self._require_open()
        require_new([request.request_id, *(sample.request_id for sample in samples)], self._in_flight)
        self._send(request, samples)

    def abort(self, request_id: str) -> None:
        self._ownership.require()
        if (known := self._in_flight.get(request_id)) is not None:
            known.is_aborted = True
            known.engine.channel.send(AbortRequest(request_id))

    def step(self) -> list[RequestUpdate]:
        self._ownership.require()
        self._wake_sleepers()
        self._receive()
        if self._failure and self.config.on_failure == "restart" and not (self._is_shut_down or self._is_ending):
            self._undelivered += self._resume()  # without requests too: the next one should find an engine
        while not self._undelivered and self._in_flight and not self._wake_up.take():
            self._wait()
            self._receive()
        updates, self._undelivered = self._undelivered, []
        if not updates and not self._in_flight:
            self._require_open()
        return updates

    def wake(self) -> None:
        self._wake_up.wake()

    def cancel_restart(self) -> None:
        self._is_ending = True

    def collect_load(self) -> None:
        self._ownership.require()
        self._receive()
        self._require_open()
        self._request_load()

    def take_loads(self, *, wait: bool = False) -> list[LoadWindow]:
        self._ownership.require()
        was_woken = False
        while wait and self._awaits_load:  # a periodic window may arrive before the requested one
            self._require_open()
            was_woken |= self._wake_up.take()  # which would end every wait
            self._wait()
            self._receive()
        if was_woken:
            self._wake_up.wake()  # the next step that waits
        loads, self._loads = self._loads, []
        return loads

    def shutdown(self) -> None:
        if self._is_shut_down or not self._ownership.is_owner:  # a fork of the owner must leave the engine alone
            return
        self._is_shut_down = True
        self._undelivered += self._end_requests(list(self._in_flight), error=None)
        if not self._failure:
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
        self.num_blocks = num_blocks
        self.replica_stats = [stats_at_start(num_blocks)] * len(self._group.engines)
        self._poll = ProcessPoll(self._group.members, self._wake_up.fd)
        self._index_of = {engine: index for index, engine in enumerate(self._group.engines)}
        self._router = DPRouter(
            len(self._group.engines),
            num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            salt=secrets.token_bytes(32),
        )
        return num_blocks

    def _request_load(self) -> None:
        self._awaits_load = True
        self._group.engines[0].channel.send(CollectLoad())
        self._must_wake = True

    def _restart(self) -> None:
        """Start new processes, and try again until the resources for them are there.

        Raises:
            EngineError: they are not there in time.
        """
        deadline = time.monotonic() + SECONDS_TO_RESTART
        while True:
            try:
                with interrupts_allowed():
                    self._start()
                self._failure = ""
                if self._awaits_load:
                    self._request_load()
                return
            except (EngineError, ValueError, OSError) as error:  # a node that comes back may be incomplete for a while
                if time.monotonic() > deadline or self._is_ending:
                    raise EngineError(f"the engine could not be restarted: {error}") from error
                logger.warning("restarting failed, trying again: %s", error)
                with interrupts_allowed():
                    time.sleep(SECONDS_BETWEEN_STARTS)

    def _wait_until_ready(self) -> int:
        deadline = time.monotonic() + self.config.load_timeout + SECONDS_TO_NAME_A_RANK
        waiting = {engine.name: None for engine in self._group.engines}
        num_blocks = 0
        while waiting:
            if self._is_ending:
                raise EngineError("the engine was shut down while it restarted")
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"{', '.join(waiting)}: the model was not loaded within {self.config.load_timeout} s; raise "
                    "load_timeout if it needs more"
                )
            wait_for_messages(self._group.members, min(deadline - time.monotonic(), SECONDS_BETWEEN_LOOKS))
            for engine in self._group.engines:
                for message in engine.receive():
                    if isinstance(message, Ready):  # a replica that is ready may send an empty delivery
                        num_blocks = message.num_blocks
                        del waiting[engine.name]
            if self._group.has_failed:
                raise as_error(root_cause(self._group.collect_failures()), "while the model was loaded")
        return num_blocks

    def _send(self, request: Request, samples: Sequence[Sample] = ()) -> None:
        """Send a request and further samples of it, in one message to each replica that serves some of them.

        Raises:
            RequestError: it cannot be encoded. Nothing has changed.
        """
        require_encodable(request)
        if not self._in_flight:
            self._last_message_s = time.monotonic()
            self._must_wake = True
        requests = AddRequest(request, list(samples)).requests
        indices = self._router.choose_each(request, [each.request_id for each in requests])
        by_replica: dict[int, list[Request]] = {}
        for index, each in zip(indices, requests, strict=True):
            by_replica.setdefault(index, []).append(each)
            self._in_flight[each.request_id] = _InFlight(each, self._group.engines[index])
        for index, (first, *others) in by_replica.items():
            message = AddRequest(first, [Sample(each.request_id, each.seed) for each in others])
            self._group.engines[index].channel.send(message)
        self._has_sleepers |= not self._must_wake  # replicas that run requests keep all others awake

    def _wake_sleepers(self) -> None:
        """Wake all replicas if one may be asleep: no step begins without them."""
        if self._must_wake:
            self._must_wake = self._has_sleepers = False
            for engine in self._group.engines:
                engine.channel.send_frame(WAKE)

    def _wait(self) -> None:
        """Wait for messages. A replica that hangs is noticed by the others, or here if all are silent."""
        self._wake_sleepers()
        self._poll.ready(self.config.step_timeout)

    def _receive(self) -> None:
        """Take all updates that have arrived, without waiting. A failure ends requests or resumes them."""
        if not self._failure and not self._is_shut_down:
            ready = self._poll.ready()
            self._undelivered += self._received(ready)
            silent_s = time.monotonic() - self._last_message_s if self._in_flight else 0.0
            if any(process.failures() for process in ready) or silent_s > MOST_SILENT_STEPS * self.config.step_timeout:
                silence = FailureReport(name="all replicas", cause=f"no message for {silent_s:.0f} s")
                cause = root_cause(self._group.collect_failures() or [silence])
                self._undelivered += self._received(self._group.engines)
                self._end_group()
                self._fail(str(as_error(cause, f"the engine failed with {len(self._in_flight)} request(s) in flight")))
        if self._failure and self._in_flight:  # also after a Ctrl-C during the restart
            self._undelivered += self._resume()

    def _fail(self, error: str) -> None:
        """End the requests that cannot be resumed after a failure of the engine."""
        self._failure = error
        for known in self._in_flight.values():
            known.num_failures += 1
        may_resume = self.config.on_failure == "restart"
        self._undelivered += self._end_requests(
            [
                name
                for name, known in self._in_flight.items()
                if not may_resume or known.num_failures > MAX_FRUITLESS_RESTARTS
            ],
            error=error,
        )

    def _resume(self) -> list[RequestUpdate]:
        """Restart, and send all requests again with the tokens that were received. Return the ends of the others."""
        logger.warning("the engine is restarted, and its requests continue. The failure: %s", self._failure)
        try:
            self._restart()
        except EngineError as error:
            self._failure = str(error)
            return self._end_requests(list(self._in_flight), error=self._failure)
        in_flight, self._in_flight = self._in_flight, {}
        for name, known in in_flight.items():
            if not known.is_aborted:
                self._send(known.resumed())
                self._in_flight[name].num_failures = known.num_failures
        aborted = [name for name, known in in_flight.items() if known.is_aborted]
        return [RequestUpdate(request_id=name, finish_reason="abort") for name in aborted]

    def _received(self, ready: Iterable[WatchedProcess[EngineMessage]]) -> list[RequestUpdate]:
        """Return the updates that these processes have sent."""
        updates: list[RequestUpdate] = []
        for process in ready:
            if process not in self._index_of:  # of the other processes, failures alone are looked for
                continue
            index = self._index_of[process]
            for message in process.receive():
                assert isinstance(message, Delivery), message
                self._last_message_s = time.monotonic()
                self.replica_stats[index] = message.stats
                self._router.note_free_blocks(index, message.stats.num_free_blocks)
                self._loads += [] if message.load is None else [message.load]
                self._awaits_load &= not message.answers
                updates += self._of_live_requests(message.updates)
        return updates

    def _of_live_requests(self, updates: Iterable[RequestUpdate]) -> Iterable[RequestUpdate]:
        """Yield the updates of requests that have not ended, and forget requests that end."""
        for update in updates:
            known = self._in_flight.get(update.request_id)
            if known is None:
                continue
            if update.token_ids:
                known.token_ids += update.token_ids
                known.num_failures = 0
            has_ended = update.finish_reason is not None
            self._router.note_update(update.request_id, has_ended=has_ended)
            if has_ended:
                del self._in_flight[update.request_id]
                self._must_wake |= self._has_sleepers  # the request that kept replicas awake may have been this one
            yield update

    def _end_requests(self, request_ids: Sequence[str], *, error: str | None) -> list[RequestUpdate]:
        for name in request_ids:
            del self._in_flight[name]
        return [RequestUpdate(request_id=name, finish_reason="abort", error=error) for name in request_ids]

    def _require_open(self) -> None:
        if self.refusal:
            raise EngineError(self.refusal)
        if self._failure:
            raise EngineError(f"the engine has failed, and the next request restarts it. The failure: {self._failure}")
