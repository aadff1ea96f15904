"""Replicas with one bug each, which the simulator and the exhaustive search must find.

Most of them are known from other engines with this kind of loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve.protocol import AbortRequest, ReplicaMessage, Request, RequestUpdate, StepPlan, StepResult
from moeserve.scheduling.lockstep import REQUESTS_SHUTDOWN, Agreement, Intent, Lockstep
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica, StepFailed
from moeserve.scheduling.scheduler import Scheduler

Run = Generator[Effect, Any, None]


class Leave(Exception):
    """Raised by `meddle` to end a run."""


class Meddled(Replica):
    """A replica with `meddle` between it and its driver."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        return (yield effect)

    def run(self) -> Run:
        run = super().run()
        answer, error = None, None
        while True:
            try:
                effect = run.send(answer) if error is None else run.throw(error)
            except StopIteration:
                return
            answer, error = None, None
            try:
                answer = yield from self.meddle(effect)
            except Leave:
                return
            except Exception as thrown:
                error = thrown


class SkipsPaddingStep(Meddled):
    """It does not join a step without tokens of its own."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        if isinstance(effect, Execute) and effect.plan is None:
            return None
        return (yield effect)


class LeavesWithoutPlan(Meddled):
    """It returns when it has nothing to run in an agreed step."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        if isinstance(effect, Execute) and effect.plan is None:
            raise Leave
        return (yield effect)


class SpinsWhenIdle(Meddled):
    """It never sleeps."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        return (yield Receive(block=False, heartbeat=False) if isinstance(effect, Receive) else effect)


class NeedsWakeUps(Meddled):
    """It sleeps until a message comes, without a heartbeat."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        return (yield dataclasses.replace(effect, heartbeat=False) if isinstance(effect, Receive) else effect)


class IgnoresHeartbeat(Meddled):
    """It goes back to sleep after a heartbeat without messages."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        answer = yield effect
        while isinstance(effect, Receive) and effect.block and not answer:
            answer = yield effect
        return answer


class ReadsOneMessage(Meddled):
    """It drops all but the first of several messages."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        answer = yield effect
        return answer[:1] if isinstance(effect, Receive) else answer


class HandlesMessagesInsideStep(Meddled):
    """It handles messages between the agreement and the step, and then has fewer tokens than it announced."""

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        if isinstance(effect, Execute) and effect.plan is not None:
            for message in (yield Receive(block=False, heartbeat=False)):
                self._handle(message)
            if not self._scheduler.has_work:
                effect = Execute(None, effect.agreement)
        answer = yield effect
        if isinstance(effect, Execute) and effect.plan is None:
            return StepFailed("nothing was run")
        return answer


class SwallowsCollectiveError(Replica):
    """It goes on with the next round after a collective failed."""

    def run(self) -> Run:
        while True:
            try:
                yield from self._run_rounds()
            except Exception as error:
                self._end_all_requests(str(error))
                for request_id in self._scheduler.live_request_ids:
                    self._scheduler.abort(request_id)
                yield self._deliver()
                continue
            yield self._deliver()
            return


class EndsWithoutUpdates(Replica):
    """A failure ends it without ending its requests."""

    def run(self) -> Run:
        yield from self._run_rounds()
        yield self._deliver()


class HidesFailure(Replica):
    """It does not announce an internal error."""

    def _intent(self, plan: StepPlan | None) -> Intent:
        self._failure = None
        return super()._intent(plan)


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
        if isinstance(message, AbortRequest) and message.request_id in self._live_request_ids:
            self._queue_update(RequestUpdate(request_id=message.request_id, finish_reason="abort"))
        elif not isinstance(message, AbortRequest):
            super()._handle(message)


class FreesTwice(Replica):
    """An abort frees blocks twice."""

    def _handle(self, message: ReplicaMessage) -> None:
        running = self._scheduler._running.get(getattr(message, "request_id", ""))
        super()._handle(message)
        if running is not None and running.block_ids:
            pool = self._scheduler._pool
            pool._free[running.block_ids[0]] = None
            pool._num_holders[running.block_ids[0]] -= 1


class LeaksAtAbort(Replica):
    """An abort does not free the last block."""

    def _handle(self, message: ReplicaMessage) -> None:
        if isinstance(message, AbortRequest):
            request = self._scheduler._running.get(message.request_id)
            if request is not None:
                request.block_ids = request.block_ids[:-1]
        super()._handle(message)


class RaisesRequestError(Replica):
    """A bad request raises an exception."""

    def _add(self, request: Request) -> None:
        self._scheduler.add(request)
        self._live_request_ids[request.request_id] = None


class EndsTwice(Replica):
    """At the end it reports requests again that had ended before."""

    def _queue_update(self, update: RequestUpdate, *, error: str | None = None) -> None:
        unended = dict(self._live_request_ids)
        super()._queue_update(update, error=error)
        self._live_request_ids = unended


class LosesUpdatesOfFailedStep(Replica):
    """It sends no updates for the requests of a failed step."""

    def _commit(self, plan: StepPlan, result: StepResult | StepFailed | None) -> None:
        if isinstance(result, StepFailed):
            self._scheduler.abort_step()
        else:
            super()._commit(plan, result)


