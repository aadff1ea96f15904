"""Several replicas as one engine: assigns requests to replicas, receives their results, notices failures, restarts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from moeserve.config.settings import EngineConfig
from moeserve.engine.base import (
    Ownership,
    fit_to_cache,
    log_lowered_length,
    require_encodable,
    require_new,
)
from moeserve.engine.generation import SECONDS_BETWEEN_LOOKS, SECONDS_TO_END, Generation, with_limits_of
from moeserve.engine.protocol import Delivery, EngineMessage
from moeserve.engine.scaling import Scaling
from moeserve.errors import EngineError, ScaleError, ScalingInProgressError, SettingsError
from moeserve.interrupts import interrupts_allowed
from moeserve.processes.channel import frame
from moeserve.processes.failures import FailureReport, as_error, root_cause
from moeserve.processes.supervision import ProcessPoll, WatchedProcess
from moeserve.processes.wake_up import WakeUp
from moeserve.processes.worker_group import WorkerGroup
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    CollectLoad,
    ReplicaStats,
    Request,
    RequestUpdate,
    Sample,
    Wake,
)
from moeserve.telemetry.expert_load import LoadWindow

logger = logging.getLogger(__name__)

# Time in which the resources of a failed worker group must be back. Seconds.
SECONDS_TO_RESTART = 110.0
SECONDS_BETWEEN_STARTS = 1.0
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


def _run_in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="scaling", daemon=True).start()


class Replicas:
    """See `Engine`.

    When a process fails, all processes are ended. Then either all requests end with an error that names the process,
    and further requests are refused; or, with on_failure="restart", new processes are started and the requests continue
    after the tokens that were received; or, with on_failure="shrink", the same with one replica fewer. A restart is
    retried for a while, until the operator of the cluster has replaced a failed node. Without requests the next one
    restarts the engine.

    The number of replicas changes in the same way: the requests continue on another worker group (`Generation`), which
    has loaded the model while the first one served.
    """

    def __init__(
        self,
        config: EngineConfig,
        start_group: Callable[[EngineConfig], WorkerGroup],
        *,
        config_of: Callable[[int], EngineConfig],
        close: Callable[[], None] = lambda: None,
        run_in_background: Callable[[Callable[[], None]], object] = _run_in_thread,
    ) -> None:
        """Return when all replicas have loaded the model.

        Args:
            start_group: starts the processes of all replicas.
            config_of: returns the same settings resolved for another number of replicas, or raises SettingsError.
            close: frees what all worker groups have used, after the last one.
            run_in_background: calls a function, in another thread.

        Raises:
            CheckpointError, SettingsError: found by a rank.
            EngineError: a process failed, or could not be started.
        """
        self.config = config
        self._start_group, self._config_of = start_group, config_of
        self._close, self._run_in_background = close, run_in_background
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
        self._scaling: Scaling | None = None  # the last one
        self._is_changing_in_place = False  # there are no processes while the number of replicas changes
        try:
            self._start(config)
        except BaseException:
            close()
            raise
        self.config = fit_to_cache(config, self.num_blocks)
        log_lowered_length(config, self.config)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._undelivered or self._is_scaling)

    @property
    def num_blocks(self) -> int:
        return self._generation.num_blocks

    @property
    def replica_stats(self) -> list[ReplicaStats]:
        return self._generation.replica_stats

    @property
    def has_failed(self) -> bool:
        return bool(self._failure)

    @property
    def refusal(self) -> str:
        if self._failure and self.config.on_failure == "end" and not self._is_changing_in_place:
            return f"the engine has failed and takes no requests; make a new one. The failure: {self._failure}"
        return "the engine was shut down; make a new one" if self._is_shut_down else ""

    @property
    def num_free_blocks(self) -> list[int]:
        """KV cache blocks that each replica has free, as it reported last. A failure is noticed here too."""
        self._receive()
        return [stats.num_free_blocks for stats in self.replica_stats]

    def add(self, request: Request, samples: Sequence[Sample] = ()) -> None:
        self._require_serving()
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
        if self._failure and self.config.on_failure != "end" and not (self._is_shut_down or self._is_ending):
            self._undelivered += self._resume()  # without requests too: the next one should find an engine
        while not self._undelivered and self.has_work and not self._wake_up.take():
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

    def scale(self, data_parallel_size: int) -> Future[None]:
        self._require_serving()
        num_before = self.config.data_parallel_size
        if self._is_scaling:
            raise ScalingInProgressError(
                f"the number of replicas is being changed already, so it cannot be changed to {data_parallel_size}; "
                "try again when that is over"
            )
        if type(data_parallel_size) is int and data_parallel_size == num_before:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        config = with_limits_of(self.config, self.num_blocks, self._config_of(data_parallel_size))
        if config.device != "cpu":
            return self._scale_in_place(config)
        if ":" in (config.kv_transfer_address or ""):
            raise SettingsError(
                f"kv_transfer_address={config.kv_transfer_address!r} names a port, on which old and new replicas would "
                "have to listen at once; start the engine with an address without a port"
            )
        self._scaling = Scaling(
            lambda: Generation(config, self._start_group(config)),
            self._run_in_background,
            self._wake_up.wake,
            num_before=num_before,
        )
        return self._scaling.done

    def shutdown(self) -> None:
        if self._is_shut_down or not self._ownership.is_owner:  # a fork of the owner must leave the engine alone
            return
        self._is_shut_down = True
        self._undelivered += self._end_requests(list(self._in_flight), error=None)
        if self._scaling is not None:
            self._scaling.cancel("the engine was shut down")
        if not self._failure:
            self._generation.shut_down()
        deadline = time.monotonic() + 2 * SECONDS_TO_END
        while self._is_scaling and time.monotonic() < deadline:
            time.sleep(0.01)
        self._close()

    @property
    def _is_scaling(self) -> bool:
        return self._scaling is not None and not self._scaling.is_over

    def _start(self, config: EngineConfig) -> None:
        """Start processes, and let them serve once all replicas have loaded the model."""
        generation = Generation(config, self._start_group(config))
        try:
            generation.wait_until_ready(lambda: self._is_ending)
        except BaseException:
            generation.end()
            raise
        self._let_serve(generation)

    def _let_serve(self, generation: Generation) -> None:
        """Send requests to the replicas of this generation from now on."""
        self._generation, self.config = generation, generation.config
        self._watch()
        if self._awaits_load:
            self._request_load()

    def _watch(self) -> None:
        """Watch the processes that serve, and those that load."""
        loading = self._scaling.loading if self._scaling is not None else None
        self._serving = dict.fromkeys(self._generation.group.members)
        self._poll = ProcessPoll([*self._serving, *(loading.group.members if loading else ())], self._wake_up.fd)
        self._watched_loading = loading

    def _advance_scaling(self) -> None:
        """Let a new generation serve if it is ready: requests continue there, and the old one is ended."""
        if self._scaling is None:
            return
        new, old = self._scaling.advance(), self._generation
        if new is not None:
            self._let_serve(new)
            self._undelivered += self._continue_requests()
            self._scaling.retire(old)
            logger.info("the engine has %d replica(s) now, instead of %d", len(new.index_of), len(old.index_of))
        elif self._scaling.loading is not self._watched_loading:
            self._watch()

    def _scale_in_place(self, config: EngineConfig) -> Future[None]:
        """End the processes that serve, and start others, because the devices cannot hold both."""
        done: Future[None] = Future()
        running = self.config
        self._generation.shut_down()
        self._failure = "the change of the number of replicas was interrupted"
        self._is_changing_in_place = True
        try:
            with interrupts_allowed():
                self._start(config)
            self._failure = ""
            self._undelivered += self._continue_requests()
            done.set_result(None)
        except (EngineError, ValueError, OSError) as error:
            self._failure = f"the number of replicas stays {running.data_parallel_size}: {error}"
            refusal = ScaleError(self._failure)
            refusal.__cause__ = error
            self._undelivered += self._resume(running)
            done.set_exception(refusal)
        finally:
            self._is_changing_in_place = False
        return done

    def _request_load(self) -> None:
        self._awaits_load = True
        self._generation.group.engines[0].channel.send(CollectLoad())
        self._must_wake = True

    def _restart(self, config: EngineConfig) -> None:
        """Start new processes, and try again until the resources for them are there.

        Raises:
            EngineError: they are not there in time.
        """
        deadline = time.monotonic() + SECONDS_TO_RESTART
        while True:
            try:
                with interrupts_allowed():
                    self._start(config)
                self._failure = ""
                return
            except (EngineError, ValueError, OSError) as error:  # a node that comes back may be incomplete for a while
                if time.monotonic() > deadline or self._is_ending:
                    raise EngineError(f"the engine could not be restarted: {error}") from error
                logger.warning("restarting failed, trying again: %s", error)
                with interrupts_allowed():
                    time.sleep(SECONDS_BETWEEN_STARTS)
                config = self._config_after_failure(config)

    def _config_after_failure(self, config: EngineConfig) -> EngineConfig:
        """Return the config to restart with: with on_failure="shrink", of the next smaller size that is possible."""
        for smaller in range(config.data_parallel_size - 1, 0, -1) if config.on_failure == "shrink" else ():
            try:
                return with_limits_of(self.config, self.num_blocks, self._config_of(smaller))
            except (SettingsError, EngineError) as error:
                logger.warning("the engine cannot have %d replica(s): %s", smaller, error)
        return config

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
        engines = self._generation.group.engines
        indices = self._generation.router.choose_each(request, [each.request_id for each in requests])
        by_replica: dict[int, list[Request]] = {}
        for index, each in zip(indices, requests, strict=True):
            by_replica.setdefault(index, []).append(each)
            self._in_flight[each.request_id] = _InFlight(each, engines[index])
        for index, (first, *others) in by_replica.items():
            message = AddRequest(first, [Sample(each.request_id, each.seed) for each in others])
            engines[index].channel.send(message)
        self._has_sleepers |= not self._must_wake  # replicas that run requests keep all others awake

    def _wake_sleepers(self) -> None:
        """Wake all replicas if one may be asleep: no step begins without them."""
        if self._must_wake:
            self._must_wake = self._has_sleepers = False
            for engine in self._generation.group.engines:
                engine.channel.send_frame(WAKE)

    def _wait(self) -> None:
        """Wait for messages. A replica that hangs is noticed by the others, or here if all are silent."""
        self._wake_sleepers()
        self._poll.ready(SECONDS_BETWEEN_LOOKS if self._is_scaling else self.config.step_timeout)

    def _receive(self) -> None:
        """Take all updates that have arrived, without waiting. A failure ends requests or resumes them."""
        if not self._failure and not self._is_shut_down:
            ready = self._poll.ready()
            self._undelivered += self._received(ready)
            self._advance_scaling()
            group = self._generation.group
            silent_s = time.monotonic() - self._last_message_s if self._in_flight else 0.0
            has_failed = any(process in self._serving and process.failures() for process in ready)
            if has_failed or silent_s > MOST_SILENT_STEPS * self.config.step_timeout:
                silence = FailureReport(name="all replicas", cause=f"no message for {silent_s:.0f} s")
                cause = root_cause(group.collect_failures() or [silence])
                self._undelivered += self._received(group.engines)
                self._generation.end()
                self._fail(str(as_error(cause, f"the engine failed with {len(self._in_flight)} request(s) in flight")))
        if self._failure and self._in_flight:  # also after a Ctrl-C during the restart
            self._undelivered += self._resume()

    def _fail(self, error: str) -> None:
        """End the requests that cannot be resumed after a failure of the engine."""
        self._failure = error
        if self._scaling is not None:
            self._scaling.cancel(error)
        for known in self._in_flight.values():
            known.num_failures += 1
        may_resume = self.config.on_failure != "end"
        self._undelivered += self._end_requests(
            [
                name
                for name, known in self._in_flight.items()
                if not may_resume or known.num_failures > MAX_FRUITLESS_RESTARTS
            ],
            error=error,
        )

    def _resume(self, config: EngineConfig | None = None) -> list[RequestUpdate]:
        """Restart, and send all requests again with the tokens that were received. Return the ends of the others.

        Args:
            config: of the new processes; None: the one that `on_failure` calls for.
        """
        logger.warning("the engine is restarted, and its requests continue. The failure: %s", self._failure)
        try:
            self._restart(config or self._config_after_failure(self.config))
        except EngineError as error:
            self._failure = str(error)
            return self._end_requests(list(self._in_flight), error=self._failure)
        return self._continue_requests()

    def _continue_requests(self) -> list[RequestUpdate]:
        """Send all requests again with the tokens that were received. Return the ends of those that were aborted."""
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
            index = self._generation.index_of.get(process)
            if index is None:  # of the other processes, failures alone are looked for
                continue
            for message in process.receive():
                assert isinstance(message, Delivery), message
                self._last_message_s = time.monotonic()
                self.replica_stats[index] = message.stats
                self._generation.router.note_free_blocks(index, message.stats.num_free_blocks)
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
            self._generation.router.note_update(update.request_id, has_ended=has_ended)
            if has_ended:
                del self._in_flight[update.request_id]
                self._must_wake |= self._has_sleepers  # the request that kept replicas awake may have been this one
            yield update

    def _end_requests(self, request_ids: Sequence[str], *, error: str | None) -> list[RequestUpdate]:
        for name in request_ids:
            del self._in_flight[name]
        return [RequestUpdate(request_id=name, finish_reason="abort", error=error) for name in request_ids]

    def _require_serving(self) -> None:
        """Restart the engine if it has failed and may be restarted.

        Raises:
            EngineError: it takes no requests.
        """
        self._ownership.require()
        self._receive()
        if self._failure and not self.refusal:
            self._awaits_load = False  # the call that waited has raised
            self._restart(self._config_after_failure(self.config))
        self._require_open()

    def _require_open(self) -> None:
        if self.refusal:
            raise EngineError(self.refusal)
        if self._failure:
            raise EngineError(f"the engine has failed, and the next request restarts it. The failure: {self._failure}")
