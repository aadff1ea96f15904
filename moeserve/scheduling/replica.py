"""The loop of one replica: receive messages, plan, send rounds to the ranks, commit their results, deliver updates.

The loop performs no I/O. `Replica.run` is a generator: it yields an effect, and its driver performs the effect and
sends back the answer. Engines with one rank or many, and the simulators in tests, therefore run the same code. This
file contains no tensors, sockets or clocks.

Up to `max_rounds` rounds are in flight, so that ranks have the next round as soon as they have finished one.
`lockstep.py` explains why no rank waits forever. This file contributes to the argument: the loop waits only in `Wait`,
and a replica without work, which other replicas may need, has either a round in flight or a heartbeat that ends its
sleep.

How to drive it::

    generator = replica.run()
    effect = next(generator)
    while True:                                   # until StopIteration: the replicas agreed to shut down
        effect = generator.send(answer to effect)

An error inside the loop is announced in the replica's next round, after which all replicas stop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from moeserve import protocol
from moeserve.controls import INITIAL_VERSION, Control, ControlResult, EndRequests, FinishUpdate, Outcome, Pause, Resume
from moeserve.errors import DistributedError, RequestError
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    CollectLoad,
    Delivery,
    ReplicaMessage,
    ReplicaStats,
    Request,
    RequestUpdate,
    Shutdown,
    StepPlan,
    TransferResult,
    Wake,
)
from moeserve.scheduling.lockstep import Intent, IntentFlags, Round, RoundResult, make_row
from moeserve.scheduling.scheduler import Scheduler
from moeserve.telemetry.expert_load import LoadWindow
from moeserve.telemetry.step_totals import StepTotals


@dataclass(frozen=True)
class Events:
    """Messages and results that have arrived since the last `Wait`. The object is false if there are none."""

    messages: list[ReplicaMessage]  # in order of arrival
    results: list[RoundResult]  # results of the oldest rounds in flight, in order
    transfers: Sequence[TransferResult] = ()  # transfers that have ended

    def __bool__(self) -> bool:
        return bool(self.messages or self.results or self.transfers)


@dataclass(frozen=True)
class Wait:
    """Effect that a replica yields to wait for a message or for the result of a round. It receives `Events`."""

    heartbeat: bool  # True: answer without events after a heartbeat interval; False: wait without a limit


@dataclass(frozen=True)
class Submit:
    """Effect that a replica yields to send a round to its ranks. It receives None."""

    work: Round


@dataclass(frozen=True)
class Transfer:
    """Send a transfer to the ranks of the replica, which run it asynchronously. The answer is None."""

    work: protocol.Transfer


# The driver sends a `Delivery` to the client, and answers None. The loop yields a `Delivery` before each `Wait`, even
# if there is nothing to deliver, and a last `Delivery` at the end. Expert loads are the same on all replicas, so only
# the deliveries of the first replica have them.
Effect: TypeAlias = Wait | Submit | Transfer | Delivery


@dataclass(frozen=True)
class _RoundInFlight:
    plan: StepPlan | None
    requests_load: bool
    control: Control | None


class Replica:
    """The loop that serves the requests of one replica, in lockstep with all other replicas."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        index: int = 0,
        num_replicas: int = 1,
        max_rounds: int = 2,
        load_window: int = 0,
    ) -> None:
        """
        Args:
            index: index of this replica.
            max_rounds: maximum number of rounds in flight.
            load_window: number of steps after which expert loads are collected; 0: only on request.
        """
        assert 0 <= index < num_replicas, (index, num_replicas)
        self._scheduler = scheduler
        self._index = index
        self._num_replicas = num_replicas
        self._max_rounds = max_rounds
        self._num_sent = 0  # number of rounds sent
        self._totals = StepTotals()
        self._rounds: deque[_RoundInFlight] = deque()
        # Prefill budgets of the next rounds, from the agreements of the last `max_rounds` rounds.
        self._prefill_budgets: deque[int | None] = deque([None] * max_rounds, maxlen=max_rounds)
        self._others_run = False  # other replicas had work in the last result
        self._is_awake = num_replicas > 1  # a sleep has ended: send one round to learn if other replicas have work
        self._updates: list[RequestUpdate] = []  # for the next `Delivery`
        self._shutdown_requested = False
        self._failure: Exception | None = None
        self._is_failure_announced = False
        self._controls: deque[Control] = deque()  # received, not run yet
        self._ended_controls: list[ControlResult] = []  # for the next `Delivery`
        self._is_paused = False
        self._has_whole_weights = True  # all weights are of one version, so that steps may run
        self._weight_version = INITIAL_VERSION
        self._load_window = load_window if index == 0 else 0  # one replica decides, so that all collect once
        self._steps_since_load = 0
        self._load_requested = False
        self._load_answers_request = False
        self._load: LoadWindow | None = None  # for the next `Delivery`

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def run(self) -> Generator[Effect, Any, None]:
        """Yield effects, and receive their answers, until all replicas agree to shut down.

        Raises:
            DistributedError: another replica has failed.
            Exception: an internal error.
        """
        while True:
            while (work := self._next_round()) is not None:
                yield Submit(work)
            for transfer in self._new_transfers():
                yield Transfer(transfer)
            yield self._deliver()
            events: Events = yield Wait(heartbeat=self._num_replicas > 1 and not self._rounds)
            self._is_awake |= self._num_replicas > 1 and not self._rounds
            for result in events.results:
                ended = self._rounds.popleft()
                if result.agreement.failed_ranks:
                    failed = result.agreement.failed_ranks[0]
                    raise self._failure or DistributedError(f"replica {failed} failed; all must end with it")
                if result.agreement.is_shutdown:
                    yield self._deliver()
                    return
                self._guard(self._finish_round, ended, result)
            for transferred in events.transfers:
                self._guard(self._scheduler.end_transfer, transferred)
            for message in events.messages:
                self._guard(self._handle, message)

    def _guard(self, handle: Callable[..., None], *event: Any) -> None:
        """Handle an event. An error is announced in the next round, so that all replicas stop together."""
        if self._failure is None:
            try:
                handle(*event)
            except Exception as error:
                self._failure = error

    def _next_round(self) -> Round | None:
        """Return the next round to send; None if no round is needed now, or none can be sent."""
        if len(self._rounds) == self._max_rounds or self._is_failure_announced:
            return None
        # the ranks may run this control, and no earlier plan may follow
        if self._rounds and self._rounds[-1].control is not None:
            return None
        control = self._control_to_announce()
        plan = None
        is_quiet = self._is_paused or not self._has_whole_weights or control is not None
        if self._failure is None and not is_quiet:
            try:
                plan = self._scheduler.schedule(self._prefill_budgets[len(self._rounds)])
            except Exception as error:
                self._failure = error
        requests_load = self._must_request_load()
        announces = self._shutdown_requested or self._failure is not None or requests_load or control is not None
        others_may_run = self._others_run or (self._is_awake and not self._rounds)
        if plan is None and not announces and not others_may_run:
            return None
        if self._shutdown_requested and plan is None and self._num_replicas == 1 and self._rounds:
            return None  # one round is enough after the results of the last plans have arrived
        self._is_failure_announced = self._failure is not None
        flags = IntentFlags(
            requests_shutdown=self._shutdown_requested,
            has_failed=self._failure is not None,
            requests_load=requests_load,
        )
        intent = Intent(
            num_tokens=0 if plan is None else plan.num_tokens,
            is_decode_only=plan is None or plan.is_decode_only,
            num_sampling=0 if plan is None else plan.num_sampling,
            # Requests that cannot run now keep no other replica awake.
            num_decoding=0 if is_quiet else self._scheduler.num_decoding,
            num_prefill_tokens=0 if is_quiet else self._scheduler.num_prefill_tokens,
            control=0 if control is None else control.number,
            flags=flags,
        )
        row = make_row(intent, number=self._num_sent, replica=self._index)
        self._num_sent += 1
        self._rounds.append(_RoundInFlight(plan, requests_load, control))
        return Round(row=row, plan=plan, command=None if control is None else control.command)

    def _control_to_announce(self) -> Control | None:
        """Return the control that this replica is ready to run; None if none waits, or requests must end first."""
        if not self._controls or self._failure is not None:
            return None
        command = self._controls[0].command
        waits = isinstance(command, Pause) and command.mode == "wait" and self._scheduler.has_work
        return None if waits else self._controls[0]

    def _new_transfers(self) -> list[protocol.Transfer]:
        return [] if self._failure is not None else self._scheduler.take_transfers()

    def _must_request_load(self) -> bool:
        if any(each.requests_load for each in self._rounds):
            return False
        return self._load_requested or 0 < self._load_window <= self._steps_since_load

    def _finish_round(self, ended: _RoundInFlight, result: RoundResult) -> None:
        agreement, step_result = result.agreement, result.result
        self._is_awake = False
        self._others_run = self._num_replicas > 1 and agreement.has_requests
        # Discard budgets when no replica has requests: they are outdated once new requests arrive.
        self._prefill_budgets += [agreement.prefill_budget] if agreement.has_requests else [None] * self._max_rounds
        if agreement.collects_load:
            self._load_answers_request |= self._load_requested and ended.requests_load
            self._load_requested &= not ended.requests_load
            self._steps_since_load = 0
        if any(agreement.num_tokens):
            self._steps_since_load += 1
            num_tokens = agreement.num_tokens[self._index]
            self._totals.add(num_tokens, result.num_padding_tokens, result.agreement_seconds)
        if self._index == 0 and step_result is not None and step_result.load is not None:
            self._load = step_result.load
        if agreement.control:
            assert ended.control is not None
            self._end_control(ended.control, result.outcome)
        if ended.plan is None:
            return
        if result.error:
            for update in self._scheduler.abort_step():
                self._queue_update(update, error=result.error)
            return
        assert step_result is not None, f"step {ended.plan.step} has no result"
        for update in self._scheduler.commit(step_result, result.reports):
            self._queue_update(update)
        self._scheduler.note_step(ended.plan, result.step_seconds)

    def _handle(self, message: ReplicaMessage) -> None:
        match message:
            case AddRequest():
                for request in message.requests:
                    self._add(request)
            case AbortRequest(request_id=request_id):
                update = self._scheduler.abort(request_id)
                if update is not None:
                    self._queue_update(update)
            case Control():
                self._begin_control(message)
            case Shutdown():
                self._shutdown_requested = True
                self._controls.clear()
                for update in self._scheduler.abort_all():
                    self._queue_update(update)
            case CollectLoad():
                self._load_requested = True
            case Wake():
                pass  # receiving the message has already ended the sleep

    def _begin_control(self, control: Control) -> None:
        if self._shutdown_requested:
            return
        self._controls.append(control)
        command = control.command
        if isinstance(command, EndRequests) or (isinstance(command, Pause) and command.mode == "abort"):
            for update in self._scheduler.abort_all():
                self._queue_update(update)
        if isinstance(command, Pause):
            self._scheduler.hold()

    def _end_control(self, control: Control, outcome: Outcome | None) -> None:
        """Apply a control that the ranks have run. No plan is in flight, because all earlier plans are committed."""
        if outcome is not None:
            self._has_whole_weights = outcome.is_whole
        if self._controls:  # else they were cleared for the shutdown
            self._controls.popleft()
        match control.command:
            case Pause(mode=mode, salt=salt):
                self._is_paused = True
                if mode == "retract":
                    self._scheduler.retract()
                if salt:
                    self._scheduler.forget_prefixes(salt)
            case Resume():
                self._is_paused = False
                if not any(isinstance(each.command, Pause) for each in self._controls):
                    self._scheduler.release()
            case FinishUpdate(version=version, salt=salt) if outcome is not None and not outcome.error:
                self._weight_version = version
                self._scheduler.use_new_weights(salt)
        self._ended_controls.append(ControlResult(number=control.number, outcome=outcome))

    def _add(self, request: Request) -> None:
        """Accept a request, or end it with an error. An exception here would end all replicas."""
        request_id = request.request_id
        try:
            if self._shutdown_requested:
                raise RequestError(f"request {request_id!r} came after the engine was shut down")
            self._scheduler.add(request)
        except RequestError as error:
            # Two requests with the same id cannot be distinguished, so end both.
            self._scheduler.abort(request_id)
            self._queue_update(RequestUpdate(request_id=request_id, finish_reason="abort"), error=str(error))

    def _queue_update(self, update: RequestUpdate, *, error: str | None = None) -> None:
        update = msgspec.structs.replace(
            update, replica=self._index, error=error or update.error, weight_version=self._weight_version
        )
        self._updates.append(update)

    def _deliver(self) -> Delivery:
        updates, self._updates = self._updates, []
        controls, self._ended_controls = self._ended_controls, []
        load, self._load = self._load, None
        answers = load is not None and self._load_answers_request
        self._load_answers_request &= not answers
        transfers = self._scheduler.transfers
        stats = ReplicaStats(
            num_free_blocks=self._scheduler.num_free_blocks,
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_rounds=self._num_sent - len(self._rounds),
            num_preemptions=self._scheduler.num_preemptions,
            speculation=self._scheduler.speculation,
            steps=self._totals,
            **transfers.counts() if transfers else {},
        )
        return Delivery(updates, stats, load, answers, controls)
