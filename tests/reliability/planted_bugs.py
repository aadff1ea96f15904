"""Replicas, schedulers and agreements with one bug each, which the simulator and the exhaustive search must find.

Most of them are known from other engines with this kind of loop.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import msgspec
from scenario import LOAD_WINDOW

from moeserve.controls import Control, Outcome
from moeserve.protocol import AbortRequest, Delivery, ReplicaMessage, Request, RequestUpdate, StepPlan
from moeserve.scheduling.lockstep import CONTROL, REQUESTS_LOAD, REQUESTS_SHUTDOWN, Agreement, Round, RoundResult, agree
from moeserve.scheduling.replica import Effect, Events, Replica, Submit, Wait
from moeserve.scheduling.request import LiveRequest
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig

Run = Generator[Effect, Any, None]
Agree = Callable[..., Agreement]
NOTHING = Events([], [])


class Leave(Exception):
    """Raised by `meddle` to end a run."""


class Meddled(Replica):
    """A replica with `meddle` between it and its driver."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        return (yield effect)

    def run(self) -> Run:
        run = super().run()
        answer = None
        while True:
            try:
                effect = run.send(answer)
                answer = yield from self.meddle(effect)
            except (StopIteration, Leave):
                return


class SkipsPaddingRounds(Meddled):
    """Its ranks do not get rounds in which it has nothing to run."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        if isinstance(effect, Submit) and effect.work.plan is None:
            return None
        return (yield effect)


class LeavesWithoutWork(Meddled):
    """It returns when a step has nothing to run for it."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        answer = yield effect
        if isinstance(answer, Events) and any(
            not each.agreement.is_idle and each.result is not None and not each.result.chunks for each in answer.results
        ):
            raise Leave
        return answer


class SpinsWhenIdle(Meddled):
    """It never sleeps."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        answer = yield effect
        if isinstance(effect, Wait):
            self._is_awake = True
        return answer

    def _finish_round(self, ended: Any, result: RoundResult) -> None:
        super()._finish_round(ended, result)
        self._is_awake = True


class NeedsWakeUps(Meddled):
    """It sleeps until a message comes, without a heartbeat."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        return (yield Wait(heartbeat=False) if isinstance(effect, Wait) else effect)


class IgnoresHeartbeat(Meddled):
    """It goes back to sleep after a heartbeat without messages."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        answer = yield effect
        while isinstance(effect, Wait) and effect.heartbeat and answer == NOTHING:
            answer = yield effect
        return answer


class ReadsOneMessage(Meddled):
    """It drops all but the first of several messages."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        answer = yield effect
        if isinstance(answer, Events):
            return dataclasses.replace(answer, messages=answer.messages[:1])
        return answer


class ReadsOneResult(Meddled):
    """It drops all but the first of several results."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        answer = yield effect
        if isinstance(answer, Events):
            for _ in answer.results[1:]:
                self._rounds.popleft()
            return dataclasses.replace(answer, results=answer.results[:1])
        return answer


class SendsPlanTwice(Meddled):
    """It sends a plan again in the next round."""

    last: StepPlan | None = None

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        if isinstance(effect, Submit):
            repeated = self.last is not None and effect.work.plan is None
            if repeated:
                effect = Submit(Round(row=effect.work.row, plan=self.last))
            self.last = None if repeated else effect.work.plan
        return (yield effect)


class EndsPlannedRequests(Meddled):
    """It drops a plan whose requests were aborted after it was announced."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        if isinstance(effect, Submit) and effect.work.plan is not None and len(self._scheduler.live_request_ids) == 1:
            events = yield Wait(heartbeat=True)
            if any(isinstance(message, AbortRequest) for message in events.messages):
                effect = Submit(Round(row=effect.work.row, plan=None))
            answer = yield effect
            for message in events.messages:
                self._handle(message)
            return answer
        return (yield effect)


class GoesOnAfterFailure(Replica):
    """It does not end when a replica has announced a failure."""

    def run(self) -> Run:
        run = super().run()
        answer = None
        while True:
            try:
                effect = run.send(answer)
            except StopIteration:
                return
            answer = yield effect
            if isinstance(answer, Events):
                results = [
                    msgspec.structs.replace(each, agreement=dataclasses.replace(each.agreement, failed_ranks=()))
                    for each in answer.results
                ]
                answer = Events(answer.messages, results)


