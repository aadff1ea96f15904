"""`Scaling`: a change of the number of replicas, while the engine serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from moeserve.config.engine_config import EngineConfig
from moeserve.controls import WeightState
from moeserve.engine.generation import Generation
from moeserve.errors import EngineError, MoeserveError, ScaleError, ScalingInProgressError, SettingsError
from moeserve.interrupts import interrupts_allowed

logger = logging.getLogger(__name__)


class Scaling:
    """Starts another generation next to the one that serves, and ends one of the two.

    The engine calls `advance` until the call returns the new generation, lets that generation serve, and calls `retire`
    with the old one. A failure before that ends the new generation. The start and the end of processes take long, so
    they run in the background.
    """

    def __init__(
        self,
        start: Callable[[], Generation],
        run_in_background: Callable[[Callable[[], None]], object],
        wake: Callable[[], None],
        *,
        num_before: int,
    ) -> None:
        """
        Args:
            start: starts the processes of the new generation; may block.
            run_in_background: runs a function in another thread.
            wake: makes the engine call `advance`. Any thread may call it.
            num_before: number of replicas that serve.
        """
        # Done when the change is over, that is, when only the processes of one generation are left.
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()
        self.loading: Generation | None = None  # the new generation, once its processes are started
        self._run_in_background, self._wake = run_in_background, wake
        self._num_before = num_before
        self._lock = threading.Lock()  # guards `_cancelled`, and `loading` while it is None
        self._cancelled = ""  # the reason
        run_in_background(lambda: self._start(start))

    @property
    def is_over(self) -> bool:
        return self.done.done()

    def advance(self) -> Generation | None:
        """Return the new generation once it can serve, else None. Never waits."""
        generation = self.loading
        if generation is None:
            return None
        try:
            is_ready = generation.take_ready()
        except MoeserveError as error:
            self._fail(generation, lambda cause=error: cause)  # type: ignore[misc]
            return None
        if is_ready:
            self.loading = None
            return generation
        if generation.group.has_failed:
            self._fail(generation, generation.loading_failure)
        return None

    def retire(self, old: Generation) -> None:
        """Complete the change: end the old generation in the background."""

        def end() -> None:
            try:
                old.shut_down()
            except Exception:  # of any kind: Ray and the system raise many
                logger.exception("replicas that are not needed any more could not be ended")
            self.done.set_result(None)
            self._wake()

        self._run_in_background(end)

    def cancel(self, reason: str) -> None:
        """End the new generation unless it already serves.

        If it is still being started, it is ended once it has started.
        """
        with self._lock:
            self._cancelled = reason
            generation, self.loading = self.loading, None
        if generation is not None:
            generation.end()
            self._finish(None)

    def _start(self, start: Callable[[], Generation]) -> None:
        try:
            generation = start()
        except Exception as error:  # of any kind: Ray and the system raise many
            self._finish(error)
            return
        with self._lock:
            is_cancelled = bool(self._cancelled)
            if not is_cancelled:
                self.loading = generation
        if is_cancelled:
            generation.end()
            self._finish(None)
        self._wake()

    def _fail(self, generation: Generation, find_cause: Callable[[], MoeserveError]) -> None:
        self.loading = None

        def end() -> None:
            cause: Exception
            try:
                cause = find_cause()
                generation.end()
            except Exception as error:  # of any kind: Ray and the system raise many
                cause = error
            self._finish(cause)

        self._run_in_background(end)

    def _finish(self, cause: Exception | None) -> None:
        cancelled = f"the change of the number of replicas was cancelled: {self._cancelled}"
        error = ScaleError(cancelled if cause is None else f"the number of replicas stays {self._num_before}: {cause}")
        error.__cause__ = cause
        self.done.set_exception(error)
        self._wake()


def run_in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="scaling", daemon=True).start()


def try_in_place(start: Callable[[], None], start_again: Callable[[str], None], num_before: int) -> Future[None]:
    """Start another number of replicas after the old replicas have ended. Return a completed future for `Engine.scale`.

    Args:
        start_again: starts the old number of replicas after a failure, and is given the failure's message.
        num_before: the old number.
    """
    done: Future[None] = Future()
    try:
        with interrupts_allowed():
            start()
        done.set_result(None)
    except (EngineError, ValueError, OSError) as error:
        refusal = ScaleError(f"the number of replicas stays {num_before}: {error}")
        refusal.__cause__ = error
        start_again(str(refusal))
        done.set_exception(refusal)
    return done


def require_one_change(data_parallel_size: int, *, is_scaling: bool) -> None:
    """Raise ScalingInProgressError if the number of replicas is being changed."""
    if is_scaling:
        raise ScalingInProgressError(
            f"the number of replicas is being changed already, so it cannot be changed to {data_parallel_size}; "
            "try again when that is over"
        )


def require_equal_weights(weights: WeightState) -> None:
    """Raise ScaleError if new replicas would not have the weights of the serving replicas."""
    if weights != WeightState():
        raise ScaleError(
            "new replicas would load the checkpoint, and the weights are others by now; call reload_weights first"
        )


def require_two_generations(config: EngineConfig) -> None:
    """Raise SettingsError if old and new replicas cannot run at the same time."""
    if ":" in (config.store.kv_transfer_address or ""):
        raise SettingsError(
            f"kv_transfer_address={config.store.kv_transfer_address!r} names a port, on which old and new replicas "
            "would have to listen at once; start the engine with an address without a port"
        )
