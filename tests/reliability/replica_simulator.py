"""Runs a worker group in virtual time, with faults: the real `Replica`, `Lockstep` and `Scheduler`, without a model.

This file supplies what surrounds the replicas: a client and its requests, messages in flight, collectives, stalls,
failing and dying processes, and the watcher that notices a death. A scenario determines its run completely. After each
event these invariants are checked:

- I1: every replica enters the same sequence of collectives, and none leaves before the others.
- I3: a request ends exactly once, with a reason; the tokens sent to its client are those computed.
- I4: blocks in use equal the sum over live requests, and zero when idle; reported statistics are correct.
- I5: a replica runs the tokens it announced. A step has at least one token, unless it collects expert loads.
- I6: step numbers only grow.
- I7: after a fault nothing new is admitted, and no further step is run.
- deadlock: with all processes alive, no collective stays open for longer than the slowest of them can take.
- livelock: requests are served within a number of steps that follows from their lengths.
- idle: without work a replica sleeps; the group agrees no more often than heartbeats and messages require.
- crash: no replica ends with an error unless there was a fault.

Client, processes, faults and collectives share one clock and one queue of events, so they are in one file.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

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
    MAX_STALL_S,
    InvariantViolation,
    Report,
    Scenario,
    most_steps,
    sampled_token,
    whole_output,
)

from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    ChunkResult,
    CollectLoad,
    ReplicaMessage,
    Request,
    RequestUpdate,
    Shutdown,
    StepPlan,
    StepResult,
    Wake,
)
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import REQUESTS_LOAD, REQUESTS_SHUTDOWN, Lockstep
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica, StepFailed
from moeserve.scheduling.scheduler import Scheduler, SchedulerConfig

MakeReplica: TypeAlias = Callable[[int, int, Scheduler], Replica]
_QUIET_S = 4 * HEARTBEAT_S  # between the last end and the shutdown


class CollectiveFailed(Exception):
    """The error of a collective after another replica has died."""


class SimulatedFault(Exception):
    """The error of an injected fault."""


def simulate(scenario: Scenario, make_replica: MakeReplica | None = None) -> Report:
    """Run a scenario to its end.

    Args:
        make_replica: makes a replica from rank, number of replicas and scheduler; None: as the engine does.

    Raises:
        InvariantViolation: an invariant did not hold. Its message has the last events.
    """
    return _Simulation(scenario, make_replica or _real_replica).run()


def _real_replica(rank: int, num_replicas: int, scheduler: Scheduler) -> Replica:
    lockstep = Lockstep(rank=rank, num_replicas=num_replicas)
    return Replica(scheduler=scheduler, lockstep=lockstep, load_window=LOAD_WINDOW)


@dataclass(eq=False)
class _ClientRequest:
    """The client's state of a request."""

    request: Request
    rank: int
    sent_at: float
    token_ids: list[int] = field(default_factory=list)
    end: str | None = None


@dataclass(eq=False)
class _Process:
    """The process of one replica, which drives its generator."""

    rank: int
    scheduler: Scheduler
    num_blocks: int
    generator: Generator[Effect, Any, None]
    state: Literal["starting", "alive", "left", "dead"] = "starting"
    effect: Effect | None = None
    turn: int = 0  # grows with each answer, so that a late answer to an earlier effect is recognised
    inbox: list[ReplicaMessage] = field(default_factory=list)
    last_arrival_s: float = 0.0  # of messages to it, which stay in order
    last_delivery_s: float = 0.0  # of its last delivery
    num_collectives: int = 0  # entered
    is_inside: bool = False  # of a collective
    last_step: int = -1
    failed_step: int | None = None  # the round in which it announced its failure
    has_failed_collective: bool = False  # an error was thrown into it at a collective
    must_sleep: bool = False  # all agreed to idle, so it may only deliver and sleep
    has_fault: bool = False  # it fails at the next opportunity
    loses_updates: bool = False  # it was killed before its last updates were sent
    received: dict[str, None] = field(default_factory=dict)  # requests
    ended: dict[str, None] = field(default_factory=dict)  # those whose end it delivered


@dataclass(eq=False)
class _Collective:
    """A collective of all replicas."""

    kind: str
    payloads: dict[int, Any] = field(default_factory=dict)  # by rank


