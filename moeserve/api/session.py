"""`Session`: one engine and its frontend, shared by all threads that use an `LLM`."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from moeserve.api.frontend import Frontend
from moeserve.api.prompts import Prompts
from moeserve.engine.base import Engine
from moeserve.errors import EngineError
from moeserve.interrupts import interrupts_deferred
from moeserve.outputs import RequestOutput
from moeserve.sampling_params import SamplingParams
from moeserve.telemetry.expert_load import LoadWindow, summed
from moeserve.telemetry.observer import LoadObserver


class Session:
    """Prompts in flight on one engine. Any thread may call any method.

    A lock is held for one engine step at a time. Each step serves the prompts of all callers, so a caller repeats
    `advance` until its own prompts have finished, and never holds the lock in between.
    """

    def __init__(self, engine: Engine, frontend: Frontend, observer: LoadObserver) -> None:
        self.engine = engine
        self.frontend = frontend
        self._observer = observer
        self._lock = _FairLock()
        # Prompts to end, True: and to forget. A stream may be garbage-collected while this very thread holds the lock,
        # so ending a prompt only queues it.
        self._to_end: deque[tuple[str, bool]] = deque()
        self._errors: dict[str, EngineError] = {}  # by prompt
        self._load: LoadWindow | None = None  # since the last call of `expert_load`

    def submit(self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams]) -> list[str]:
        """Start one or many prompts. Returns their ids; see `Frontend.submit` for arguments and errors."""
        prompt_ids: list[str] = []
        try:
            with self._exclusive():
                submissions = self.frontend.submit(prompts, sampling_params)
                prompt_ids += [submission.prompt_id for submission in submissions]
                for submission in submissions:
                    for request in submission.requests:
                        self.engine.add(request)
        except BaseException:
            self.discard(prompt_ids)
            raise
        return prompt_ids

    def advance(self, prompt_ids: Sequence[str]) -> list[str]:
        """Run one engine step, unless all of these prompts have finished. Returns those that have not.

        A Ctrl-C ends the requests of this caller only.

        Raises:
            EngineError: the engine failed while it served one of them.
        """
        with self._exclusive():
            unfinished = self._unfinished(prompt_ids)
            if unfinished and self._errors.keys().isdisjoint(prompt_ids):
                is_alone = len(unfinished) == len(self.frontend.unfinished_prompts)
                try:
                    self._step(interruptible=is_alone)
                except EngineError as failure:  # it ended the requests of all callers
                    for prompt_id in self.frontend.unfinished_prompts:
                        self._errors.setdefault(prompt_id, failure)
            for prompt_id in prompt_ids:
                if prompt_id in self._errors:
                    error = self._errors[prompt_id]
                    raise EngineError(str(error)) from error.__cause__  # several threads may raise it
            unfinished = self._unfinished(prompt_ids)
            if unfinished and not self.engine.has_work:
                raise EngineError(f"the engine has lost the prompts {', '.join(unfinished)}; submit them again")
            return unfinished

    def output(self, prompt_id: str) -> RequestOutput:
        """Return all outputs of a prompt, complete so far."""
        with self._exclusive():
            return self.frontend.output(prompt_id)

    def abort(self, prompt_id: str) -> None:
        """End a prompt, if it is in flight. Its outputs so far can still be read."""
        self._end([(prompt_id, False)])

    def discard(self, prompt_ids: Sequence[str]) -> None:
        """End prompts and forget them. Safe in finalisers: it never waits."""
        self._end([(prompt_id, True) for prompt_id in prompt_ids])

    def expert_load(self) -> LoadWindow:
        """Return the load of experts on all ranks since the last call.

        Raises:
            EngineError: the engine was shut down, or has failed.
        """
        with self._exclusive():
            window, self._load = self._collect_load(), None
            return window

    def peek_expert_load(self) -> LoadWindow:
        """Return the same as `expert_load`, without starting a new period."""
        with self._exclusive():
            return self._collect_load()

    def shutdown(self) -> None:
        """End all requests and the engine. May be called twice."""
        with self._exclusive():
            if self._observer.is_enabled:
                with contextlib.suppress(EngineError):  # the engine has failed, or was shut down before
                    self._collect_load()
            self._observer.close()
            self.engine.shutdown()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock, and end queued prompts before and after. Ctrl-C is deferred meanwhile."""
        with interrupts_deferred():
            with self._lock:
                self._end_queued()
                yield
                self._end_queued()
            self._end([])  # queued between the last line and the release of the lock

    def _end(self, prompts: list[tuple[str, bool]]) -> None:
        with interrupts_deferred():
            self._to_end += prompts
            while self._to_end and self._lock.acquire_at_once():  # otherwise the thread that holds the lock ends them
                try:
                    self._end_queued()
                finally:
                    self._lock.release()

    def _end_queued(self) -> None:
        while self._to_end:
            prompt_id, forgets = self._to_end.popleft()
            request_ids = self.frontend.unfinished(prompt_id)
            if forgets:
                self._errors.pop(prompt_id, None)
                self.frontend.discard(prompt_id)
            with contextlib.suppress(EngineError):  # an engine that has failed has no requests
                for request_id in request_ids:
                    self.engine.abort(request_id)

    def _unfinished(self, prompt_ids: Iterable[str]) -> list[str]:
        unfinished_prompts = self.frontend.unfinished_prompts
        return [prompt_id for prompt_id in prompt_ids if prompt_id in unfinished_prompts]

    def _step(self, *, interruptible: bool) -> None:
        for update in self.engine.step(interruptible=interruptible):
            try:
                progress = self.frontend.update(update)
            except Exception as error:  # the other updates of the step must not be lost
                failure = EngineError(f"the output could not be updated: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._errors.setdefault(self.frontend.prompt_of(update.request_id), failure)
                continue
            if progress is None:
                continue
            if update.error is not None:
                self._errors.setdefault(progress.prompt_id, EngineError(update.error))
            if progress.abort_request_id is not None:
                self.engine.abort(progress.abort_request_id)
        self._note_loads(self.engine.take_loads())

    def _collect_load(self) -> LoadWindow:
        self.engine.collect_load()
        self._note_loads(self.engine.take_loads(wait=True))
        assert self._load is not None
        return self._load

    def _note_loads(self, windows: list[LoadWindow]) -> None:
        for window in windows:
            self._observer.observe(window)
            self._load = window if self._load is None else summed([self._load, window])


class _FairLock:
    """A lock that a thread cannot take again while another one waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by the thread that is next

    def __enter__(self) -> None:
        with self._turn:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire_at_once(self) -> bool:
        """Take the lock if it is free. Returns True if it was."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        self._lock.release()
