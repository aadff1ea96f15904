"""Replicas that are wrong in one place each, to see that the simulator and the search find it.

Each is a mistake that this kind of loop invites, most of them known from other engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve.protocol import AbortRequest, ReplicaMessage, Request, RequestUpdate, StepPlan, StepResult
from moeserve.scheduling.lockstep import WANTS_SHUTDOWN, Agreement, Intent, Lockstep
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica, StepFailed
from moeserve.scheduling.scheduler import Scheduler

Run = Generator[Effect, Any, None]


class Leave(Exception):
    """Ends a run from within `meddle`."""


def meddled(run: Run, meddle: Callable[[Effect], Generator[Effect, Any, Any]]) -> Run:
    """A run in which `meddle` stands between the replica and whoever drives it."""
    answer, error = None, None
    while True:
        try:
            effect = run.send(answer) if error is None else run.throw(error)
        except StopIteration:
            return
        answer, error = None, None
        try:
            answer = yield from meddle(effect)
        except Leave:
            return
        except Exception as thrown:
            error = thrown


class SkipsPaddingStep(Replica):
    """Without tokens of its own it does not join the others' step."""

    def run(self) -> Run:
        def meddle(effect: Effect) -> Generator[Effect, Any, Any]:
            if isinstance(effect, Execute) and effect.plan is None:
                return None
            return (yield effect)

        return meddled(super().run(), meddle)


class LeavesWithoutPlan(Replica):
    """Once it has nothing to run in a step that was agreed, it returns."""

    def run(self) -> Run:
        def meddle(effect: Effect) -> Generator[Effect, Any, Any]:
            if isinstance(effect, Execute) and effect.plan is None:
                raise Leave
            return (yield effect)

        return meddled(super().run(), meddle)


class SpinsWhenIdle(Replica):
    """It never sleeps."""

    def run(self) -> Run:
        def meddle(effect: Effect) -> Generator[Effect, Any, Any]:
            return (yield Receive(block=False, heartbeat=False) if isinstance(effect, Receive) else effect)

        return meddled(super().run(), meddle)


class NeedsWakeUps(Replica):
    """It sleeps until a message comes, trusting that a wake-up will."""

    def run(self) -> Run:
        def meddle(effect: Effect) -> Generator[Effect, Any, Any]:
            return (yield dataclasses.replace(effect, heartbeat=False) if isinstance(effect, Receive) else effect)

        return meddled(super().run(), meddle)


class IgnoresHeartbeat(Replica):
    """Nothing came, so it sleeps on."""

    def run(self) -> Run:
        def meddle(effect: Effect) -> Generator[Effect, Any, Any]:
            answer = yield effect
            while isinstance(effect, Receive) and effect.block and not answer:
                answer = yield effect
            return answer

        return meddled(super().run(), meddle)


class ReadsOneMessage(Replica):
    """Of several messages that came together it takes the first."""

    def run(self) -> Run:
        def meddle(effect: Effect) -> Generator[Effect, Any, Any]:
            answer = yield effect
            return answer[:1] if isinstance(effect, Receive) else answer

        return meddled(super().run(), meddle)


class ObeysInsideStep(Replica):
    """It takes in messages between the agreement and the step, and then has less to run than it announced."""

    def run(self) -> Run:
        def meddle(effect: Effect) -> Generator[Effect, Any, Any]:
            if isinstance(effect, Execute) and effect.plan is not None:
                for message in (yield Receive(block=False, heartbeat=False)):
                    self._obey(message)
                if not self._scheduler.has_work:
                    effect = Execute(None, effect.agreement)
            answer = yield effect
            if isinstance(effect, Execute) and effect.plan is None:
                return StepFailed("nothing was run")
            return answer

        return meddled(super().run(), meddle)


class SwallowsCollectiveError(Replica):
    """A collective failed; it tries the next round."""

    def run(self) -> Run:
        while True:
            try:
                yield from self._stay_in_step()
            except Exception as error:
                self._end_all(str(error))
                for request_id in self._scheduler.live_request_ids:
                    self._scheduler.abort(request_id)
                yield self._deliver()
                continue
            yield self._deliver()
            return


