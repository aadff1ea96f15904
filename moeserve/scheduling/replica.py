"""The loop of one replica among several: take in messages, plan, agree, execute, commit, tell.

It does nothing itself. `Replica.run` is a generator that yields what is to be done next and is sent what came of it, so
the process that serves and the simulator drive the very same code. It knows no torch, no sockets and no clock.

Why no replica waits for ever is told in `lockstep.py`. What this file adds to the argument: each round passes through
exactly one `Gather`, and through exactly one `Execute` unless all agreed to idle; `Receive` is the only other effect
that can wait, and where there is more than one replica it has a heartbeat.

How to drive it::

    generator = replica.run()
    effect = next(generator)
    while True:                                   # until StopIteration: the replicas agreed to shut down
        effect = generator.send(answer to effect) # or generator.throw(error)

Errors are thrown in at the effect that failed:

- At `Gather` or `Execute`: this replica is out of step with the others for good. It yields one last `Deliver`, which
  ends all its requests, and raises the error again. The process must then end, and with it the worker group.
- At `Receive` or `Deliver`: nobody waits inside a collective yet, so the replica goes on to the next `Gather` and says
  that it has failed. All replicas end after this round, each with a last `Deliver`. The same happens when its own books
  fail.
- That another replica died is an error of the collective, at `Gather` or `Execute`. A replica asleep in `Receive` is
  sent [] as by a heartbeat, and meets the error in the `Gather` that follows.

A step whose collectives all completed, but whose result is of no use on this replica alone (such as logits that are not
numbers), is no error in this sense: send `StepFailed`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from moeserve.errors import EngineError, RequestError
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    CollectLoad,
    ReplicaMessage,
    ReplicaStats,
    Request,
    RequestUpdate,
    Shutdown,
    StepPlan,
    StepResult,
    Wake,
)
from moeserve.scheduling.lockstep import Agreement, Intent, IntentFlags, Lockstep
from moeserve.scheduling.scheduler import Scheduler
from moeserve.telemetry.expert_load import LoadWindow


@dataclass(frozen=True, kw_only=True)
class Receive:
    """To be answered with the messages that came since the last time, list[ReplicaMessage], in the order they came."""

    block: bool  # if none are there, sleep until one comes
    heartbeat: bool  # sleep no longer than the heartbeat either, and answer []; without it, as long as it takes


@dataclass(frozen=True)
class Gather:
    """To be answered with the rows of all replicas in order of rank, list[list[int]]. Waits for all of them."""

    row: list[int]


@dataclass(frozen=True)
class Execute:
    """To be answered with a StepResult or StepFailed. Without a plan: run zero tokens, and answer anything."""

    plan: StepPlan | None  # plan.step counts this replica's plans, agreement.step everyone's rounds
    agreement: Agreement


@dataclass(frozen=True)
class Deliver:
    """To be answered with None. One per round, also where there is no news, and a last one at the end."""

    updates: list[RequestUpdate]
    stats: ReplicaStats
    load: LoadWindow | None = None  # of the first replica alone: the others would tell the same
    answers: bool = False  # the load was asked for, by a `CollectLoad` that came before it was collected


Effect: TypeAlias = Receive | Gather | Execute | Deliver


@dataclass(frozen=True)
class StepFailed:
    """The step ran to its end with all replicas, but this one cannot use what it gave."""

    error: str


class Replica:
    """The requests of one replica from their arrival to their end, in step with all other replicas."""

    def __init__(self, *, scheduler: Scheduler, lockstep: Lockstep, load_window: int = 0) -> None:
        """
        Args:
            load_window: after so many steps all ranks tell what their experts were given; 0: only when asked.
        """
        self._load_window = load_window
        self._steps_since_load = 0
        self._wants_load = False
        self._answers_load = False  # the load that was collected last was asked for
        self._load: LoadWindow | None = None  # what the next `Deliver` tells
        self._placement_epoch = 0  # the newest whose weights its ranks hold
        self._scheduler = scheduler
        self._lockstep = lockstep
        self._unended: dict[str, None] = {}  # accepted requests whose end is not among the news yet
        self._news: list[RequestUpdate] = []  # what the next `Deliver` tells
        self._wants_shutdown = False
        self._failure: Exception | None = None

    def run(self) -> Generator[Effect, Any, None]:
        """Yields effects, and is sent their answers, until all replicas agree to shut down.

        Raises:
            EngineError: another replica has failed.
            LockstepError: the replicas are out of step.
            Exception: what was thrown in, or what went wrong in this replica's own books.
        """
        try:
            yield from self._stay_in_step()
        except Exception as error:
            self._end_all(f"{type(error).__name__}: {error}")
            yield self._deliver()
            raise
        yield self._deliver()

    def _stay_in_step(self) -> Generator[Effect, Any, None]:
        """Round after round. Returns when all agreed to leave."""
        plan, result, is_idle = None, None, False
        while True:
            try:
                plan = yield from self._between_collectives(plan, result, is_idle)
            except Exception as error:  # nobody else knows: say so in the agreement, and all end together
                plan, self._failure = None, error
            # collective: all replicas
            rows = yield Gather(self._lockstep.begin(self._intent(plan)))
            agreement = self._lockstep.finish(rows)
            if agreement.failed_ranks:
                raise self._failure or EngineError(f"replica {agreement.failed_ranks[0]} failed; all must end with it")
            if agreement.is_shutdown:
                return
            is_idle = agreement.is_idle
            if agreement.collects_load:
                self._answers_load |= self._wants_load
                self._wants_load, self._steps_since_load = False, 0
            self._steps_since_load += any(agreement.num_tokens)
            # collective: all replicas, whether they have a plan or not
            result = None if is_idle else (yield Execute(plan, agreement))
            if isinstance(result, StepResult):
                self._placement_epoch = result.placement_epoch
                if self._lockstep.rank == 0 and result.load is not None:
                    self._load = result.load

    def _between_collectives(
        self, plan: StepPlan | None, result: StepResult | StepFailed | None, is_idle: bool
    ) -> Generator[Effect, Any, StepPlan | None]:
        """All that a replica does on its own: take in what the last step gave, tell, listen, plan the next step.

        It waits only if all replicas found nothing to do, and then no longer than a heartbeat.
        """
        if plan is not None:
            self._take_in(plan, result)
        yield self._deliver()
        messages: list[ReplicaMessage] = yield Receive(
            block=is_idle, heartbeat=is_idle and self._lockstep.num_replicas > 1
        )
        for message in messages:
            self._obey(message)
        return self._scheduler.schedule()

    def _intent(self, plan: StepPlan | None) -> Intent:
        return Intent(
            num_tokens=0 if plan is None else plan.num_tokens,
            is_decode_only=plan is None or plan.is_decode_only,
            placement_epoch=self._placement_epoch,
            flags=IntentFlags(
                wants_shutdown=self._wants_shutdown,
                has_failed=self._failure is not None,
                wants_load=self._wants_load or 0 < self._load_window <= self._steps_since_load,
            ),
        )

    def _take_in(self, plan: StepPlan, result: StepResult | StepFailed | None) -> None:
        """Ends the requests of a step that failed here. The others, and the replica, go on."""
        if isinstance(result, StepFailed):
            for update in self._scheduler.abort_step():
                self._tell(update, error=result.error)
            return
        assert result is not None, f"step {plan.step}: no result came"
        for update in self._scheduler.commit(plan, result):
            self._tell(update)

    def _obey(self, message: ReplicaMessage) -> None:
        match message:
            case AddRequest(request=request):
                self._add(request)
            case AbortRequest(request_id=request_id):
                update = self._scheduler.abort(request_id)
                if update is not None:
                    self._tell(update)
            case Shutdown():
                self._wants_shutdown = True
                for update in self._scheduler.abort_all():
                    self._tell(update, error="the engine was shut down")
            case CollectLoad():
                self._wants_load = True
            case Wake():
                pass  # that it came was its meaning

    def _add(self, request: Request) -> None:
        """Accepts a request or ends it with an error, never with an exception: the others have done nothing wrong."""
        request_id = request.request_id
        try:
            if self._wants_shutdown:
                raise RequestError(f"request {request_id!r} came after the engine was told to shut down")
            self._scheduler.add(request)
        except RequestError as error:
            # Two requests under one id could not be told apart: both end, as one.
            self._scheduler.abort(request_id)
            self._tell(RequestUpdate(request_id=request_id, finish_reason="abort"), error=str(error))
        else:
            self._unended[request_id] = None

    def _tell(self, update: RequestUpdate, *, error: str | None = None) -> None:
        """Every piece of news passes here, and each end strikes the request off: so none ends twice."""
        if update.finish_reason is not None:
            self._unended.pop(update.request_id, None)
        self._news.append(update if error is None else msgspec.structs.replace(update, error=error))

    def _end_all(self, error: str) -> None:
        """Ends what has not ended, by this file's own list: the scheduler's books may be what failed."""
        for request_id in list(self._unended):
            self._tell(RequestUpdate(request_id=request_id, finish_reason="abort"), error=error)

    def _deliver(self) -> Deliver:
        news, self._news = self._news, []
        load, self._load = self._load, None
        answers = load is not None and self._answers_load
        self._answers_load &= not answers
        stats = ReplicaStats(
            num_free_blocks=self._scheduler.num_free_blocks,
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            step=self._lockstep.step,
        )
        return Deliver(news, stats, load, answers)
