"""The engine: routes requests to its replicas, receives results, detects failures, and restarts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait

from moeserve.config.engine_config import EngineConfig
from moeserve.controls import CancelUpdate, Command, ControlResult, Sleep, WeightCommand, WeightState
from moeserve.engine import scaling
from moeserve.engine.base import Ownership, fit_to_cache, log_lowered_length, require_new, with_chunk_size
from moeserve.engine.controls import Controls
from moeserve.engine.generation import SECONDS_BETWEEN_LOOKS, SECONDS_TO_END, Generation, with_limits_of
from moeserve.engine.growing_back import GrowingBack
from moeserve.engine.in_flight import RequestsInFlight
from moeserve.engine.launcher import Launcher, ReplicaHandle
from moeserve.engine.protocol import ReplicaFaulted
from moeserve.engine.recovery import Recovery
from moeserve.engine.restart import next_smaller, restart
from moeserve.errors import (
    EngineError,
    StaleWeightsError,
    WeightsChangedError,
    WeightUpdateError,
)
from moeserve.models.checkpoint.file_hashes import FileHashes
from moeserve.processes.failures import FailureReport, as_error, root_cause
from moeserve.processes.supervision import ProcessPoll, Watched
from moeserve.processes.wake_up import WakeUp
from moeserve.protocol import Delivery, ReplicaStats, Request, RequestUpdate, Sample
from moeserve.telemetry.expert_load import LoadWindow

logger = logging.getLogger(__name__)

# All replicas have failed if there is no message for this many `step_timeout`s. Replicas report hung ranks earlier.
MOST_SILENT_STEPS = 2


class Engine:
    """One or more replicas, which serve the same model. An `EngineClient`.

    When a process fails, `on_failure` decides what follows. With "end", all requests end with an error that names the
    process, and further requests are refused. With "recover", failed ranks are replaced (`Recovery`); with "restart",
    all ranks are; with "shrink", the replicas of failed ranks are left out. Requests then continue after the tokens
    that were received. If there are no requests, the next request restarts the engine.

    A change of the number of replicas works in the same way: the requests continue on another worker group
    (`Generation`), which has loaded the model while the first one served.
    """

    def __init__(
        self,
        config: EngineConfig,
        launcher: Launcher,
        *,
        config_of: Callable[[int], EngineConfig],
        run_in_background: Callable[[Callable[[], None]], object] = scaling.run_in_thread,
    ) -> None:
        """Start all replicas, and wait until they have loaded the model.

        Args:
            launcher: starts the replicas. It is closed after the last replica has ended.
            config_of: returns the same settings resolved for another number of replicas, or raises SettingsError.
            run_in_background: runs a function in another thread.

        Raises:
            CheckpointError, SettingsError: raised by a rank.
            EngineError: a process failed, or could not be started.
        """
        self.config = config
        self._launcher, self._config_of = launcher, config_of
        self._file_hashes: FileHashes = ()  # hashes of the model's files; empty until a generation has read them
        self._run_in_background = run_in_background
        self._ownership = Ownership()
        self._wake_up = WakeUp()
        self._undelivered: list[RequestUpdate] = []  # received, but not yet returned by `step`
        self._loads: list[LoadWindow] = []  # not yet returned by `take_loads`
        self._in_flight = RequestsInFlight()
        self._controls = Controls()
        self._awaits_load = False  # a requested window has not been received yet
        self._last_message_s = 0.0  # time of the last message, or of the first request if later
        self._failure = ""  # the reason why no processes run; empty while they run
        self._weights_have_changed = False  # so no processes can be started again
        self._is_shut_down = False
        self._is_ending = False  # restarts are cancelled
        self._scaling: scaling.Scaling | None = None  # the last change
        self._is_changing_in_place = False  # no processes run during the change
        self._growing_back = GrowingBack(config.parallel.data_parallel_size)
        try:
            self._start(config)
        except BaseException:
            launcher.close()
            raise
        self.config = fit_to_cache(self.config, self.num_blocks)
        log_lowered_length(config, self.config)

    @property
    def has_work(self) -> bool:
        has_controls = self._controls.is_running or self._controls.has_ended
        return bool(self._in_flight or self._undelivered or self._is_scaling or has_controls)

    @property
    def num_blocks(self) -> int:
        return self._generation.num_blocks

    @property
    def replica_stats(self) -> list[ReplicaStats]:
        return self._generation.replica_stats

    @property
    def replicas(self) -> list[ReplicaHandle]:
        """The replicas that serve, by dp rank."""
        return self._generation.group.replicas

    @property
    def has_failed(self) -> bool:
        return bool(self._failure)

    @property
    def refusal(self) -> str:
        if self._failure and not self._may_restart and not self._is_changing_in_place:
            return f"the engine has failed and takes no requests; make a new one. The failure: {self._failure}"
        return "the engine was shut down; make a new one" if self._is_shut_down else ""

    @property
    def num_free_blocks(self) -> list[int]:
        """The number of free KV cache blocks of each replica, as last reported. Also detects failures."""
        self._receive()
        return [stats.num_free_blocks for stats in self.replica_stats]

    def add(self, request: Request, samples: Sequence[Sample] = ()) -> None:
        self._require_serving()
        if self.weights.refusal:
            raise StaleWeightsError(self.weights.refusal)
        require_new([request.request_id, *(sample.request_id for sample in samples)], self._in_flight.ids)
        if not self._in_flight:
            self._last_message_s = time.monotonic()
        self._in_flight.send(request, samples)

    @property
    def is_paused(self) -> bool:
        return self._controls.is_paused

    @property
    def weights(self) -> WeightState:
        return self._controls.weights

    def control(self, command: Command) -> Future[ControlResult]:
        self._require_serving()
        if isinstance(command, Sleep | WeightCommand):
            self._require_updates()
        self._last_message_s = time.monotonic()
        return self._controls.run(command)

    def abort(self, request_id: str) -> None:
        self._ownership.require()
        self._in_flight.abort(request_id)

    def step(self) -> list[RequestUpdate]:
        self._ownership.require()
        has_finished = self._controls.finish()
        self._in_flight.wake_sleepers()
        self._receive()
        while True:
            if self._failure and self._may_restart and not (self._is_shut_down or self._is_ending):
                self._undelivered += self._resume()  # also without requests, so that the next request finds an engine
            is_due = self._undelivered or has_finished or self._controls.has_ended
            if is_due or not self.has_work or self._wake_up.take():
                break
            self._receive(self._longest_wait_s)
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
            was_woken |= self._wake_up.take()  # else every wait would return at once
            self._receive(self._longest_wait_s)
        if was_woken:
            self._wake_up.wake()  # restore the wake-up for the next step that waits
        loads, self._loads = self._loads, []
        return loads

    def scale(self, data_parallel_size: int) -> Future[None]:
        self._require_serving()
        scaling.require_one_change(data_parallel_size, is_scaling=self._is_scaling)
        if type(data_parallel_size) is int and data_parallel_size == self.config.parallel.data_parallel_size:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        scaling.require_equal_weights(self.weights)
        config = self._resized(data_parallel_size)
        if config.compute.device != "cpu":
            return self._scale_in_place(config)
        scaling.require_two_generations(config)
        return self._begin_scaling(config)

    def shutdown(self) -> None:
        if self._is_shut_down or not self._ownership.is_owner:  # a fork of the owner must leave the engine alone
            return
        self._is_shut_down = True
        self._undelivered += self._in_flight.end_all(error=None)
        self._controls.finish()
        self._controls.fail("the engine was shut down")
        if self._scaling is not None:
            self._scaling.cancel("the engine was shut down")
        if not self._failure:
            self._generation.shut_down()
            self._watch_nothing()
        elif self._recovery.is_prepared:
            self._generation.end()
        if self._scaling is not None and not wait([self._scaling.done], 2 * SECONDS_TO_END).done:
            # A background start of processes may take longer. Its resources must not be released before it has ended.
            self._scaling.done.add_done_callback(lambda _: self._launcher.close())
        else:
            self._launcher.close()

    @property
    def _may_restart(self) -> bool:
        return self.config.failure.on_failure != "end" and not self._weights_have_changed

    @property
    def _is_scaling(self) -> bool:
        return self._scaling is not None and not self._scaling.is_over

    def _start(self, config: EngineConfig) -> None:
        """Start processes, wait until all replicas have loaded the model, and let them serve."""
        generation = self._new_generation(config)
        try:
            generation.wait_until_ready(lambda: self._is_ending)
        except BaseException:
            generation.end()
            raise
        self._let_serve(generation)

    def _new_generation(self, config: EngineConfig) -> Generation:
        """Start processes that load the same files of the model as the first processes.

        After an update of the weights, the files may differ, because requests wait for another update in any case.
        """
        file_hashes = self._file_hashes if self.weights == WeightState() else ()
        config = config.changed(weights={"file_hashes": file_hashes})
        return Generation(config, self._launcher.start(config))

    def _let_serve(self, generation: Generation) -> None:
        """Send requests to the replicas of this generation from now on."""
        self._generation, self.config = generation, with_chunk_size(generation.config, generation.chunk_size)
        self._recovery = Recovery(generation)
        self._file_hashes = generation.file_hashes
        self._in_flight.generation = generation
        self._controls.begin(generation.group.replicas)
        self._last_message_s = time.monotonic()
        self._watch()
        if self._awaits_load:
            self._request_load()

    def _watch(self) -> None:
        """Watch the processes that serve, and the processes that load."""
        loading = self._scaling.loading if self._scaling is not None else None
        self._serving = dict.fromkeys(self._generation.group.members)
        self._poll = ProcessPoll([*self._serving, *(loading.group.members if loading else ())], self._wake_up.fd)
        self._watched_loading = loading

    def _watch_nothing(self) -> None:
        """Watch only the wake-up: file descriptors of terminated processes would end every wait at once."""
        self._poll = ProcessPoll([], self._wake_up.fd)

    def _begin_scaling(self, config: EngineConfig) -> Future[None]:
        """Start another set of replicas in the background, beside those that serve."""
        self._scaling = scaling.Scaling(
            lambda: self._new_generation(config),
            self._run_in_background,
            self._wake_up.wake,
            num_before=self.config.parallel.data_parallel_size,
        )
        return self._scaling.done

    def _advance_scaling(self) -> None:
        """If a new generation is ready, let it serve: requests continue there, and the old generation is ended."""
        if not self._is_scaling and self.weights == WeightState():
            self._growing_back.advance(self.config, self._resized, self._begin_scaling)
        if self._scaling is None:
            return
        new, old = self._scaling.advance(), self._generation
        if new is not None:
            self._let_serve(new)
            self._undelivered += self._continue_all()
            self._scaling.retire(old)
            self._growing_back.num_wanted = len(new.index_of)
            logger.info("the engine has %d replica(s) now, instead of %d", len(new.index_of), len(old.index_of))
        elif self._scaling.loading is not self._watched_loading:
            self._watch()

    def _scale_in_place(self, config: EngineConfig) -> Future[None]:
        """End the serving processes before others are started, because the devices cannot hold both generations."""
        running = self.config
        self._generation.shut_down()
        self._failure = "the change of the number of replicas was interrupted"
        self._is_changing_in_place = True

        def start() -> None:
            self._start(config)
            self._failure = ""
            self._growing_back.num_wanted = config.parallel.data_parallel_size
            self._undelivered += self._continue_all()

        def start_again(failure: str) -> None:
            self._failure = failure
            self._undelivered += self._resume(running)

        try:
            return scaling.try_in_place(start, start_again, running.parallel.data_parallel_size)
        finally:
            self._is_changing_in_place = False

    def _request_load(self) -> None:
        self._awaits_load = True
        self._in_flight.collect_load()

    def _restart(self, config: EngineConfig | None = None) -> None:
        """Start new processes, and retry until the resources for them are available.

        Args:
            config: the config of the new processes; None: the config that follows from `on_failure`.

        Raises:
            EngineError: the resources are not available in time.
            WeightsChangedError: files of the model have changed, so the engine has failed for good.
        """
        try:
            if self._recovery.run(lambda: self._is_ending):
                self._let_serve(self._generation)
            else:
                config = config or self._config_after_failure(self.config)
                restart(self._start, config, self._config_after_failure, lambda: self._is_ending)
        except WeightsChangedError as error:
            self._weights_have_changed, self._failure = True, str(error)
            raise
        self._failure = ""

    def _config_after_failure(self, config: EngineConfig) -> EngineConfig:
        """Return the config for a restart: the same or, with on_failure="shrink", a config with fewer replicas."""
        if config.failure.on_failure != "shrink":
            return config
        return next_smaller(config, self._resized)

    def _resized(self, num_replicas: int) -> EngineConfig:
        """Return the config of another number of replicas. Raises SettingsError if that is not possible."""
        return with_limits_of(self.config, self.num_blocks, self._config_of(num_replicas))

    @property
    def _longest_wait_s(self) -> float:
        failure = self.config.failure
        if self._is_scaling or self._generation.group.watch is not None:
            return SECONDS_BETWEEN_LOOKS
        return min(failure.step_timeout, failure.weight_update_timeout if self.weights.is_updating else 10**9)

    def _receive(self, timeout_s: float = 0.0, *, only_failures: bool = False) -> None:
        """Handle all updates that have arrived, after waiting for the first. A failure ends requests or resumes them.

        A replica that hangs is detected by other replicas. This method detects that all replicas are silent.

        Args:
            only_failures: leave updates for the next call.
        """
        if timeout_s:
            self._in_flight.wake_sleepers()
        ready = self._poll.ready(timeout_s)
        if not self._failure and not self._is_shut_down:
            self._undelivered += [] if only_failures else self._received(ready)
            self._advance_scaling()
            group = self._generation.group
            may_run = not (self._controls.is_paused or self.weights.is_updating)
            is_busy = self._controls.is_running or (self._in_flight and may_run)
            silent_s = time.monotonic() - self._last_message_s if is_busy else 0.0
            has_failed = bool(self._generation.faults) or any(
                process in self._serving and process.failures() for process in ready
            )
            failure = self.config.failure
            most_s = MOST_SILENT_STEPS * failure.step_timeout
            is_silent = silent_s > (max(most_s, failure.load_timeout) if self._controls.is_running else most_s)
            if self._controls.seconds_open > failure.weight_update_timeout:
                logger.error("an update of the weights is cancelled: no call for %g s", failure.weight_update_timeout)
                self._controls.run(CancelUpdate())
            finding = None if has_failed or group.watch is None else group.watch.look()
            if has_failed or finding or (is_silent and not group.reports_hangs and not only_failures):
                silence = FailureReport(name="all replicas", cause=f"no message for {silent_s:.0f} s")
                cause = finding.report if finding else root_cause(self._recovery.collect_failures() or [silence])
                self._undelivered += self._received(group.replicas)
                may_recover = (has_failed or finding is not None) and not self._is_shut_down
                if not may_recover or not self._recovery.prepare(finding, self.weights):
                    self._generation.end()
                self._watch_nothing()
                self._fail(str(as_error(cause, f"the engine failed with {len(self._in_flight)} request(s) in flight")))
        if self._failure and self._in_flight:  # also if a Ctrl-C has interrupted a restart
            self._undelivered += self._resume()

    def _fail(self, error: str) -> None:
        """End the requests that cannot be resumed after a failure of the engine."""
        self._failure = error
        self._controls.fail(error, only_weights=self._may_restart)
        if self._scaling is not None:
            self._scaling.cancel(error)
        self._undelivered += self._in_flight.end_after_failure(error, may_resume=self._may_restart)

    def _resume(self, config: EngineConfig | None = None) -> list[RequestUpdate]:
        """Restart, and resend all requests with the tokens received. Return final updates of aborted requests.

        Args:
            config: the config of the new processes; None: the config that follows from `on_failure`.
        """
        what = "failed ranks are replaced" if self._recovery.is_prepared else "the engine is restarted"
        logger.warning("%s, and requests continue. The failure: %s", what, self._failure)
        try:
            self._restart(config)
        except EngineError as error:
            self._failure = str(error)
            self._controls.fail(self._failure)
            return self._in_flight.end_all(error=self._failure)
        return self._continue_all()

    def _continue_all(self) -> list[RequestUpdate]:
        """Continue requests and controls on new replicas. Return final updates of requests that were aborted."""
        if self.weights.refusal:
            updates = self._in_flight.end_all(error=self.weights.refusal)
        else:
            updates = self._in_flight.continue_all()
        self._controls.resend()
        return updates

    def _received(self, ready: Iterable[Watched]) -> list[RequestUpdate]:
        """Return the updates sent by these members of worker groups."""
        updates: list[RequestUpdate] = []
        for member in ready:
            index = self._generation.index_of.get(member)
            if index is None:  # not a replica of this generation: only its failure matters
                continue
            for message in self._generation.group.replicas[index].receive():
                if isinstance(message, ReplicaFaulted):
                    self._generation.note_fault(index, message)
                    continue
                assert isinstance(message, Delivery), message
                # Replicas that wait for another one to announce a control send messages too, but run no steps.
                has_run = message.stats.steps != self.replica_stats[index].steps
                if has_run or message.updates or message.controls or not self._controls.is_running:
                    self._last_message_s = time.monotonic()
                self.replica_stats[index] = message.stats
                self._generation.router.note_free_blocks(index, message.stats.num_free_blocks)
                self._loads += [] if message.load is None else [message.load]
                self._awaits_load &= not message.answers
                updates += self._in_flight.live_updates(message.updates)
                self._controls.note(index, message.controls)
                if self.weights.refusal and self._in_flight:
                    updates += self._in_flight.abandon_all(error=self.weights.refusal)
        return updates

    def _require_serving(self) -> None:
        """Restart the engine if it has failed and may be restarted.

        Raises:
            EngineError: the engine refuses requests.
        """
        self._ownership.require()
        self._receive(only_failures=True)  # a local replica must not plan a request before the others that are added
        if self._failure and not self.refusal:
            self._awaits_load = False  # the waiting call has raised
            self._restart()
            self._controls.resend()
        self._require_open()

    def _require_updates(self) -> None:
        """Raise WeightUpdateError if the weights cannot be updated now."""
        if not self.config.weights.rl:
            raise WeightUpdateError("this engine's weights cannot be updated; start it with rl=True (--rl)")
        if self._is_scaling:
            raise WeightUpdateError("the number of replicas is being changed; try again when that is over")

    def _require_open(self) -> None:
        if self.refusal:
            raise (WeightsChangedError if self._weights_have_changed else EngineError)(self.refusal)
        if self._failure:
            raise EngineError(f"the engine has failed, and the next request restarts it. The failure: {self._failure}")
