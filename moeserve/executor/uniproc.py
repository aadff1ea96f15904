"""Runs one rank in a thread of this process."""

from __future__ import annotations

import atexit
import select
import threading
import weakref
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from moeserve.config.allocation import refusing_what_cannot_be_allocated
from moeserve.config.engine_config import EngineConfig
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.executor.results import ResultQueue
from moeserve.protocol import Transfer, TransferResult
from moeserve.scheduling.lockstep import Round, RoundResult
from moeserve.worker.worker import PendingRound, Worker

SECONDS_BETWEEN_LOOKS = 2e-4  # interval between checks whether a GPU has finished the only round
IDLE_SECONDS = 0.05  # idle time before graphs are captured; longer than between two steps


class UniprocExecutor:
    """An `Executor` of one rank. All its work runs in one thread, because some settings of torch are per thread."""

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        self.name = "rank 0"
        self._work: SimpleQueue[Round | None] = SimpleQueue()  # None: the thread exits
        self._results = ResultQueue()
        loaded: Future[Worker] = Future()
        thread = threading.Thread(
            target=_run,
            args=(config, show_progress, loaded, self._work, self._results),
            name="moeserve rank 0",
            daemon=True,
        )
        thread.start()
        self._held: list[Worker] = []  # empty once the model is released
        # Ends the thread and releases the model even if shutdown is never called; also when Python exits.
        self._end_thread = weakref.finalize(self, _end, thread, self._work, self._held)
        try:
            self._held.append(loaded.result())
        except BaseException:
            self.shutdown()
            raise
        finally:
            del loaded  # its exception refers to this frame through the traceback
        self.loaded = [self.worker.facts]
        self._transfers = self.worker.start_transfers(self._results.add_transfer)

    @property
    def worker(self) -> Worker:
        assert self._held, "the executor was shut down"
        return self._held[0]

    @property
    def fd(self) -> int:
        """Readable when `progress` has work to do."""
        return self._results.fd

    def submit(self, work: Round) -> Future[RoundResult]:
        assert self._held, "submit after shutdown"
        future = self._results.expect()
        self._work.put(work)
        return future

    def transfer(self, work: Transfer) -> Future[TransferResult]:
        future = self._results.expect_transfer(work.number)
        self._transfers.submit(work)
        return future

    def register(self, poll: select.poll) -> None:
        poll.register(self.fd, select.POLLIN)

    def progress(self) -> None:
        self._results.complete()

    def abandon(self) -> None:
        """Leave a hung thread alone, because nothing can end it and `shutdown` must not wait for it."""
        if self._end_thread.detach() is not None:
            self._work.put(None)

    def shutdown(self) -> None:
        self._end_thread()
        self._held.clear()


def _run(
    config: EngineConfig,
    show_progress: bool,
    loaded: Future[Worker],
    rounds: SimpleQueue[Round | None],
    results: ResultQueue,
) -> None:
    """Load the model and execute rounds until None arrives. Does not refer to the executor, which may be deleted."""
    try:
        with refusing_what_cannot_be_allocated(config):
            worker = Worker(config, groups_of_one_rank(), show_progress=show_progress)
    except BaseException as error:
        loaded.set_exception(error)
        del loaded  # it refers to this frame through the traceback
        rounds.get()
        return
    loaded.set_result(worker)
    del loaded
    held: list[PendingRound | BaseException] = []  # the latest round, until its result is handed over

    def hand_over() -> None:
        while held:
            results.add(_result(held.pop()))

    def hand_over_if_done() -> None:
        if held and _is_done(held[0]):
            hand_over()

    # Handing over a result wakes the engine's thread, which competes for Python's interpreter lock. If the next round
    # has arrived, its layers are started first, because they run without the lock.
    worker.runner.step_runner.on_layers = hand_over_if_done
    while True:
        try:
            # While a GPU computes the held round, check at intervals whether it is done.
            work = rounds.get(timeout=SECONDS_BETWEEN_LOOKS) if held else _next_round(rounds, worker)
        except Empty:
            hand_over_if_done()
            continue
        if work is None:
            break
        try:
            started: PendingRound | BaseException = worker.start(work)
        except BaseException as error:
            started = error
        hand_over()
        held.append(started)
        if rounds.empty():
            hand_over_if_done()
    hand_over()
    worker.close()


def _is_done(started: PendingRound | BaseException) -> bool:
    return isinstance(started, BaseException) or started.is_done


def _result(started: PendingRound | BaseException) -> RoundResult | BaseException:
    if isinstance(started, BaseException):
        return started
    try:
        return started.finish()
    except BaseException as error:
        return error


def _next_round(rounds: SimpleQueue[Round | None], worker: Worker) -> Round | None:
    """Return the next round. While the rank is idle, capture graphs of likely steps."""
    timeout: float | None = IDLE_SECONDS
    while True:
        try:
            return rounds.get(timeout=timeout)
        except Empty:
            timeout = 0.0 if worker.capture_ahead() else None


def _end(thread: threading.Thread, rounds: SimpleQueue[Round | None], held: list[Worker]) -> None:
    held.clear()
    rounds.put(None)
    if thread is threading.current_thread():  # the garbage collector deleted the executor in this thread
        atexit.register(thread.join)  # Python aborts if it exits while the thread computes
    else:
        thread.join()
