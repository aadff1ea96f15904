"""Runs a worker group in virtual time, with faults: the real `Replica`, agreement, `Scheduler` and `RequestTable`.

This file supplies what surrounds them: a client and its requests, messages in flight, ranks that run rounds in order,
collectives, stalls, failing and dying processes, and the watcher that notices a death. The ranks of a replica are
simulated as one. A scenario determines its run completely. After each event these invariants are checked:

- I1: the ranks of all replicas enter the same sequence of collectives, and none leaves before the others.
- I3: a request ends exactly once, with a reason; the tokens sent to its client are those computed. It ends with an
  error only if it is refused, or its own row or a process has failed, and by an abort only if its client aborted it.
- I4: blocks in use equal the sum over live requests, and zero when idle; reported statistics are correct.
- I5: ranks run the tokens that their replica announced. A step has at least one token, unless it collects expert loads.
- I6: the numbers of rounds only grow.
- I7: no step is run in a round in which a replica has announced a failure, nor after it.
- I8: all ranks run a control once, in order, in the same round. A pause that waits for requests follows their ends. No
  step is run during a pause, nor during an update of weights.
- deadlock: with all processes alive, no collective stays open for longer than the slowest of them can take.
- livelock: requests are served within a number of steps that follows from their lengths.
- idle: without work a replica sleeps; the group agrees no more often than heartbeats and messages require.
- crash: no process ends with an error unless there was a fault.

Client, processes, faults and collectives share one clock and one queue of events, so they are in one file.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from scenario import (
    BLOCK_SIZE,
    COLLECTED_SHARE,
    DETECTION_S,
    END_TOKEN,
    HEARTBEAT_S,
    LOAD_WINDOW,
    MAX_LATE_S,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_PAUSE_S,
    MAX_STALL_S,
    InvariantViolation,
    Report,
    Scenario,
    most_steps,
    sampled_token,
    whole_output,
)

from moeserve.controls import PAUSE_MODES, Command, Control, FinishUpdate, Outcome, Pause, Resume, StartUpdate
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    ChunkResult,
    CollectLoad,
    Delivery,
    ReplicaMessage,
    Request,
    RequestUpdate,
    Shutdown,
    StepPlan,
    StepResult,
    Wake,
)
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import (
    CONTROL,
    HAS_FAILED,
    REQUESTS_LOAD,
    REQUESTS_SHUTDOWN,
    Agreement,
    Round,
    RoundResult,
    agree,
)
from moeserve.scheduling.replica import Effect, Events, Replica, Submit, Wait
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.worker.request_table import RequestTable


class MakeReplica(Protocol):
    def __call__(self, scheduler: Scheduler, *, index: int, num_replicas: int, max_rounds: int) -> Replica: ...


Agree: TypeAlias = Callable[..., Agreement]  # as `agree`, and the replica whose ranks call it
_QUIET_S = 4 * HEARTBEAT_S  # between the last end and the shutdown


class SimulatedFault(Exception):
    """The error of an injected fault."""


def simulate(scenario: Scenario, make_replica: MakeReplica | None = None, agree_as: Agree | None = None) -> Report:
    """Run a scenario to its end.

    Args:
        make_replica: None: as the engine does.
        agree_as: the agreement as the ranks of a replica compute it; None: as the engine does.

    Raises:
        InvariantViolation: an invariant did not hold. Its message has the last events.
    """
    return _Simulation(scenario, make_replica or _real_replica, agree_as or _real_agreement).run()


def _real_replica(scheduler: Scheduler, *, index: int, num_replicas: int, max_rounds: int) -> Replica:
    return Replica(scheduler, index=index, num_replicas=num_replicas, max_rounds=max_rounds, load_window=LOAD_WINDOW)


def _real_agreement(rows: list[list[int]], *, number: int, num_replicas: int, index: int) -> Agreement:
    return agree(rows, number=number, num_replicas=num_replicas)


@dataclass(eq=False)
class _ClientRequest:
    """The client's state of a request."""

    request: Request
    index: int  # of its replica
    sent_at: float
    token_ids: list[int] = field(default_factory=list)
    end: str | None = None
    was_aborted: bool = False
    may_fail: bool = False  # it is refused, or its row has failed
    num_pauses: int = 0  # sent before it