class DiesWithoutAWord(Replica):
    """A failure ends it, and its requests are forgotten."""

    def run(self) -> Run:
        yield from self._stay_in_step()
        yield self._deliver()


class HidesFailure(Replica):
    """Its books have failed, and the others are not told."""

    def _intent(self, plan: StepPlan | None) -> Intent:
        self._failure = None
        return super()._intent(plan)


class LosesAbort(Replica):
    """An aborted request is gone without news of its end."""

    def _obey(self, message: ReplicaMessage) -> None:
        if isinstance(message, AbortRequest):
            self._scheduler.abort(message.request_id)
        else:
            super()._obey(message)


class AbortsOnlyInWords(Replica):
    """It tells of the end at once, and goes on computing the request."""

    def _obey(self, message: ReplicaMessage) -> None:
        if isinstance(message, AbortRequest) and message.request_id in self._unended:
            self._tell(RequestUpdate(request_id=message.request_id, finish_reason="abort"))
        elif not isinstance(message, AbortRequest):
            super()._obey(message)


class FreesTwice(Replica):
    """An abort frees the blocks once more."""

    def _obey(self, message: ReplicaMessage) -> None:
        running = self._scheduler._running.get(getattr(message, "request_id", ""))
        super()._obey(message)
        if running is not None and running.block_ids:
            pool = self._scheduler._pool
            pool._free[running.block_ids[0]] = None
            pool._num_holders[running.block_ids[0]] -= 1


class LeaksAtAbort(Replica):
    """An abort forgets to give back the last block."""

    def _obey(self, message: ReplicaMessage) -> None:
        if isinstance(message, AbortRequest):
            request = self._scheduler._running.get(message.request_id)
            if request is not None:
                request.block_ids = request.block_ids[:-1]
        super()._obey(message)


class RaisesRequestError(Replica):
    """A bad request is an exception, not an answer."""

    def _add(self, request: Request) -> None:
        self._scheduler.add(request)
        self._unended[request.request_id] = None


class EndsTwice(Replica):
    """When all must end, those that have ended are told again."""

    def _tell(self, update: RequestUpdate, *, error: str | None = None) -> None:
        unended = dict(self._unended)
        super()._tell(update, error=error)
        self._unended = unended


class LosesNewsOfFailedStep(Replica):
    """The result of a step is of no use, so nothing is taken in, and nothing is ended."""

    def _take_in(self, plan: StepPlan, result: StepResult | StepFailed | None) -> None:
        if isinstance(result, StepFailed):
            self._scheduler.abort_step()
        else:
            super()._take_in(plan, result)


class LosesTokens(Replica):
    """News that no request ended with are not delivered when something else is."""

    def _deliver(self) -> Deliver:
        if any(update.finish_reason is not None for update in self._news):
            self._news = [update for update in self._news if update.finish_reason is not None]
        return super()._deliver()


class LooksOnlyAtItself(Lockstep):
    """Idle when it has nothing to run itself."""

    def begin(self, intent: Intent) -> list[int]:
        self.intent = intent
        return super().begin(intent)

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(super().finish(rows), is_idle=self.intent.num_tokens == 0)


class LeavesAtOwnWish(LooksOnlyAtItself):
    """Told to shut down, it leaves."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(Lockstep.finish(self, rows), is_shutdown=self.intent.flags.wants_shutdown)


class LeavesAtAnyonesWish(Lockstep):
    """All leave together, but before some have read the messages that came before their own shutdown."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(super().finish(rows), is_shutdown=any(row[6] & WANTS_SHUTDOWN for row in rows))


class PadsForItself(LooksOnlyAtItself):
    """The size to pad to is its own."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(Lockstep.finish(self, rows), padded_tokens=self.intent.num_tokens)


class CollectsAtOwnWish(LooksOnlyAtItself):
    """Asked for what its experts were given, it enters that collective alone."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(Lockstep.finish(self, rows), collects_load=self.intent.flags.wants_load)