class HidesFailure(Replica):
    """It does not announce an internal error, and goes on."""

    def _next_round(self) -> Round | None:
        work = super()._next_round()
        self._failure, self._is_failure_announced = None, False
        if work is not None:
            work.row[-1] &= ~2
        return work


class LosesAbort(Replica):
    """It sends no update for an aborted request."""

    def _handle(self, message: ReplicaMessage) -> None:
        if isinstance(message, AbortRequest):
            self._scheduler.abort(message.request_id)
        else:
            super()._handle(message)


class ReportsAbortOnly(Replica):
    """It reports the end of an aborted request, and goes on computing it."""

    def _handle(self, message: ReplicaMessage) -> None:
        if isinstance(message, AbortRequest) and message.request_id in self._scheduler.live_request_ids:
            self._queue_update(RequestUpdate(request_id=message.request_id, finish_reason="abort"))
        elif not isinstance(message, AbortRequest):
            super()._handle(message)


class HidesErrors(Replica):
    """A request that fails looks as if it had been aborted."""

    def _queue_update(self, update: RequestUpdate, *, error: str | None = None) -> None:
        super()._queue_update(msgspec.structs.replace(update, error=None))


class AbortsWhileItPlans(Replica):
    """It handles an abort in the middle of planning a step, as if a garbage collector had called it."""

    def _handle(self, message: ReplicaMessage) -> None:
        if not isinstance(message, AbortRequest):
            super()._handle(message)
            return
        pool, handle = self._scheduler._caches.pool, super()._handle
        allocate = pool.allocate

        def allocate_and_abort(num_blocks: int) -> list[int]:
            pool.allocate = allocate  # type: ignore[method-assign]
            taken = allocate(num_blocks)
            handle(message)
            return taken

        pool.allocate = allocate_and_abort  # type: ignore[method-assign]


class RaisesRequestError(Replica):
    """A bad request raises an exception."""

    def _add(self, request: Request) -> None:
        self._scheduler.add(request)


class EndsTwice(Replica):
    """At the end it reports requests again that had ended before."""

    def _queue_update(self, update: RequestUpdate, *, error: str | None = None) -> None:
        super()._queue_update(update, error=error)
        if update.finish_reason == "abort":
            super()._queue_update(update, error=error)


class LosesTokens(Replica):
    """It delivers only the updates that end a request, if there are any."""

    def _deliver(self) -> Delivery:
        if any(update.finish_reason is not None for update in self._updates):
            self._updates = [update for update in self._updates if update.finish_reason is not None]
        return super()._deliver()


class CountsOnlySteps(Replica):
    """The number of its rounds does not grow in idle rounds."""

    def _finish_round(self, ended: Any, result: RoundResult) -> None:
        super()._finish_round(ended, result)
        self._num_sent -= result.agreement.is_idle


class RequestsLoadInEveryRound(Replica):
    """It asks for expert loads again while a round in flight asks for them."""

    def _must_request_load(self) -> bool:
        return self._load_requested or 0 < self._load_window <= self._steps_since_load


class SendsRoundsBehindControls(Replica):
    """It sends the next round while one is in flight in which the ranks may run a control."""

    def _next_round(self) -> Round | None:
        rounds = self._rounds
        self._rounds = deque(dataclasses.replace(each, control=None) for each in rounds)
        work = super()._next_round()
        rounds.extend(list(self._rounds)[len(rounds) :])
        self._rounds = rounds
        return work


class PausesBeforeRequestsEnd(Replica):
    """It does not wait for its requests before it pauses."""

    def _control_to_announce(self) -> Control | None:
        return self._controls[0] if self._controls and self._failure is None else None


class PlansWhilePaused(Replica):
    """It pauses for one round only."""

    def _finish_round(self, ended: Any, result: RoundResult) -> None:
        super()._finish_round(ended, result)
        self._is_paused = False


class PlansDuringUpdates(Replica):
    """It goes on while weights are written."""

    def _finish_round(self, ended: Any, result: RoundResult) -> None:
        super()._finish_round(ended, result)
        self._has_whole_weights = True


