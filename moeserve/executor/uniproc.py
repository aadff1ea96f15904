"""Runs one rank in a thread of this process."""

from __future__ import annotations

import select
import threading
from concurrent.futures import Future
from queue import SimpleQueue

from moeserve.config.settings import EngineConfig
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.executor.outcomes import OutcomeQueue
from moeserve.scheduling.lockstep import Outcome, Round
from moeserve.worker.worker import Worker


class UniprocExecutor:
    """See `Executor`. All of the rank's work is done in its thread: torch keeps settings for each thread."""

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        self.name = "rank 0"
        self._work: SimpleQueue[Round | None] = SimpleQueue()  # None: the thread ends
        self._outcomes = OutcomeQueue()
        loaded: Future[Worker] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(config, show_progress, loaded), name="moeserve rank 0", daemon=True
        )
        self._thread.start()
        try:
            self.worker: Worker | None = loaded.result()
        except BaseException:
            self.shutdown()
            raise
        self.num_blocks = self.worker.num_blocks

    def submit(self, work: Round) -> Future[Outcome]:
        assert self.worker is not None, "submit after shutdown"
        future = self._outcomes.expect()
        self._work.put(work)
        return future

    def register(self, poll: select.poll) -> None:
        poll.register(self._outcomes.fd, select.POLLIN)

    def progress(self) -> None:
        self._outcomes.complete()

    def shutdown(self) -> None:
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()
        self.worker = None

    def _run(self, config: EngineConfig, show_progress: bool, loaded: Future[Worker]) -> None:
        try:
            worker = Worker(config, groups_of_one_rank(), show_progress=show_progress)
        except BaseException as error:
            loaded.set_exception(error)
            del loaded  # which refers to this frame through the traceback
            self._work.get()
            return
        loaded.set_result(worker)
        del loaded
        while (work := self._work.get()) is not None:
            try:
                ended: Outcome | BaseException = worker.execute(work)
            except BaseException as error:
                ended = error
            self._outcomes.add(ended)
