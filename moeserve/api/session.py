"""`Session`: one engine and its frontend, shared by all threads that use an `LLM` or an `AsyncLLM`."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from moeserve.api.frontend import EncodedPrompts, Frontend, Submission
from moeserve.api.prompts import EncodedPrompt, Params, Prompts
from moeserve.controls import Command, ControlResult
from moeserve.engine.base import EngineClient
from moeserve.errors import EngineError, MoeserveError, QueueFullError, RequestError, StaleWeightsError
from moeserve.interrupts import interrupts_allowed, interrupts_deferred
from moeserve.outputs import RequestOutput
from moeserve.protocol import AbortRequest
from moeserve.sampling_params import SamplingParams
from moeserve.telemetry.expert_load import LoadWindow, summed
from moeserve.telemetry.observer import LoadObserver


class Session:
    """The prompts in flight on one engine. Any thread may call any method.

    One thread at a time runs the engine, in `poll`. Other threads queue requests and aborts for it, and wake it.
    """

    def __init__(
        self, engine: EngineClient, frontend: Frontend, observer: LoadObserver, *, max_requests: Callable[[], int]
    ) -> None:
        """
        Args:
            max_requests: returns the maximum number of requests in flight, which depends on the number of replicas. If
                no request is in flight, a prompt with more outputs than this maximum is accepted.
        """
        self.engine = engine
        self.frontend = frontend
        self.observer = observer
        self._max_requests = max_requests
        self._engine_lock = _FairLock()
        self._is_polling = False  # the holder of the engine lock may be waiting in the engine
        # Protects the frontend's prompts, `_errors` and `_unreported`. A single entry may be read without the lock. A
        # thread must not wait for anything else while it holds this lock.
        self._frontend_lock = threading.Lock()
        self._engine_is_free = threading.Condition(self._frontend_lock)  # notified when a thread releases the engine
        # Prompts to end, and True if they are also to be discarded. The garbage collector may close a stream in any
        # thread, even one that holds the frontend lock. The holder of that lock therefore ends them when it releases
        # the lock.
        self._to_end: deque[tuple[str, bool]] = deque()
        self._for_engine: deque[Submission | AbortRequest] = deque()  # for the next thread that uses the engine
        self._errors: dict[str, MoeserveError] = {}  # by id of the prompt
        self._unreported: dict[str, None] = {}  # prompts with changes that `poll` or `advance` have not reported
        self._load: LoadWindow | None = None  # expert load since the last call of `expert_load`

    @property
    def has_work(self) -> bool:
        """True if `poll` has work to do."""
        if self._for_engine or self._to_end or self._unreported or self.engine.has_work:
            return True
        with self._frontend():
            return not self.frontend.unfinished_prompts <= self._errors.keys()

    def submit(
        self,
        prompts: Prompts,
        sampling_params: Params | Sequence[Params],
        prompt_id: str | None = None,
    ) -> list[str]:
        """Start one or many prompts without waiting. Return their ids; see `Frontend` for arguments and errors.

        Raises:
            QueueFullError: too many requests are in flight. No prompt was started.
        """
        with interrupts_deferred(), self._frontend_lock:  # check before spending time on tokenizing
            self._require_room(1)
        encoded = self.frontend.encode(prompts, sampling_params)
        with interrupts_deferred():
            with self._frontend_lock:
                self._require_room(sum(params.n for _, params in encoded))
                prompt_ids = self._submit(encoded, prompt_id)
            self.wake()
        return prompt_ids

    def submit_first(self, waiting: deque[tuple[EncodedPrompt, SamplingParams]]) -> list[str]:
        """Remove as many prompts from the front of the queue as there is room for, and start them. Return their ids."""
        with interrupts_deferred():
            most = self._max_requests()
            with self._frontend_lock:
                num_in_flight, started = self._num_in_flight(), []
                while waiting and (not num_in_flight or num_in_flight + waiting[0][1].n <= most):
                    num_in_flight += waiting[0][1].n
                    started.append(waiting.popleft())
                prompt_ids = self._submit(started)
            self.wake()
        return prompt_ids

    def _require_room(self, num_new: int) -> None:
        num_in_flight = self._num_in_flight()
        if num_in_flight and num_in_flight + num_new > (most := self._max_requests()):
            raise QueueFullError(
                f"{num_in_flight} requests are in flight; at most {most} may be (max_queued_requests, "
                "and max_num_seqs of each replica): there is no room for these prompts. Try again later"
            )

    def _num_in_flight(self) -> int:
        self._take_ends()
        return self.frontend.num_requests - sum(len(self.frontend.unfinished(failed)) for failed in self._errors)

    def _submit(self, encoded: EncodedPrompts, prompt_id: str | None = None) -> list[str]:
        submissions = self.frontend.register(encoded, prompt_id)
        self._for_engine += submissions
        return [submission.prompt_id for submission in submissions]

    def poll(self) -> list[str]:
        """Run the engine until requests have new tokens or have ended, or until a request or an abort is queued.

        Returns:
            The ids of the prompts that have changed.
        """
        with self._exclusive():
            self._poll()
            with self._frontend_lock:
                changed = list(self._unreported)
                self._unreported.clear()
            return changed

    def advance(self, prompt_ids: Sequence[str], *, waits_for_others: bool = False) -> list[str]:
        """Run the engine for one step, or wait while another thread runs it.

        Returns at once if all of these prompts have ended, or if another thread has advanced any of them.

        Args:
            waits_for_others: do not return at once if all prompts have ended: the caller waits for room in the queue.

        Returns:
            The prompts that have not ended.
        """
        with interrupts_deferred():
            if not self._wait_for_reports(prompt_ids, waits_for_others):
                with self._exclusive():
                    if waits_for_others or self._unfinished(prompt_ids):  # the engine may just have refused them
                        self._poll()
                    with self._frontend_lock:
                        self._take_reports(prompt_ids)
            return self._unfinished(prompt_ids)

    def _wait_for_reports(self, prompt_ids: Sequence[str], waits_for_others: bool) -> bool:
        """Wait while another thread runs the engine. Return False if this thread should run it; see `advance`."""
        with self._frontend_lock:
            if self._take_reports(prompt_ids) or not (waits_for_others or self._unfinished(prompt_ids)):
                return True
            if not self._is_polling:
                return False
            with interrupts_allowed():
                self._engine_is_free.wait()
            self._take_reports(prompt_ids)
            return True

    def has_failed(self, prompt_id: str) -> bool:
        """Return True if an error has ended a prompt; see `raise_error`."""
        return prompt_id in self._errors

    def raise_error(self, prompt_ids: Iterable[str], outputs: Sequence[RequestOutput] = ()) -> None:
        """Raise the first error that has ended one of these prompts. Several threads may raise the same error.

        Args:
            outputs: becomes `outputs` of the error.

        Raises:
            EngineError: the engine failed while it served the prompt.
            RequestError: the engine cannot serve the prompt.
        """
        for prompt_id in prompt_ids:
            if prompt_id in self._errors:
                cause = self._errors[prompt_id]
                error = type(cause)(str(cause))
                error.outputs = outputs
                raise error from cause.__cause__

    def output(self, prompt_id: str) -> RequestOutput:
        """Return all outputs of a prompt so far."""
        with self._frontend():
            return self.frontend.output(prompt_id)

    def new_output(self, prompt_id: str) -> RequestOutput | None:
        """Return new output of a prompt since the last call, according to its `output_kind`; None if there is none."""
        with self._frontend():
            return self.frontend.new_output(prompt_id)

    def reset_prefix_cache(self) -> None:
        """Let later prompts use no blocks that were cached for earlier prompts."""
        with self._frontend():
            self.frontend.reset_prefix_cache()

    def abort(self, prompt_id: str) -> None:
        """End a prompt if it is in flight. Its outputs so far can still be read."""
        self._end([(prompt_id, False)])

    def discard(self, prompt_ids: Sequence[str]) -> None:
        """End and remove prompts. Safe to call in finalisers: it never waits."""
        self._end([(prompt_id, True) for prompt_id in prompt_ids])

    def expert_load(self) -> LoadWindow:
        """Return the expert load of all ranks since the last call, or since the number of ranks last changed.

        Raises:
            EngineError: the engine was shut down, or has failed.
        """
        with self._exclusive_soon():
            window, self._load = self._collect_load(), None
            return window

    def peek_expert_load(self) -> LoadWindow:
        """Return the same as `expert_load`, without starting a new window."""
        with self._exclusive_soon():
            return self._collect_load()

    def scale(self, data_parallel_size: int) -> Future[None]:
        """Start to change the number of replicas; see `Engine.scale`. Polling advances the change."""
        with self._exclusive_soon():
            return self.engine.scale(data_parallel_size)

    def control(self, command: Command) -> Future[ControlResult]:
        """Start to run a command between two steps; see `EngineClient.control`. Polling advances it."""
        with self._exclusive_soon():
            return self.engine.control(command)

    def run_until(self, ended: Future[Any]) -> None:
        """Run the engine in turn with other threads until a future is done.

        A thread that runs the engine is woken: while the engine is paused, nothing else might end its turn.
        """
        while not ended.done():
            with self._exclusive_soon():
                if not ended.done():
                    self._poll()

    def shutdown(self) -> None:
        """End all requests and shut down the engine. May be called twice."""
        with self._exclusive_soon():
            if self.observer.is_enabled:
                with contextlib.suppress(EngineError):  # the engine has failed or is already shut down
                    self._collect_load()
            self.observer.close()
            self.engine.shutdown()

    @contextlib.contextmanager
    def _exclusive(self, wake: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Use the engine exclusively. Ctrl-C is deferred meanwhile.

        Args:
            wake: as for `_FairLock.held`.
        """
        with interrupts_deferred():
            with self._engine_lock.held(wake):
                self._is_polling = True
                try:
                    self._handle_queues()
                    yield
                    self._handle_queues()
                finally:
                    self._is_polling = False
                    with self._frontend_lock:
                        self._engine_is_free.notify_all()
            if self._to_end or self._for_engine:  # queued since `_handle_queues`
                self._end([])

    @contextlib.contextmanager
    def _exclusive_soon(self) -> Iterator[None]:
        """Use the engine exclusively, and wake another thread that waits in the engine, so that it returns soon."""
        with self._exclusive(self.engine.wake):
            yield

    @contextlib.contextmanager
    def _frontend(self) -> Iterator[None]:
        """Hold the frontend lock. Afterwards, abort the requests whose users were garbage-collected meanwhile."""
        with self._frontend_lock:
            yield
        if self._to_end:
            self._end([])

    def wake(self) -> None:
        """Make the thread that runs the engine handle the queues.

        Without such a thread, the next thread that uses the engine handles them.
        """
        if self._is_polling:
            self.engine.wake()

    def _end(self, prompts: list[tuple[str, bool]]) -> None:
        with interrupts_deferred():
            self._to_end += prompts
            if self._frontend_lock.acquire(blocking=False):  # this thread may hold it: see `_to_end`
                try:
                    self._take_ends()
                finally:
                    self._frontend_lock.release()
            if self._is_polling:
                self.engine.wake()
            # No thread runs the engine, perhaps for long, so pass the aborts on here. If the engine lock is taken, its
            # holder is about to pass them on; it may be this thread, if the garbage collector runs in it.
            elif self._engine_lock.acquire_at_once():
                try:
                    self._pass_on(adds=False)
                finally:
                    self._engine_lock.release()

    def _take_ends(self) -> None:
        """End the prompts that are queued to end, and discard some of them. The frontend lock must be held."""
        while self._to_end:
            prompt_id, forgets = self._to_end.popleft()
            self._for_engine += map(AbortRequest, self.frontend.unfinished(prompt_id))
            if forgets:
                self._errors.pop(prompt_id, None)
                self._unreported.pop(prompt_id, None)
                self.frontend.discard(prompt_id)

    def _handle_queues(self) -> None:
        with self._frontend_lock:
            self._take_ends()
        self._pass_on(adds=True)

    def _pass_on(self, *, adds: bool) -> None:
        """Pass queued requests and aborts to the engine.

        Args:
            adds: False: stop at a new request, because adding it may restart the engine. The thread that queued it soon
                polls, and adds it.
        """
        while self._for_engine:
            first = self._for_engine[0]
            if isinstance(first, AbortRequest):
                with contextlib.suppress(EngineError):  # a failed engine has no requests
                    self.engine.abort(first.request_id)
            elif self.frontend.prompt_of(first.request.request_id) is not None:  # not discarded meanwhile
                if not adds:
                    return
                self._add(first)
            self._for_engine.popleft()  # only after success: a Ctrl-C may interrupt a restart above

    def _add(self, submission: Submission) -> None:
        try:
            self.engine.add(submission.request, submission.samples)
        except (EngineError, RequestError) as error:
            with self._frontend_lock:
                if (prompt_id := self.frontend.prompt_of(submission.request.request_id)) is not None:
                    self._fail(prompt_id, error)

    def _take_reports(self, prompt_ids: Sequence[str]) -> bool:
        """Clear the reports of these prompts. Return True if any has changed since its last report.

        The frontend lock must be held.
        """
        changed = [name for name in prompt_ids if name in self._unreported]
        for name in changed:
            del self._unreported[name]
        return bool(changed)

    def _unfinished(self, prompt_ids: Iterable[str]) -> list[str]:
        unfinished_prompts = self.frontend.unfinished_prompts
        return [name for name in prompt_ids if name in unfinished_prompts and name not in self._errors]

    def _fail(self, prompt_id: str, error: MoeserveError) -> None:
        """End a prompt with an error. The frontend lock must be held."""
        if self._errors.setdefault(prompt_id, error) is error:
            self._unreported[prompt_id] = None

    def _poll(self) -> None:
        try:
            updates = self.engine.step()
        except EngineError as error:  # the engine has ended all its requests
            with self._frontend_lock:
                waiting = {queued.prompt_id for queued in self._for_engine if isinstance(queued, Submission)}
                for concerned in self.frontend.unfinished_prompts - waiting:  # queued prompts may restart the engine
                    self._fail(concerned, error)
            return
        to_abort: list[str] = []
        with self._frontend_lock:
            if not self._for_engine and not updates and not self.engine.has_work:
                for lost in self._unfinished(self.frontend.unfinished_prompts):
                    self._fail(lost, EngineError(f"the engine has lost request {lost!r}: an error of moeserve"))
            for update in updates:
                prompt_id = self.frontend.prompt_of(update.request_id)
                if prompt_id is None:  # ended by the frontend while the engine was a step ahead
                    continue
                self._unreported[prompt_id] = None
                try:
                    ended_here = self.frontend.update(update)
                except Exception as error:  # of any type: the step's other updates must not be lost
                    failure = EngineError(f"the output could not be updated: {type(error).__name__}: {error}")
                    failure.__cause__ = error
                    self._fail(prompt_id, failure)
                    continue
                if update.error is not None:
                    kind = StaleWeightsError if update.error == self.engine.weights.refusal else EngineError
                    self._fail(prompt_id, kind(update.error))
                if ended_here:
                    to_abort.append(update.request_id)
        for request_id in to_abort:
            self.engine.abort(request_id)
        self._note_loads(self.engine.take_loads())

    def _collect_load(self) -> LoadWindow:
        self.engine.collect_load()
        self._note_loads(self.engine.take_loads(wait=True))
        assert self._load is not None
        return self._load

    def _note_loads(self, windows: list[LoadWindow]) -> None:
        for window in windows:
            self.observer.observe(window)
            is_comparable = self._load is not None and self._load.num_ranks == window.num_ranks
            self._load = summed([self._load, window]) if self._load is not None and is_comparable else window


class _FairLock:
    """A lock that a thread cannot take twice in a row while another thread waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by the thread that is next in line

    @contextlib.contextmanager
    def held(self, wake: Callable[[], None]) -> Iterator[None]:
        """Hold the lock.

        Args:
            wake: makes the thread that holds the lock release it soon. It is called when this thread is next in line.
                If it were called earlier, the holder could release the lock, take it again, and hold it for long.
        """
        with self._turn:
            if not self._lock.acquire(blocking=False):
                wake()
                self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def acquire_at_once(self) -> bool:
        """Take the lock if it is free. Return True if so."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        self._lock.release()