class RunsControlsTwice(Replica):
    """It announces a control again that the ranks have run."""

    def _end_control(self, control: Control, outcome: Outcome | None) -> None:
        super()._end_control(control, outcome)
        if not self._ended_controls[:-1]:
            self._controls.appendleft(control)


class LosesHeldRequests(Scheduler):
    """Requests that came during a pause are forgotten at its end."""

    def release(self) -> None:
        self._held.clear()
        super().release()


class FreesTwice(Scheduler):
    """An abort frees a block twice."""

    def abort(self, request_id: str) -> RequestUpdate | None:
        running = self._running.get(request_id)
        update = super().abort(request_id)
        if running is not None and running.cache.num_blocks and not running.num_plans:
            self._caches.pool._free[running.cache.tables[0][0]] = None
            self._caches.pool._num_holders[running.cache.tables[0][0]] -= 1
        return update


class LeaksAtAbort(Scheduler):
    """An abort does not free the last block."""

    def abort(self, request_id: str) -> RequestUpdate | None:
        request = self._running.get(request_id)
        if request is not None:
            request.cache.tables[0].pop()
        return super().abort(request_id)


class LosesUpdatesOfFailedRows(Scheduler):
    """It returns no update for a request whose row has an error."""

    def commit(self, result: Any, reports: Any = ()) -> list[RequestUpdate]:
        return [update for update in super().commit(result, reports) if update.error is None]


class EndsAllForOneRow(Scheduler):
    """A row that cannot be sampled ends all requests of its replica."""

    def commit(self, result: Any, reports: Any = ()) -> list[RequestUpdate]:
        updates = super().commit(result, reports)
        error = next((update.error for update in updates if update.error), None)
        ended = [] if error is None else self.abort_all()
        return updates + [msgspec.structs.replace(update, error=error) for update in ended]


class PlansBeyondTheEnd(Scheduler):
    """It plans tokens after the last one that a request may have, and returns them."""

    def _may_continue(self, request: LiveRequest) -> bool:
        return request.num_unplanned > 0 and request.num_unknown < 2

    def commit(self, result: Any, reports: Any = ()) -> list[RequestUpdate]:
        return [
            msgspec.structs.replace(each, token_ids=[*each.token_ids, 1]) if each.finish_reason is not None else each
            for each in super().commit(result, reports)
        ]


class ForgetsRequestsInFlight(Scheduler):
    """An abort while a plan is in flight leaves the blocks with nobody."""

    def abort(self, request_id: str) -> RequestUpdate | None:
        update = super().abort(request_id)
        self._plans.ended.clear()
        return update


def idles_alone(rows: list[list[int]], *, number: int, num_replicas: int, index: int) -> Agreement:
    """The ranks idle when their own replica has nothing to run."""
    agreement = agree(rows, number=number, num_replicas=num_replicas)
    return dataclasses.replace(agreement, is_idle=rows[index][3] == 0)


def leaves_alone(rows: list[list[int]], *, number: int, num_replicas: int, index: int) -> Agreement:
    """The ranks leave when their own replica is told to shut down."""
    agreement = agree(rows, number=number, num_replicas=num_replicas)
    return dataclasses.replace(agreement, is_shutdown=bool(rows[index][-1] & REQUESTS_SHUTDOWN))


def leaves_at_any_request(rows: list[list[int]], *, number: int, num_replicas: int, index: int) -> Agreement:
    """All leave as soon as one is told to, before the others have read all of their messages."""
    agreement = agree(rows, number=number, num_replicas=num_replicas)
    return dataclasses.replace(agreement, is_shutdown=any(row[-1] & REQUESTS_SHUTDOWN for row in rows))


def pads_alone(rows: list[list[int]], *, number: int, num_replicas: int, index: int) -> Agreement:
    """The ranks pad to the number of tokens of their own replica."""
    return dataclasses.replace(agree(rows, number=number, num_replicas=num_replicas), padded_tokens=rows[index][3])


def collects_alone(rows: list[list[int]], *, number: int, num_replicas: int, index: int) -> Agreement:
    """The ranks collect expert loads alone when their replica asks for them."""
    agreement = agree(rows, number=number, num_replicas=num_replicas)
    return dataclasses.replace(agreement, collects_load=bool(rows[index][-1] & REQUESTS_LOAD))


