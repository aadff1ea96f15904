"""Runs one rank in a thread of this process."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from moeserve.config.settings import EngineConfig
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.scheduling.lockstep import Outcome, Round
from moeserve.worker.worker import Worker


class UniprocExecutor:
    """See `Executor`. All of the rank's work is done in its thread: torch keeps settings for each thread."""

    def __init__(self, config: EngineConfig, *, show_progress: bool) -> None:
        self._work: SimpleQueue[Round | None] = SimpleQueue()  # None: the thread ends
        self._pending: deque[Future[Outcome]] = deque()
        self._ended: deque[Outcome | BaseException] = deque()  # of the oldest rounds, in order
        self._ended_fd = os.eventfd(0, os.EFD_NONBLOCK)
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
        future: Future[Outcome] = Future()
        self._pending.append(future)
        self._work.put(work)
        return future

    def fds(self) -> Sequence[int]:
        return [self._ended_fd]

    def progress(self) -> None:
        if self._ended:
            os.eventfd_read(self._ended_fd)
        while self._ended:
            future, ended = self._pending.popleft(), self._ended.popleft()
            if isinstance(ended, Outcome):
                future.set_result(ended)
            else:
                future.set_exception(ended)

    def shutdown(self) -> None:
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()
            os.close(self._ended_fd)
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
                self._ended.append(worker.execute(work))
            except BaseException as error:
                self._ended.append(error)
            os.eventfd_write(self._ended_fd, 1)