class RunsPaddingAlone(Lockstep):
    """A step is run even if nobody has a token."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        return dataclasses.replace(super().finish(rows), is_idle=False)


class CountsOnlySteps(Lockstep):
    """The step number stays where it is while all are idle."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        agreement = super().finish(rows)
        self.step -= agreement.is_idle
        return agreement


class CountsAlone(Lockstep):
    """One replica does so, the others do not."""

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        agreement = super().finish(rows)
        self.step -= agreement.is_idle and self.rank == 1
        return agreement


class ForgetsToAgree(Replica):
    """With a full plan it goes ahead: whoever is busy steps without asking."""

    def run(self) -> Run:
        rows: list[list[int]] = []

        def meddle(effect: Effect) -> Generator[Effect, Any, Any]:
            nonlocal rows
            if isinstance(effect, Gather):
                if rows and effect.row[3] > 0 and rows[effect.row[2]][3] == effect.row[3]:
                    return [[row[0], effect.row[1], *row[2:]] for row in rows]
                rows = yield effect
                return rows
            return (yield effect)

        return meddled(super().run(), meddle)


@dataclass(frozen=True)
class Planted:
    part: type[Replica] | type[Lockstep]
    names: set[str]  # the invariants by which the simulator may find it first
    script: str | None = None  # messages with which the search finds it ...
    found_as: str = ""  # ... and as what


PLANTED = [
    Planted(SkipsPaddingStep, {"I1"}, "one busy", "I1"),
    Planted(LeavesWithoutPlan, {"I1"}, "one busy", "I1"),
    Planted(SpinsWhenIdle, {"idle"}, "one busy", "idle"),
    Planted(NeedsWakeUps, {"deadlock"}, "one busy", "deadlock"),
    Planted(IgnoresHeartbeat, {"deadlock"}, "one busy", "livelock"),
    Planted(ReadsOneMessage, {"I3", "I4"}),
    Planted(ObeysInsideStep, {"I5"}, "abort", "I5"),
    Planted(SwallowsCollectiveError, {"I7"}),
    Planted(DiesWithoutAWord, {"I3"}, "one busy", "I3"),
    Planted(HidesFailure, {"I7"}, "one busy", "I7"),
    Planted(LosesAbort, {"I4"}, "abort", "I4"),
    Planted(AbortsOnlyInWords, {"I3", "I4"}, "abort", "I3"),
    Planted(FreesTwice, {"I4"}, "abort", "crash"),
    Planted(LeaksAtAbort, {"I4"}),
    Planted(RaisesRequestError, {"crash", "I4"}, "shutdown", "crash"),
    Planted(EndsTwice, {"I3"}, "abort", "I3"),
    Planted(LosesNewsOfFailedStep, {"I4"}, "one busy", "I4"),
    Planted(LosesTokens, {"I3"}),
    Planted(LooksOnlyAtItself, {"I1"}, "one busy", "I1"),
    Planted(LeavesAtOwnWish, {"I1"}, "shutdown", "I1"),
    Planted(LeavesAtAnyonesWish, {"I3"}, "shutdown", "I3"),
    Planted(PadsForItself, {"I1"}, "one busy", "I1"),
    Planted(CollectsAtOwnWish, {"I1", "I5"}, "collect", "I1"),
    Planted(RunsPaddingAlone, {"I5"}, "one busy", "I5"),
    Planted(CountsOnlySteps, {"I6"}, "one busy", "I6"),
    Planted(CountsAlone, {"I6"}, "one busy", "I6"),
    Planted(ForgetsToAgree, {"I1"}),
]


def maker(part: type[Replica] | type[Lockstep]) -> Callable[[int, int, Scheduler], Replica]:
    """Replicas with this part in place of the right one."""

    def make(rank: int, num_replicas: int, scheduler: Scheduler) -> Replica:
        lockstep_type = part if issubclass(part, Lockstep) else Lockstep
        replica_type = part if issubclass(part, Replica) else Replica
        return replica_type(scheduler=scheduler, lockstep=lockstep_type(rank=rank, num_replicas=num_replicas))

    return make