class _Simulation:
    def __init__(self, scenario: Scenario, make_replica: MakeReplica) -> None:
        self.scenario = scenario
        self.dice = random.Random(scenario.seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.num_events = 0
        self.num_queued = 0
        self.trace = hashlib.sha256()
        self.last_events: deque[str] = deque(maxlen=25)
        self.processes = [self._new_process(rank, make_replica) for rank in range(scenario.num_replicas)]
        self.collectives: dict[int, _Collective] = {}  # open ones, by number
        self.requests: dict[str, _ClientRequest] = {}
        self.num_unended = 0
        self.client_has_stopped = False  # it sends no more requests
        self.shutdown_is_due = False
        self.fault_at: float | None = None
        self.worker_group_is_broken = False  # the watcher has noticed
        self.failed_step: int | None = None  # all must leave after it
        self.shutdown_is_agreed = False
        self.leave_counts: dict[int, int] = {}  # collectives entered by those that left
        self.num_steps = 0
        self.num_idle_rounds = 0
        self.num_asked = self.num_collections = 0  # for figures; without a step
        self.num_messages = 0
        self.step_bound = 0
        self.slowest_first_token_s = 0.0

    def _new_process(self, rank: int, make_replica: MakeReplica) -> _Process:
        num_blocks = self.dice.choice([10, 14, 20])
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                max_num_seqs=self.dice.choice([2, 4]),
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=self.dice.random() < 0.5,
            ),
            b"simulated",
        )
        return _Process(rank, scheduler, num_blocks, make_replica(rank, self.scenario.num_replicas, scheduler).run())

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
        return self.scenario.span_s + MAX_LATE_S + 100.0 + per_step_s * self.step_bound

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
        """Return the time of a replica's own work, sometimes with a stall."""
        if self.dice.random() < self.scenario.stall_probability:
            return self.dice.uniform(0.0, MAX_STALL_S)
        return self.dice.uniform(0.0001, 0.001)

    def _plan_scenario(self) -> None:
        scenario, dice = self.scenario, self.dice
        late = set(dice.sample(range(scenario.num_replicas), scenario.num_late))
        for process in self.processes:
            latest = MAX_LATE_S if process.rank in late else 0.01
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

    # The client

    def _send_request(self, number: int, rank: int) -> None:
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
                if process.rank != rank and dice.random() >= self.scenario.wake_loss:
                    self._send(process, Wake())
        self.requests[request.request_id] = _ClientRequest(request, rank, self.now)
        self.num_unended += 1
        self.step_bound += most_steps(request)
        self._send(self.processes[rank], AddRequest(request))
        if dice.random() < COLLECTED_SHARE:
            self.num_asked += 1
            self._send(self.processes[0], CollectLoad())
        if dice.random() < self.scenario.abort_share:
            self._after(dice.expovariate(5.0), self._send_abort, request.request_id)

    def _send_abort(self, request_id: str) -> None:
        if not self.client_has_stopped:
            self._send(self.processes[self.requests[request_id].rank], AbortRequest(request_id))

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
        self._log(f"client: {process.rank} is gone")
        self.client_has_stopped = True
        for known in self.requests.values():
            if known.rank == process.rank and known.end is None:
                self._end(known, "error")

    # Faults

    def _inject_fault(self, process: _Process) -> None:
        if process.state != "alive":
            return
        self._log(f"{process.rank}: fault {self.scenario.fault}")
        process.has_fault = True
        if self.scenario.fault == "kill" and self.dice.random() < 0.5:  # otherwise in its next step
            process.has_fault = False
            self.fault_at = self.now
            self._kill(process)

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
        """Let the watcher end the worker group: collectives fail, or processes are killed."""
        if self.worker_group_is_broken:
            return
        self._log("watcher: the worker group is broken")
        self.worker_group_is_broken = True
        for process in self.processes:
            if process.state == "starting" or (process.state == "alive" and self.dice.random() < 0.3):
                self._kill(process)
            elif process.state == "alive" and process.is_inside:
                self._after(self._latency(), self._fail_collective, process, process.turn)
            elif isinstance(process.effect, Receive):
                self._answer_later(process, self._latency(), self._take_inbox)

    def _fail_collective(self, process: _Process, turn: int) -> None:
        if process.turn == turn and process.state == "alive":
            self._throw_fatal(process, CollectiveFailed("another replica died"))

    def _throw_fatal(self, process: _Process, error: Exception) -> None:
        process.has_failed_collective = True
        process.is_inside = False
        self._advance(process, error=error)

    # Processes

    def _start(self, process: _Process) -> None:
        if process.state == "starting":
            self._log(f"{process.rank}: starts")
            process.state = "alive"
            self._advance(process)

    def _arrive(self, process: _Process, message: ReplicaMessage) -> None:
        if process.state not in ("starting", "alive"):
            return
        self.num_messages += 1
        self._log(f"{process.rank}: <- {type(message).__name__}")
        process.inbox.append(message)
        if isinstance(process.effect, Receive) and process.effect.block:
            self._answer_later(process, self._work(), self._take_inbox)

    def _take_inbox(self, process: _Process) -> list[ReplicaMessage]:
        messages, process.inbox = process.inbox, []
        process.received.update({m.request.request_id: None for m in messages if isinstance(m, AddRequest)})
        return messages

    def _answer_later(self, process: _Process, delay_s: float, answer: Callable[[_Process], Any]) -> None:
        """Schedule an answer. Only the first answer to an effect counts."""
        self._after(delay_s, self._answer, process, process.turn, answer)

    def _answer(self, process: _Process, turn: int, answer: Callable[[_Process], Any]) -> None:
        if process.turn != turn or process.state != "alive":
            return
        fails = (
            self.scenario.fault == "internal" and process.has_fault and isinstance(process.effect, (Receive, Deliver))
        )
        if fails:
            process.has_fault = False
            process.failed_step = -1  # set at its next gather
            self._advance(process, error=SimulatedFault("internal error"))
        else:
            self._advance(process, answer(process))

    def _advance(self, process: _Process, answer: Any = None, error: Exception | None = None) -> None:
        """Send the answer to the replica, and start its next effect."""
        process.turn += 1
        process.effect = None
        try:
            effect = process.generator.send(answer) if error is None else process.generator.throw(error)
        except StopIteration:
            self._leave(process)
            return
        except Exception as failure:
            self._end_with_error(process, failure)
            return
        may_check = isinstance(effect, (Deliver, Gather))
        if may_check and not process.has_failed_collective and self.failed_step is None:
            try:
                process.scheduler.check_invariants()
            except AssertionError as failure:
                self._violated("I4", f"replica {process.rank}: {failure}")
        process.effect = effect
        self._log(f"{process.rank}: {type(effect).__name__}")
        match effect:
            case Deliver():
                self._begin_deliver(process, effect)
            case Receive():
                self._begin_receive(process, effect)
            case Gather():
                self._begin_gather(process, effect)
            case Execute():
                self._begin_execute(process, effect)

    def _leave(self, process: _Process) -> None:
        """Check a replica that returned: it may only do so after an agreed shutdown."""
        self._log(f"{process.rank}: left")
        process.state = "left"
        self.leave_counts[process.rank] = process.num_collectives
        counts = set(self.leave_counts.values())
        others = [other.rank for other in self.processes if other.num_collectives > process.num_collectives]
        self._require(len(counts) == 1, "I1", f"replicas left after different rounds: {self.leave_counts}")
        self._require(not others, "I1", f"replica {process.rank} left, and {others} wait for it")
        self._require(
            not process.has_failed_collective, "I7", f"replica {process.rank} met a fault, and left without an error"
        )
        self._check_all_ended(process)
        all_free = process.scheduler.num_free_blocks == process.num_blocks
        self._require(all_free, "I4", f"replica {process.rank} left with blocks in use")

    def _end_with_error(self, process: _Process, failure: Exception) -> None:
        """Check a replica that ended with an error."""
        self._log(f"{process.rank}: failed: {type(failure).__name__}")
        could_not_announce = process.failed_step == -1 and self.shutdown_is_agreed  # there was no further round
        expected = process.has_failed_collective or self.failed_step is not None or could_not_announce
        self._require(expected, "crash", f"replica {process.rank} ended by {type(failure).__name__}: {failure}")
        self._check_all_ended(process)
        self._die(process)

    def _check_all_ended(self, process: _Process) -> None:
        unended = list(process.received.keys() - process.ended.keys())
        self._require(not unended, "I3", f"replica {process.rank} ended without ending {sorted(unended)}")

    # Effects

    def _begin_deliver(self, process: _Process, effect: Deliver) -> None:
        for update in effect.updates:
            known = update.request_id in process.received and update.request_id not in process.ended
            self._require(known, "I3", f"replica {process.rank} delivers an update of an unknown request: {update}")
            if update.finish_reason is not None:
                process.ended[update.request_id] = None
        stats, num_live = effect.stats, len(process.received) - len(process.ended)
        if not process.has_failed_collective and self.failed_step is None:
            if stats.num_running + stats.num_waiting != num_live:
                self._violated("I4", f"replica {process.rank} has {num_live} requests, and says {stats}")
            if num_live == 0 and stats.num_free_blocks != process.num_blocks:
                self._violated("I4", f"replica {process.rank} holds blocks without requests: {stats}")
        process.last_delivery_s = max(process.last_delivery_s, self.now + self._latency())
        self._after(process.last_delivery_s - self.now, self._receive_updates, process, effect.updates)
        self._answer_later(process, self._work(), lambda process: None)

    def _begin_receive(self, process: _Process, effect: Receive) -> None:
        self._require_going_on(process, "listens")
        if process.must_sleep:
            self._require(effect.block, "idle", f"replica {process.rank} goes on without sleeping, with nothing to do")
        process.must_sleep = False
        if not effect.block or process.inbox or self.worker_group_is_broken:
            self._answer_later(process, self._work(), self._take_inbox)
        elif effect.heartbeat:
            self._answer_later(process, HEARTBEAT_S * self.dice.uniform(1.0, 1.05), self._take_inbox)

    def _begin_gather(self, process: _Process, effect: Gather) -> None:
        self._require_going_on(process, "gathers")
        step = effect.row[1]
        self._require(step > process.last_step, "I6", f"replica {process.rank}: step {step} after {process.last_step}")
        process.last_step = step
        if process.failed_step == -1:
            process.failed_step = self.failed_step = step
            self.fault_at = self.now
        self._enter(process, "gather", effect.row)

    def _begin_execute(self, process: _Process, effect: Execute) -> None:
        self._require_going_on(process, "executes")
        agreement, plan = effect.agreement, effect.plan
        num_tokens = 0 if plan is None else sum(len(chunk.token_ids) for chunk in plan.chunks)
        announced = agreement.num_tokens[process.rank]
        if num_tokens != announced:
            self._violated("I5", f"replica {process.rank} runs {num_tokens} tokens, and {announced} were agreed")
        if not any(agreement.num_tokens) and not agreement.collects_load:
            self._violated("I5", "a step of nothing but padding")
        if self.failed_step is not None and agreement.step >= self.failed_step:
            self._violated("I7", f"replica {process.rank} runs step {agreement.step} after a replica failed")
        if self._fault_occurs(process, 1 / 3):
            return
        self._after(self._work(), self._enter_if, process, process.turn, "dispatch")

    def _enter_if(self, process: _Process, turn: int, kind: str) -> None:
        if process.turn == turn and process.state == "alive":
            assert isinstance(process.effect, Execute)
            self._enter(process, kind, process.effect.agreement)

    def _fault_occurs(self, process: _Process, probability: float) -> bool:
        """True if the fault occurs at this point of a forward pass, which then ends."""
        occurs = process.has_fault and self.scenario.fault != "internal" and self.dice.random() < probability
        if occurs:
            process.has_fault = False
            self.fault_at = self.now
            if self.scenario.fault == "kill":
                self._kill(process)
            else:
                self._throw_fatal(process, SimulatedFault("in a forward pass"))
        return occurs

    def _require_going_on(self, process: _Process, does: str) -> None:
        self._require(
            not process.has_failed_collective, "I7", f"replica {process.rank} {does} after an error in a collective"
        )

    # Collectives

    def _enter(self, process: _Process, kind: str, payload: Any) -> None:
        """Let a replica enter its next collective, in which it waits for all others."""
        number = process.num_collectives
        process.num_collectives += 1
        process.is_inside = True
        if self.leave_counts:
            self._violated("I1", f"replica {process.rank} enters {kind}, but {sorted(self.leave_counts)} have left")
        collective = self.collectives.get(number)
        if collective is None:
            collective = self.collectives[number] = _Collective(kind)
            self._after(self._slack(), self._watch, number)
        first = next(iter(collective.payloads), process.rank)
        if collective.kind != kind:
            self._violated("I1", f"collective {number}: {process.rank} enters {kind}, and {first} {collective.kind}")
        if kind != "gather" and collective.payloads and payload != collective.payloads[first]:
            what = f"collective {number}: {process.rank} enters {kind} for {payload}"
            self._violated("I1", f"{what}, and {first} for {collective.payloads[first]}")
        collective.payloads[process.rank] = payload
        if self.worker_group_is_broken:
            self._after(self._latency(), self._fail_collective, process, process.turn)
        elif len(collective.payloads) == self.scenario.num_replicas:
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
        missing = {p.rank: p.effect for p in self.processes if p.rank not in collective.payloads}
        self._violated("deadlock", f"collective {number}, a {collective.kind}, waits for {missing}")

    def _complete(self, collective: _Collective) -> None:
        self._log(f"{collective.kind} is complete")
        if collective.kind == "gather":
            rows = [collective.payloads[rank] for rank in range(self.scenario.num_replicas)]
            self._count_round(rows)
        for process in self.processes:
            if process.state != "alive":  # died inside
                continue
            delay_s = self.dice.uniform(0.0001, 0.002)
            if collective.kind == "gather":
                self._answer_later(process, delay_s, lambda process: self._outside(process, rows))
            elif collective.kind == "dispatch":
                self._after(delay_s, self._compute, process, process.turn)
            else:
                self._after(delay_s, self._finish_step, process, process.turn)

    def _outside(self, process: _Process, answer: Any) -> Any:
        process.is_inside = False
        return answer

    def _count_round(self, rows: list[list[int]]) -> None:
        if any(row[3] for row in rows):
            self.num_steps += 1
            if self.num_steps > self.step_bound:
                self._violated("livelock", f"{self.num_steps} steps; {self.step_bound} are enough for all requests")
            return
        self.shutdown_is_agreed = all(row[6] & REQUESTS_SHUTDOWN for row in rows)
        if any(row[6] & REQUESTS_LOAD for row in rows):
            self.num_collections += 1
            num_due = self.num_asked + self.num_steps // LOAD_WINDOW
            self._require(self.num_collections <= num_due, "idle", f"{self.num_collections} rounds only to collect")
            return
        self.num_idle_rounds += 1
        for process in self.processes:
            process.must_sleep = True
        causes = self.num_messages + self.now / HEARTBEAT_S + 2
        self._require(self.num_idle_rounds <= causes, "idle", f"{self.num_idle_rounds} idle rounds")

    def _compute(self, process: _Process, turn: int) -> None:
        """Run the experts, between dispatch and combine."""
        if process.turn == turn and process.state == "alive" and not self._fault_occurs(process, 0.5):
            self._enter_if(process, turn, "combine")

    def _finish_step(self, process: _Process, turn: int) -> None:
        if process.turn != turn or process.state != "alive" or self._fault_occurs(process, 1.0):
            return
        assert isinstance(process.effect, Execute)
        plan = process.effect.plan
        if plan is not None and self.dice.random() < self.scenario.local_failure_probability:
            self._log(f"{process.rank}: the result is unusable")
            self._answer(process, turn, lambda process: self._outside(process, StepFailed("not a number")))
        else:
            result = None if plan is None else _result_of(plan)
            self._answer(process, turn, lambda process: self._outside(process, result))

    def _closing_report(self) -> Report:
        unfinished = {p.rank: p.effect for p in self.processes if p.state in ("starting", "alive")}
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


def _result_of(plan: StepPlan) -> StepResult:
    """Return the result of the simulated model."""
    specs = [chunk.sample for chunk in plan.chunks]
    tokens = [None if spec is None else sampled_token(spec.seed, spec.position) for spec in specs]
    return StepResult(step=plan.step, chunks=[ChunkResult(token_id=token) for token in tokens])