@dataclass(eq=False)
class _Ranks:
    """The ranks of one replica. They run its rounds in order."""

    table: RequestTable
    rounds: deque[Round] = field(default_factory=deque)  # arrived, and not begun
    current: Round | None = None
    agreement: Agreement | None = None  # of the current round
    num_rounds: int = 0  # begun
    num_collectives: int = 0  # entered
    have_left: bool = False


@dataclass(eq=False)
class _Process:
    """One replica: the process that drives its generator, and its ranks."""

    index: int
    scheduler: Scheduler
    num_blocks: int
    replica: Replica
    generator: Generator[Effect, Any, None]
    ranks: _Ranks
    state: Literal["starting", "alive", "left", "dead"] = "starting"
    wait: Wait | None = None  # its effect, unless it is busy
    turn: int = 0  # grows with each answer, so that a late answer to an earlier wait is recognised
    inbox: list[ReplicaMessage] = field(default_factory=list)
    results: list[RoundResult] = field(default_factory=list)
    last_arrival_s: float = 0.0  # of messages to it, which stay in order
    last_delivery_s: float = 0.0  # of its last delivery
    last_round_s: float = 0.0  # of rounds to its ranks, and
    last_result_s: float = 0.0  # of their results
    plans_in_flight: deque[StepPlan | None] = field(default_factory=deque)
    last_number: int = -1
    has_announced_failure: bool = False
    has_internal_fault: bool = False
    has_failed: bool = False  # its own code has raised an error
    has_rank_fault: bool = False  # its ranks fail at the next opportunity
    is_holding: bool = False  # it has received a pause, and no resume after it
    loses_updates: bool = False  # it was killed before its last updates were sent
    received: dict[str, None] = field(default_factory=dict)  # requests
    after_pause: dict[str, None] = field(default_factory=dict)  # those among them that came after a pause
    ended: dict[str, None] = field(default_factory=dict)  # those whose end it delivered


@dataclass(eq=False)
class _Collective:
    """A collective of the ranks of all replicas."""

    kind: str
    payloads: dict[int, Any] = field(default_factory=dict)  # by replica


