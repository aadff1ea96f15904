"""The loop of one replica: receive messages, plan, agree, execute, commit, deliver.

The loop performs no I/O. `Replica.run` is a generator: it yields an effect, its driver performs it and sends back the
answer. The serving process and the simulator in tests therefore run the same code. There are no tensors, sockets or
clocks in this file.

`lockstep.py` explains why no replica waits forever. This file adds to the argument: each round has exactly one
`Gather`, and exactly one `Execute` unless all replicas agreed to idle. `Receive` is the only other effect that can
wait, and with more than one replica it has a heartbeat.

How to drive it::

    generator = replica.run()
    effect = next(generator)
    while True:                                   # until StopIteration: the replicas agreed to shut down
        effect = generator.send(answer to effect) # or generator.throw(error)

Errors are thrown in at the effect that failed:

- At `Gather` or `Execute`: this replica is permanently out of step. It yields one last `Deliver`, which ends all its
  requests, and raises the error again. The process must then end, and with it the worker group.
- At `Receive` or `Deliver`: no collective is under way. The replica enters the next `Gather` and announces its
  failure. All replicas end after this round, each with a last `Deliver`. The same happens after an internal error.
- The death of another replica is an error of the collective, at `Gather` or `Execute`. A replica asleep in `Receive`
  is sent [] as by a heartbeat, and gets the error at the next `Gather`.

If all collectives of a step completed but its result is unusable on this replica alone (such as NaN logits), send
`StepFailed` instead of throwing an error.
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
    """Receive messages. The answer is those since the last `Receive`, in order of arrival: list[ReplicaMessage]."""

    block: bool  # if there are none, sleep until one comes
    heartbeat: bool  # sleep no longer than a heartbeat, then answer []; False: sleep without limit


@dataclass(frozen=True)
class Gather:
    """All-gather a row. The answer is the rows of all replicas in order of rank: list[list[int]]."""

    row: list[int]


@dataclass(frozen=True)
class Execute:
    """Run a step, of zero tokens if there is no plan. The answer is a StepResult or StepFailed."""

    plan: StepPlan | None  # plan.step counts this replica's plans, agreement.step everyone's rounds
    agreement: Agreement


@dataclass(frozen=True)
class Deliver:
    """Send updates to the client. The answer is None. Yielded once per round, even if empty, and once at the end."""

    updates: list[RequestUpdate]
    stats: ReplicaStats
    load: LoadWindow | None = None  # only on the first replica; the others' would be the same
    answers: bool = False  # the load answers a `CollectLoad` that came before it was collected


Effect: TypeAlias = Receive | Gather | Execute | Deliver


@dataclass(frozen=True)
class StepFailed:
    """All collectives of the step completed, but this replica cannot use its result."""

    error: str


class Replica:
    """The requests of one replica from arrival to end, in step with all other replicas."""

    def __init__(self, *, scheduler: Scheduler, lockstep: Lockstep, load_window: int = 0) -> None:
        """
        Args:
            load_window: steps after which expert loads are collected; 0: only on request.
        """
        self._scheduler = scheduler
        self._lockstep = lockstep
        self._live_request_ids: dict[str, None] = {}  # accepted requests that no update has ended
        self._updates: list[RequestUpdate] = []  # for the next `Deliver`
        self._shutdown_requested = False
        self._failure: Exception | None = None
        self._placement_epoch = 0  # the newest whose weights its ranks hold
        self._load_window = load_window
        self._steps_since_load = 0
        self._load_requested = False
        self._load_answers_request = False
        self._load: LoadWindow | None = None  # for the next `Deliver`

    def run(self) -> Generator[Effect, Any, None]:
        """Yield effects, and take their answers, until all replicas agree to shut down.

        Raises:
            EngineError: another replica has failed.
            LockstepError: the replicas are out of step.
            Exception: the error that was thrown in, or an internal one.
        """
        try:
            yield from self._run_rounds()
        except Exception as error:
            self._end_all_requests(f"{type(error).__name__}: {error}")
            yield self._deliver()
            raise
        yield self._deliver()

    def _run_rounds(self) -> Generator[Effect, Any, None]:
        plan, result, is_idle = None, None, False
        while True:
            try:
                plan = yield from self._prepare_round(plan, result, is_idle)
            except Exception as error:  # announce it in the agreement, so that all replicas end together
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
                self._load_answers_request |= self._load_requested
                self._load_requested, self._steps_since_load = False, 0
            self._steps_since_load += any(agreement.num_tokens)
            # collective: all replicas, with or without a plan
            result = None if is_idle else (yield Execute(plan, agreement))
            if isinstance(result, StepResult):
                self._placement_epoch = result.placement_epoch
                if self._lockstep.rank == 0 and result.load is not None:
                    self._load = result.load

    def _prepare_round(
        self, plan: StepPlan | None, result: StepResult | StepFailed | None, is_idle: bool
    ) -> Generator[Effect, Any, StepPlan | None]:
        """Commit the last step, deliver its updates, handle messages, and return the next plan.

        This waits only if all replicas were idle, and then no longer than a heartbeat.
        """
        if plan is not None:
            self._commit(plan, result)
        yield self._deliver()
        messages: list[ReplicaMessage] = yield Receive(
            block=is_idle, heartbeat=is_idle and self._lockstep.num_replicas > 1
        )
        for message in messages:
            self._handle(message)
        return self._scheduler.schedule()

    def _intent(self, plan: StepPlan | None) -> Intent:
        return Intent(
            num_tokens=0 if plan is None else plan.num_tokens,
            is_decode_only=plan is None or plan.is_decode_only,
            placement_epoch=self._placement_epoch,
            flags=IntentFlags(
                requests_shutdown=self._shutdown_requested,
                has_failed=self._failure is not None,
                requests_load=self._load_requested or 0 < self._load_window <= self._steps_since_load,
            ),
        )

    def _commit(self, plan: StepPlan, result: StepResult | StepFailed | None) -> None:
        """Take in the result of a step. A failed step ends the requests that were in it, and no others."""
        if isinstance(result, StepFailed):
            for update in self._scheduler.abort_step():
                self._queue_update(update, error=result.error)
            return
        assert result is not None, f"step {plan.step} has no result"
        for update in self._scheduler.commit(plan, result):
            self._queue_update(update)

    def _handle(self, message: ReplicaMessage) -> None:
        match message:
            case AddRequest(request=request):
                self._add(request)
            case AbortRequest(request_id=request_id):
                update = self._scheduler.abort(request_id)
                if update is not None:
                    self._queue_update(update)
            case Shutdown():
                self._shutdown_requested = True
                for update in self._scheduler.abort_all():
                    self._queue_update(update, error="the engine was shut down")
            case CollectLoad():
                self._load_requested = True
            case Wake():
                pass  # it has ended the sleep already

    def _add(self, request: Request) -> None:
        """Accept a request, or end it with an error. An exception here would end all replicas."""
        request_id = request.request_id
        try:
            if self._shutdown_requested:
                raise RequestError(f"request {request_id!r} came after the engine was shut down")
            self._scheduler.add(request)
        except RequestError as error:
            # Two requests with one id could not be distinguished, so both end.
            self._scheduler.abort(request_id)
            self._queue_update(RequestUpdate(request_id=request_id, finish_reason="abort"), error=str(error))
        else:
            self._live_request_ids[request_id] = None

    def _queue_update(self, update: RequestUpdate, *, error: str | None = None) -> None:
        if update.finish_reason is not None:
            self._live_request_ids.pop(update.request_id, None)
        self._updates.append(update if error is None else msgspec.structs.replace(update, error=error))

    def _end_all_requests(self, error: str) -> None:
        """End the requests in this file's own list: the scheduler may be what failed."""
        for request_id in list(self._live_request_ids):
            self._queue_update(RequestUpdate(request_id=request_id, finish_reason="abort"), error=error)

    def _deliver(self) -> Deliver:
        updates, self._updates = self._updates, []
        load, self._load = self._load, None
        answers = load is not None and self._load_answers_request
        self._load_answers_request &= not answers
        stats = ReplicaStats(
            num_free_blocks=self._scheduler.num_free_blocks,
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            step=self._lockstep.step,
        )
        return Deliver(updates, stats, load, answers)