def runs_controls_alone(rows: list[list[int]], *, number: int, num_replicas: int, index: int) -> Agreement:
    """The ranks run a control as soon as their own replica announces it."""
    agreement = agree(rows, number=number, num_replicas=num_replicas)
    control = rows[index][CONTROL]
    return dataclasses.replace(agreement, control=control, is_idle=agreement.is_idle and not control)


def runs_padding_alone(rows: list[list[int]], *, number: int, num_replicas: int, index: int) -> Agreement:
    """A step is run even if no replica has a token."""
    return dataclasses.replace(agree(rows, number=number, num_replicas=num_replicas), is_idle=False)


def runs_after_failure(rows: list[list[int]], *, number: int, num_replicas: int, index: int) -> Agreement:
    """The ranks run a step although a replica has announced a failure."""
    return dataclasses.replace(agree(rows, number=number, num_replicas=num_replicas), failed_ranks=())


@dataclass(frozen=True)
class Planted:
    part: Any  # a class of replicas or schedulers, or an agreement
    names: set[str]  # invariants that the simulator may find violated first

    @property
    def name(self) -> str:
        return str(self.part.__name__)

    @property
    def agree_as(self) -> Agree | None:
        return None if isinstance(self.part, type) else self.part

    def make_replica(self, scheduler: Scheduler, **more: Any) -> Replica:
        """Return a replica with this faulty part."""
        if isinstance(self.part, type) and issubclass(self.part, Scheduler):
            config: SchedulerConfig = scheduler.config
            scheduler.__class__ = self.part
            assert scheduler.config is config
        kind = self.part if isinstance(self.part, type) and issubclass(self.part, Replica) else Replica
        return kind(scheduler, load_window=LOAD_WINDOW, **more)


PLANTED = [
    Planted(SkipsPaddingRounds, {"deadlock"}),
    Planted(LeavesWithoutWork, {"I1"}),
    Planted(SpinsWhenIdle, {"idle"}),
    Planted(NeedsWakeUps, {"deadlock"}),
    Planted(IgnoresHeartbeat, {"deadlock"}),
    Planted(ReadsOneMessage, {"I3", "I4"}),
    Planted(ReadsOneResult, {"livelock", "idle"}),
    Planted(SendsPlanTwice, {"I5"}),
    Planted(EndsPlannedRequests, {"I4", "I5"}),
    Planted(GoesOnAfterFailure, {"I4", "livelock"}),
    Planted(HidesFailure, {"I7"}),
    Planted(LosesAbort, {"I4"}),
    Planted(ReportsAbortOnly, {"I3", "I4"}),
    Planted(HidesErrors, {"I3"}),
    Planted(AbortsWhileItPlans, {"I4", "crash"}),
    Planted(RaisesRequestError, {"I4", "crash"}),
    Planted(EndsTwice, {"I3"}),
    Planted(LosesTokens, {"I3"}),
    Planted(CountsOnlySteps, {"I6"}),
    Planted(RequestsLoadInEveryRound, {"idle"}),
    Planted(SendsRoundsBehindControls, {"I8"}),
    Planted(PausesBeforeRequestsEnd, {"I8"}),
    Planted(PlansWhilePaused, {"I8"}),
    Planted(PlansDuringUpdates, {"I8"}),
    Planted(RunsControlsTwice, {"I8"}),
    Planted(LosesHeldRequests, {"I4"}),
    Planted(runs_controls_alone, {"I1"}),
    Planted(FreesTwice, {"I4"}),
    Planted(LeaksAtAbort, {"I4"}),
    Planted(LosesUpdatesOfFailedRows, {"I4"}),
    Planted(EndsAllForOneRow, {"I3"}),
    Planted(PlansBeyondTheEnd, {"I3"}),
    Planted(ForgetsRequestsInFlight, {"I4"}),
    Planted(idles_alone, {"I1"}),
    Planted(leaves_alone, {"I1"}),
    Planted(leaves_at_any_request, {"I4"}),
    Planted(pads_alone, {"I1"}),
    Planted(collects_alone, {"I1", "I5"}),
    Planted(runs_padding_alone, {"I5"}),
    Planted(runs_after_failure, {"I7"}),
]