class _Simulation:
    def __init__(self, scenario: Scenario, make_replica: MakeReplica, agree_as: Agree) -> None:
        self.scenario = scenario
        self.agree_as = agree_as
        self.dice = random.Random(scenario.seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.num_events = 0
        self.num_queued = 0
        self.trace = hashlib.sha256()
        self.last_events: deque[str] = deque(maxlen=25)
        self.processes = [self._new_process(index, make_replica) for index in range(scenario.num_replicas)]
        self.collectives: dict[int, _Collective] = {}  # open ones, by number
        self.requests: dict[str, _ClientRequest] = {}
        self.num_unended = 0
        self.client_has_stopped = False  # it sends no more requests
        self.shutdown_is_due = False
        self.fault_at: float | None = None
        self.worker_group_is_broken = False  # the watcher has noticed
        self.failed_round: int | None = None  # nothing runs from this round on
        self.leave_counts: dict[int, int] = {}  # collectives entered by ranks that left
        self.num_steps = 0
        self.num_idle_rounds = 0
        self.num_waiting_rounds = 0
        self.num_rests = 0  # times that the group became idle
        self.was_active = False
        self.num_asked = self.num_collections = 0  # for figures; without a step
        self.num_messages = 0
        self.num_control_rounds = 0  # in which a replica announces a control that is not run
        self.controls: dict[int, Command] = {}  # sent, by number
        self.num_controls_run = 0
        self.num_controls_ended: Counter[int] = Counter()  # by number: replicas that have delivered the end
        self.is_paused = False
        self.step_bound = 0
        self.slowest_first_token_s = 0.0

    def _new_process(self, index: int, make_replica: MakeReplica) -> _Process:
        num_blocks = self.dice.choice([10, 14, 20])
        max_num_seqs = self.dice.choice([2, 4])
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=self.dice.random() < 0.5,
                plans_ahead=self.scenario.plans_ahead,
            ),
            b"simulated",
        )
        replica = make_replica(
            scheduler, index=index, num_replicas=self.scenario.num_replicas, max_rounds=self.scenario.max_rounds
        )
        ranks = _Ranks(RequestTable(max_num_seqs, -(-MAX_MODEL_LEN // BLOCK_SIZE)))
        return _Process(index, scheduler, num_blocks, replica, replica.run(), ranks)

    # Events and time

    def run(self) -> Report:
        self._plan_scenario()
        while self.queue:
            self.now, _, action, arguments = heapq.heappop(self.queue)
            self.num_events += 1
            if self.now > self._longest():
                self._violated("livelock", "requests are served no more, or for ever")
            action(*arguments)
        return self._closing_report()

    def _longest(self) -> float:
        """Return the virtual seconds within which a run must end."""
        per_step_s = 1.0 if self.scenario.stall_probability else 0.05
        pauses_s = (2 * MAX_PAUSE_S + 8 * MAX_STALL_S + MAX_LATE_S) * self.scenario.num_pauses
        return self.scenario.span_s + MAX_LATE_S + 100.0 + per_step_s * self.step_bound + pauses_s

    def _after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self.num_queued += 1  # breaks ties deterministically
        heapq.heappush(self.queue, (self.now + delay_s, self.num_queued, action, arguments))

    def _log(self, event: str) -> None:
        line = f"{self.now:.6f} {event}"
        self.trace.update(line.encode())
        self.last_events.append(line)

    def _violated(self, invariant: str, message: str) -> None:
        raise InvariantViolation(invariant, f"at {self.now:.3f} s of {self.scenario}: {message}", self.last_events)

    def _require(self, holds: bool, invariant: str, message: str) -> None:
        if not holds:
            self._violated(invariant, message)

    def _latency(self) -> float:
        """Return the latency of a message between processes."""
        return self.dice.uniform(0.00005, 0.002)

    def _work(self) -> float:
        """Return the time of a process's own work, sometimes with a stall."""
        if self.dice.random() < self.scenario.stall_probability:
            return self.dice.uniform(0.0, MAX_STALL_S)
        return self.dice.uniform(0.0001, 0.001)

    def _plan_scenario(self) -> None:
        scenario, dice = self.scenario, self.dice
        late = set(dice.sample(range(scenario.num_replicas), scenario.num_late))
        for process in self.processes:
            latest = MAX_LATE_S if process.index in late else 0.01
            self._after(dice.uniform(0.0, latest), self._start, process)
        busy = dice.sample(range(scenario.num_replicas), min(scenario.num_busy_replicas, scenario.num_replicas))
        bursts = [dice.uniform(0.0, scenario.span_s) for _ in range(scenario.num_bursts)]
        for number in range(scenario.num_requests):
            moment = dice.choice(bursts) + dice.expovariate(20.0)
            self._after(moment, self._send_request, number, dice.choice(busy))
        if scenario.fault != "none":
            self._after(scenario.fault_s, self._inject_fault, self.processes[scenario.fault_replica])
        if scenario.shutdown_s is not None:
            self._after(scenario.shutdown_s, self._send_shutdown)
        elif scenario.num_requests == 0:
            self._after(_QUIET_S, self._send_shutdown)
        if scenario.num_pauses:
            self._after(dice.uniform(0.0, scenario.span_s), self._send_pause)

    # The client

    def _send_request(self, number: int, index: int) -> None:
        if self.client_has_stopped:
            return
        dice = self.dice
        is_refused = dice.random() < self.scenario.refused_share
        num_prompt_tokens = dice.choice([0, MAX_MODEL_LEN]) if is_refused else dice.randint(1, 24)
        first_token = dice.choice([0, 100])  # half of the prompts share a prefix
        request = Request(
            request_id=str(number),
            prompt_token_ids=list(range(first_token, first_token + num_prompt_tokens)),
            params=RequestParams(max_tokens=dice.randint(1, 16)),
            seed=number,
            eos_token_ids=[END_TOKEN],
        )
        if self.num_unended == 0:  # the worker group may be asleep
            for process in self.processes:
                if process.index != index and dice.random() >= self.scenario.wake_loss:
                    self._send(process, Wake())
        self.requests[request.request_id] = _ClientRequest(request, index, self.now, may_fail=is_refused)
        self.num_unended += 1
        # Steps planned before the end of a request is known are run without it.
        self.step_bound += most_steps(request) + self.scenario.max_rounds
        self._send(self.processes[index], AddRequest(request))
        if dice.random() < COLLECTED_SHARE:
            self.num_asked += 1
            self._send(self.processes[0], CollectLoad())
        if dice.random() < self.scenario.abort_share:
            self._after(dice.expovariate(5.0), self._send_abort, request.request_id)

    def _send_pause(self) -> None:
        if self.dice.random() < 0.3:
            self._send_control(StartUpdate())
            return
        mode = self.dice.choice(PAUSE_MODES)
        self._send_control(Pause(mode=mode, salt=self.dice.choice([b"", b"new"])))
        unended = [known for known in self.requests.values() if known.end is None]
        if mode == "retract":  # they are computed again
            self.step_bound += sum(most_steps(known.request) for known in unended)

    def _send_control(self, command: Command) -> None:
        if not self.client_has_stopped:
            self._log(f"client: {type(command).__name__}")
            number = len(self.controls) + 1
            self.controls[number] = command
            for process in self.processes:
                self._send(process, Control(number, command))

    def _note_control(self, number: int) -> None:
        """Note that a replica has delivered the end of a control, and send the next one if all have."""
        self.num_controls_ended[number] += 1
        self._require(number <= self.num_controls_run, "I8", f"control {number} ends before it is run")
        if self.num_controls_ended[number] < self.scenario.num_replicas:
            return
        after: dict[type[Command], Command] = {
            Pause: Resume(),
            StartUpdate: FinishUpdate(version=str(number), salt=b"%d" % number),
        }
        if type(self.controls[number]) in after:
            then = after[type(self.controls[number])]
            self._after(self.dice.uniform(0.0, MAX_PAUSE_S), self._send_control, then)
        elif number < 2 * self.scenario.num_pauses:
            self._after(self.dice.uniform(0.0, MAX_PAUSE_S), self._send_pause)

    def _run_control(self, number: int) -> None:
        """Check a control that all ranks are about to run."""
        self._require(number == self.num_controls_run + 1, "I8", f"control {number} after {self.num_controls_run}")
        self.num_controls_run = number
        command = self.controls[number]
        self.is_paused = isinstance(command, Pause | StartUpdate)
        if isinstance(command, Pause) and command.mode == "wait":
            left = [
                process.index
                for process in self.processes
                if process.received.keys() - process.ended.keys() - process.after_pause.keys()
            ]
            self._require(not left or self.fault_at is not None, "I8", f"requests of {left} have not ended: {command}")

    def _send_abort(self, request_id: str) -> None:
        if not self.client_has_stopped:
            known = self.requests[request_id]
            known.was_aborted = True
            self._send(self.processes[known.index], AbortRequest(request_id))

    def _send_shutdown(self) -> None:
        if self.client_has_stopped:
            return
        self._log("client: shutdown")
        self.client_has_stopped = True
        for process in self.processes:
            self._send(process, Shutdown())

    def _send(self, process: _Process, message: ReplicaMessage) -> None:
        process.last_arrival_s = max(process.last_arrival_s, self.now + self._latency())
        self._after(process.last_arrival_s - self.now, self._arrive, process, message)

    def _receive_updates(self, process: _Process, updates: Sequence[RequestUpdate]) -> None:
        """Deliver updates to the client."""
        if process.loses_updates:
            return
        for update in updates:
            known = self.requests[update.request_id]
            self._require(known.end is None, "I3", f"request {update.request_id} has an update after its end: {update}")
            if update.token_ids and not known.token_ids:
                self.slowest_first_token_s = max(self.slowest_first_token_s, self.now - known.sent_at)
            known.token_ids += update.token_ids
            if update.finish_reason is not None:
                self._end(known, "error" if update.error is not None else update.finish_reason)

    def _end(self, known: _ClientRequest, end: str) -> None:
        known.end = end
        self.num_unended -= 1
        tokens, finish_reason = whole_output(known.request)
        request_id = known.request.request_id
        if end in ("stop", "length"):
            complete = known.token_ids == tokens and end == finish_reason
            self._require(complete, "I3", f"request {request_id} ended by {end} with {known.token_ids}, not {tokens}")
        else:
            has_cause = known.was_aborted if end == "abort" else known.may_fail or self.fault_at is not None
            self._require(has_cause or self.client_has_stopped, "I3", f"request {request_id} ended by {end}")
            begun = known.token_ids == tokens[: len(known.token_ids)]
            self._require(begun, "I3", f"request {request_id} got {known.token_ids}; it must begin like {tokens}")
        if self.fault_at is not None:
            took_s = self.now - self.fault_at
            is_slow = self.scenario.stall_probability > 0 or self.scenario.num_late > 0
            in_time = took_s <= 5.0 + (self._slack() if is_slow else 0.0)
            self._require(in_time, "I3", f"request {request_id} ended only {took_s:.1f} s after a fault")
        is_last = self.num_unended == 0 and len(self.requests) == self.scenario.num_requests
        if is_last and self.scenario.shutdown_s is None and not self.shutdown_is_due:
            self.shutdown_is_due = True
            self._after(_QUIET_S, self._send_shutdown)

    def _notice_exit(self, process: _Process) -> None:
        """Let the client notice that a process is gone, after its last updates."""
        self._log(f"client: {process.index} is gone")
        self.client_has_stopped = True
        for known in self.requests.values():
            if known.index == process.index and known.end is None:
                self._end(known, "error")

    # Faults

    def _inject_fault(self, process: _Process) -> None:
        if process.state != "alive":
            return
        self._log(f"{process.index}: fault {self.scenario.fault}")
        if self.scenario.fault == "internal":
            process.has_internal_fault = True
            self._make_fail(process)
        elif self.scenario.fault == "kill" and self.dice.random() < 0.5:
            self.fault_at = self.now
            self._kill(process)
        else:  # in its next step
            process.has_rank_fault = True

    def _make_fail(self, process: _Process) -> None:
        """Make the next call of the scheduler raise an error."""

        def fail(*_: Any) -> Any:
            process.has_failed = True
            raise SimulatedFault("internal error")

        process.scheduler.schedule = process.scheduler.commit = fail  # type: ignore[method-assign]

    def _kill(self, process: _Process) -> None:
        process.loses_updates = self.dice.random() < 0.5
        self._die(process)

    def _die(self, process: _Process) -> None:
        process.state = "dead"
        process.turn += 1
        process.generator.close()
        # Later, if updates from it are still in flight.
        self._after(max(0.0, process.last_delivery_s - self.now) + self._latency(), self._notice_exit, process)
        self._after(self.dice.uniform(0.0, DETECTION_S), self._notice_death)

    def _notice_death(self) -> None:
        """Let the watcher end the worker group."""
        if self.worker_group_is_broken:
            return
        self._log("watcher: the worker group is broken")
        self.worker_group_is_broken = True
        for process in self.processes:
            if process.state in ("starting", "alive"):
                self._kill(process)

    # Processes

    def _start(self, process: _Process) -> None:
        if process.state == "starting":
            self._log(f"{process.index}: starts")
            process.state = "alive"
            self._advance(process, None)

    def _arrive(self, process: _Process, message: ReplicaMessage) -> None:
        if process.state not in ("starting", "alive"):
            return
        self.num_messages += 1
        self._log(f"{process.index}: <- {type(message).__name__}")
        process.inbox.append(message)
        self._wake(process)

    def _wake(self, process: _Process) -> None:
        if process.wait is not None:
            self._after(self._work(), self._answer, process, process.turn)

    def _answer(self, process: _Process, turn: int) -> None:
        """End a wait. Only the first answer counts."""
        if process.turn != turn or process.state != "alive":
            return
        messages, process.inbox = process.inbox, []
        results, process.results = process.results, []
        for message in messages:
            match message:
                case AddRequest():
                    process.received[message.request.request_id] = None
                    if process.is_holding:
                        process.after_pause[message.request.request_id] = None
                case Control(command=Pause() as pause):
                    process.is_holding = True
                    if pause.mode == "abort":
                        for request_id in process.received:
                            self.requests[request_id].was_aborted = True
                case Control(command=Resume()):
                    process.is_holding = False
                    process.after_pause.clear()
        self._advance(process, Events(messages, results))

    def _advance(self, process: _Process, events: Events | None) -> None:
        """Hand events to the replica, and perform its effects until it waits."""
        process.turn += 1
        process.wait = None
        for _ in [] if events is None else events.results:
            process.plans_in_flight.popleft()
        answer: Any = events
        while True:
            try:
                effect = process.generator.send(answer)
            except StopIteration:
                self._leave(process)
                return
            except Exception as failure:
                self._end_with_error(process, failure)
                return
            answer = None
            self._check_scheduler(process)
            match effect:
                case Submit(work=work):
                    self._submit(process, work, events)
                case Delivery():
                    self._deliver(process, effect)
                case Wait(heartbeat=heartbeat):
                    process.wait = effect
                    if process.inbox or process.results:
                        self._wake(process)
                    elif heartbeat:
                        self._after(HEARTBEAT_S * self.dice.uniform(1.0, 1.05), self._answer, process, process.turn)
                    return

    def _check_scheduler(self, process: _Process) -> None:
        if not process.has_internal_fault:
            try:
                process.scheduler.check_invariants()
            except AssertionError as failure:
                self._violated("I4", f"replica {process.index}: {failure}")

    def _submit(self, process: _Process, work: Round, events: Events | None) -> None:
        self._log(f"{process.index}: submits {work.row}")
        number = work.row[1]
        self._require(
            number > process.last_number, "I6", f"replica {process.index}: {number} after {process.last_number}"
        )
        process.last_number = number
        has_nothing = not work.row[3] and not work.row[CONTROL] and not work.row[-1]
        rested = (
            events is not None and events.results and not any(each.agreement.has_requests for each in events.results)
        )
        if has_nothing and rested and events is not None and not events.messages:
            self._violated("idle", f"replica {process.index} goes on without sleeping, with nothing to do")
        if process.has_failed and not process.has_announced_failure:
            process.has_announced_failure = True
            if self.fault_at is None:
                self.fault_at = self.now
            if self.failed_round is None or number < self.failed_round:
                self.failed_round = number
        process.plans_in_flight.append(work.plan)
        process.last_round_s = max(process.last_round_s, self.now + self._latency())
        self._after(process.last_round_s - self.now, self._arrive_round, process, work)

    def _deliver(self, process: _Process, effect: Delivery) -> None:
        for update in effect.updates:
            known = update.request_id in process.received and update.request_id not in process.ended
            self._require(known, "I3", f"replica {process.index} delivers an update of an unknown request: {update}")
            if update.finish_reason is not None:
                process.ended[update.request_id] = None
        stats, num_live = effect.stats, len(process.received) - len(process.ended)
        if not process.has_internal_fault:
            if stats.num_running + stats.num_waiting != num_live:
                self._violated("I4", f"replica {process.index} has {num_live} requests, and says {stats}")
            has_plans = any(plan is not None for plan in process.plans_in_flight)
            if num_live == 0 and not has_plans and stats.num_free_blocks != process.num_blocks:
                self._violated("I4", f"replica {process.index} holds blocks without requests: {stats}")
        for control in effect.controls:
            self._note_control(control.number)
        process.last_delivery_s = max(process.last_delivery_s, self.now + self._latency())
        self._after(process.last_delivery_s - self.now, self._receive_updates, process, effect.updates)

    def _leave(self, process: _Process) -> None:
        """Check a replica that returned: it may only do so after an agreed shutdown."""
        self._log(f"{process.index}: left")
        process.state = "left"
        self._require(process.ranks.have_left, "I1", f"replica {process.index} left before its ranks")
        unended = list(process.received.keys() - process.ended.keys())
        self._require(not unended, "I3", f"replica {process.index} ended without ending {sorted(unended)}")
        all_free = process.scheduler.num_free_blocks == process.num_blocks
        has_plans = any(plan is not None for plan in process.plans_in_flight)
        self._require(all_free or has_plans, "I4", f"replica {process.index} left with blocks in use")

    def _end_with_error(self, process: _Process, failure: Exception) -> None:
        """Check a replica that ended with an error."""
        self._log(f"{process.index}: failed: {type(failure).__name__}")
        self._require(
            self.failed_round is not None, "crash", f"replica {process.index}: {type(failure).__name__}: {failure}"
        )
        self._die(process)

    # Ranks

    def _arrive_round(self, process: _Process, work: Round) -> None:
        if process.state == "alive" and not process.ranks.have_left:
            process.ranks.rounds.append(work)
            self._begin_round(process)

    def _begin_round(self, process: _Process) -> None:
        ranks = process.ranks
        if ranks.current is None and ranks.rounds and not ranks.have_left:
            ranks.current = ranks.rounds.popleft()
            self._after(self._work(), self._enter, process, "gather")

    def _enter(self, process: _Process, kind: str) -> None:
        """Let the ranks of a replica enter their next collective, in which they wait for all others."""
        if process.state != "alive":
            return
        ranks, index = process.ranks, process.index
        assert ranks.current is not None
        payload: Any = ranks.current.row if kind == "gather" else ranks.agreement
        number = ranks.num_collectives
        ranks.num_collectives += 1
        if self.leave_counts:
            self._violated("I1", f"replica {index} enters {kind}, but {sorted(self.leave_counts)} have left")
        collective = self.collectives.get(number)
        if collective is None:
            collective = self.collectives[number] = _Collective(kind)
            self._after(self._slack(), self._watch, number)
        first = next(iter(collective.payloads), index)
        if collective.kind != kind:
            self._violated("I1", f"collective {number}: {index} enters {kind}, and {first} {collective.kind}")
        if kind != "gather" and collective.payloads and payload != collective.payloads[first]:
            what = f"collective {number}: {index} enters {kind} for {payload}"
            self._violated("I1", f"{what}, and {first} for {collective.payloads[first]}")
        collective.payloads[index] = payload
        if len(collective.payloads) == self.scenario.num_replicas:
            del self.collectives[number]
            self._complete(collective)

    def _slack(self) -> float:
        """Return how long a collective may stay open while all replicas are alive."""
        stalls = 8 * MAX_STALL_S if self.scenario.stall_probability else 0.0
        return 2 * HEARTBEAT_S + stalls + (MAX_LATE_S if self.scenario.num_late else 0.0)

    def _watch(self, number: int) -> None:
        collective = self.collectives.get(number)
        if collective is None or self.fault_at is not None:
            return
        missing = {p.index: p.ranks.current for p in self.processes if p.index not in collective.payloads}
        self._violated("deadlock", f"collective {number}, a {collective.kind}, waits for {missing}")

    def _complete(self, collective: _Collective) -> None:
        self._log(f"{collective.kind} is complete")
        rows = []
        if collective.kind == "control":
            self._run_control(next(iter(collective.payloads.values())).control)
        if collective.kind == "gather":
            rows = [collective.payloads[index] for index in range(self.scenario.num_replicas)]
            self._count_round(rows)
        for process in self.processes:
            delay_s = self.dice.uniform(0.0001, 0.002)
            if collective.kind == "gather":
                self._after(delay_s, self._agreed, process, rows)
            elif collective.kind == "dispatch":
                self._after(delay_s, self._compute, process)
            elif collective.kind == "control":
                self._after(delay_s, self._finish_step, process)
            else:
                self._after(delay_s, self._finish_step, process)

    def _agreed(self, process: _Process, rows: list[list[int]]) -> None:
        if process.state != "alive":
            return
        ranks, scenario = process.ranks, self.scenario
        assert ranks.current is not None
        try:
            ranks.agreement = agreement = self.agree_as(
                rows, number=ranks.num_rounds, num_replicas=scenario.num_replicas, index=process.index
            )
        except Exception as error:
            self._violated("I6", f"the ranks of replica {process.index}: {error}")
            raise
        ranks.num_rounds += 1
        if agreement.is_idle or agreement.ends_all:
            self._send_result(process, RoundResult(agreement=agreement))
            return
        plan = ranks.current.plan
        num_tokens, announced = 0 if plan is None else plan.num_tokens, agreement.num_tokens[process.index]
        if num_tokens != announced:
            self._violated("I5", f"replica {process.index} runs {num_tokens} tokens, and {announced} were agreed")
        if not any(agreement.num_tokens) and not agreement.collects_load and not agreement.control:
            self._violated("I5", "a step of nothing but padding")
        if agreement.control:
            self._after(self._work(), self._enter, process, "control")
            return
        if self.failed_round is not None and agreement.number >= self.failed_round:
            self._violated("I7", f"replica {process.index} runs round {agreement.number} after a replica failed")
        if not self._fault_occurs(process, 1 / 3):
            self._after(self._work(), self._enter, process, "dispatch")

    def _fault_occurs(self, process: _Process, probability: float) -> bool:
        """True if the fault occurs at this point of a forward pass. The process of the replica ends with its ranks."""
        occurs = process.has_rank_fault and self.dice.random() < probability
        if occurs:
            process.has_rank_fault = False
            self.fault_at = self.now
            self._kill(process)
        return occurs

    def _count_round(self, rows: list[list[int]]) -> None:
        if any(row[3] for row in rows):
            self._require(not self.is_paused, "I8", "a step is run during a pause")
            self.was_active = True
            self.num_steps += 1
            if self.num_steps > self.step_bound:
                self._violated("livelock", f"{self.num_steps} steps; {self.step_bound} are enough for all requests")
            return
        if all(row[-1] & REQUESTS_SHUTDOWN for row in rows) or any(row[-1] & HAS_FAILED for row in rows):
            return  # the last round
        if any(row[-1] & REQUESTS_LOAD for row in rows):
            self.num_collections += 1
            num_due = self.num_asked + self.num_steps // LOAD_WINDOW
            self._require(self.num_collections <= num_due, "idle", f"{self.num_collections} rounds only to collect")
            return
        if any(row[CONTROL] for row in rows):
            self.num_control_rounds += 1
            most = self.num_messages + self.now / HEARTBEAT_S + self.num_steps * self.scenario.max_rounds + 2
            self._require(self.num_control_rounds <= most, "idle", f"{self.num_control_rounds} rounds for controls")
            return
        if any(row[6] or row[7] for row in rows):  # requests wait for results of steps in flight
            self.num_waiting_rounds += 1
            most = self.num_steps * self.scenario.max_rounds
            self._require(self.num_waiting_rounds <= most, "idle", f"{self.num_waiting_rounds} rounds of waiting")
            return
        self.num_idle_rounds += 1
        self.num_rests += self.was_active
        self.was_active = False
        # After a step, rounds may be in flight that turn out to be idle.
        causes = self.num_messages + self.now / HEARTBEAT_S + 2 + self.num_rests * self.scenario.max_rounds
        self._require(self.num_idle_rounds <= causes, "idle", f"{self.num_idle_rounds} idle rounds")

    def _compute(self, process: _Process) -> None:
        """Run the experts, between dispatch and combine."""
        if process.state == "alive" and not self._fault_occurs(process, 0.5):
            self._enter(process, "combine")

    def _finish_step(self, process: _Process) -> None:
        if process.state != "alive" or self._fault_occurs(process, 1.0):
            return
        ranks = process.ranks
        assert ranks.current is not None
        assert ranks.agreement is not None
        plan, command, outcome = ranks.current.plan, ranks.current.command, None
        if ranks.agreement.control and isinstance(command, StartUpdate | FinishUpdate):
            is_open = isinstance(command, StartUpdate)
            outcome = Outcome(is_open=is_open, is_whole=not is_open)
        result = StepResult(step=0, chunks=[]) if plan is None else self._run(ranks.table, plan)
        self._send_result(process, RoundResult(agreement=ranks.agreement, result=result, outcome=outcome))

    def _run(self, table: RequestTable, plan: StepPlan) -> StepResult:
        """Return the result of the simulated model."""
        chunks = table.apply(plan)
        results = [
            ChunkResult(
                token_ids=[sampled_token(chunk.request.seed, chunk.request.num_output_tokens)] if chunk.samples else []
            )
            for chunk in chunks
        ]
        if self.scenario.plans_ahead:
            table.append_tokens(chunks, [token_id for each in results for token_id in each.token_ids])
        if self.dice.random() < self.scenario.row_failure_probability:
            row = self.dice.randrange(len(results))
            results[row] = ChunkResult(error="not a number")
            self.requests[str(chunks[row].request.seed)].may_fail = True
        return StepResult(step=plan.step, chunks=results)

    def _send_result(self, process: _Process, result: RoundResult) -> None:
        ranks = process.ranks
        ranks.current = None
        if result.agreement.ends_all:
            ranks.have_left = True
            if result.agreement.is_shutdown:
                self.leave_counts[process.index] = ranks.num_collectives
                counts = set(self.leave_counts.values())
                self._require(len(counts) == 1, "I1", f"ranks left after different rounds: {self.leave_counts}")
                others = [p.index for p in self.processes if p.ranks.num_collectives > ranks.num_collectives]
                self._require(not others, "I1", f"the ranks of {process.index} left, and {others} wait for them")
        process.last_result_s = max(process.last_result_s, self.now + self._latency())
        self._after(process.last_result_s - self.now, self._arrive_result, process, result)
        self._begin_round(process)

    def _arrive_result(self, process: _Process, result: RoundResult) -> None:
        if process.state == "alive":
            process.results.append(result)
            self._wake(process)

    def _closing_report(self) -> Report:
        unfinished = {p.index: p.wait for p in self.processes if p.state in ("starting", "alive")}
        self._require(not unfinished, "deadlock", f"no events are left, and these wait: {unfinished}")
        unended = [request_id for request_id, known in self.requests.items() if known.end is None]
        self._require(not unended, "I3", f"requests never ended: {unended}")
        return Report(
            num_events=self.num_events,
            num_steps=self.num_steps,
            num_idle_rounds=self.num_idle_rounds,
            num_preemptions=sum(process.scheduler.num_preemptions for process in self.processes),
            ends=dict(sorted(Counter(known.end or "" for known in self.requests.values()).items())),
            virtual_s=self.now,
            slowest_first_token_s=self.slowest_first_token_s,
            trace_digest=self.trace.hexdigest(),
        )