class LosesTokens(Replica):
    """It delivers only the updates that end a request, if there are any."""

    def _deliver(self) -> Deliver:
        if any(update.finish_reason is not None for update in self._updates):
            self._updates = [update for update in self._updates if update.finish_reason is not None]
        return super()._deliver()


class IgnoresOtherReplicas(Lockstep):
    """It idles when it has nothing to run itself."""

    def begin(self, intent: Intent) -> list[int]:
        self.intent = intent
        return super().begin(intent)

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(super().finish(rows), is_idle=self.intent.num_tokens == 0)


class LeavesWithoutAgreement(IgnoresOtherReplicas):
    """It leaves when it is told to shut down."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(Lockstep.finish(self, rows), is_shutdown=self.intent.flags.requests_shutdown)


class LeavesAtAnyRequest(Lockstep):
    """All leave as soon as one is told to, before the others have read all of their messages."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(super().finish(rows), is_shutdown=any(row[6] & REQUESTS_SHUTDOWN for row in rows))


class PadsWithoutAgreement(IgnoresOtherReplicas):
    """It pads to its own number of tokens."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(Lockstep.finish(self, rows), padded_tokens=self.intent.num_tokens)


class CollectsWithoutAgreement(IgnoresOtherReplicas):
    """It collects expert loads alone when it is asked to."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(Lockstep.finish(self, rows), collects_load=self.intent.flags.requests_load)


class RunsPaddingAlone(Lockstep):
    """It runs a step even if no replica has a token."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(super().finish(rows), is_idle=False)


class CountsOnlySteps(Lockstep):
    """The step number does not grow in idle rounds."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        agreement = super().finish(rows)
        self.step -= agreement.is_idle
        return agreement


class CountsAlone(Lockstep):
    """The step number of one replica does not grow in idle rounds."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        agreement = super().finish(rows)
        self.step -= agreement.is_idle and self.rank == 1
        return agreement


class SkipsAgreement(Meddled):
    """It skips the agreement if it announces the same number of tokens as in the last round."""

    rows: Sequence[list[int]] = ()

    def meddle(self, effect: Effect) -> Generator[Effect, Any, Any]:
        if not isinstance(effect, Gather):
            return (yield effect)
        if self.rows and effect.row[3] > 0 and self.rows[effect.row[2]][3] == effect.row[3]:
            return [[row[0], effect.row[1], *row[2:]] for row in self.rows]
        self.rows = yield effect
        return self.rows


@dataclass(frozen=True)
class Planted:
    part: type[Replica] | type[Lockstep]
    names: set[str]  # invariants that the simulator may find violated first
    script: str | None = None  # messages with which the search finds it
    found_as: str = ""  # the invariant that the search finds violated


PLANTED = [
    Planted(SkipsPaddingStep, {"I1"}, "one busy", "I1"),
    Planted(LeavesWithoutPlan, {"I1"}, "one busy", "I1"),
    Planted(SpinsWhenIdle, {"idle"}, "one busy", "idle"),
    Planted(NeedsWakeUps, {"deadlock"}, "one busy", "deadlock"),
    Planted(IgnoresHeartbeat, {"deadlock"}, "one busy", "livelock"),
    Planted(ReadsOneMessage, {"I3", "I4"}),
    Planted(HandlesMessagesInsideStep, {"I5"}, "abort", "I5"),
    Planted(SwallowsCollectiveError, {"I7"}),
    Planted(EndsWithoutUpdates, {"I3"}, "one busy", "I3"),
    Planted(HidesFailure, {"I7"}, "one busy", "I7"),
    Planted(LosesAbort, {"I4"}, "abort", "I4"),
    Planted(ReportsAbortOnly, {"I3", "I4"}, "abort", "I3"),
    Planted(FreesTwice, {"I4"}, "abort", "crash"),
    Planted(LeaksAtAbort, {"I4"}),
    Planted(RaisesRequestError, {"crash", "I4"}, "shutdown", "crash"),
    Planted(EndsTwice, {"I3"}, "abort", "I3"),
    Planted(LosesUpdatesOfFailedStep, {"I4"}, "one busy", "I4"),
    Planted(LosesTokens, {"I3"}),
    Planted(IgnoresOtherReplicas, {"I1"}, "one busy", "I1"),
    Planted(LeavesWithoutAgreement, {"I1"}, "shutdown", "I1"),
    Planted(LeavesAtAnyRequest, {"I3"}, "shutdown", "I3"),
    Planted(PadsWithoutAgreement, {"I1"}, "one busy", "I1"),
    Planted(CollectsWithoutAgreement, {"I1", "I5"}, "collect", "I1"),
    Planted(RunsPaddingAlone, {"I5"}, "one busy", "I5"),
    Planted(CountsOnlySteps, {"I6"}, "one busy", "I6"),
    Planted(CountsAlone, {"I6"}, "one busy", "I6"),
    Planted(SkipsAgreement, {"I1"}),
]


def maker(part: type[Replica] | type[Lockstep]) -> Callable[[int, int, Scheduler], Replica]:
    """Return a factory of replicas with this faulty part."""

    def make(rank: int, num_replicas: int, scheduler: Scheduler) -> Replica:
        lockstep_type = part if issubclass(part, Lockstep) else Lockstep
        replica_type = part if issubclass(part, Replica) else Replica
        return replica_type(scheduler=scheduler, lockstep=lockstep_type(rank=rank, num_replicas=num_replicas))

    return make
