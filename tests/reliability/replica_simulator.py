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
"""

from __future__ import annotations

import hashlib
import heapq
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

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

Fault: TypeAlias = Literal["none", "kill", "raise", "books"]
MakeReplica: TypeAlias = Callable[[int, int, Scheduler], Replica]

HEARTBEAT_S = 1.0
DETECTION_S = 1.0  # a death is noticed within
MAX_STALL_S = 3.0
MAX_LATE_S = 20.0
BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
MAX_NUM_BATCHED_TOKENS = 8
END_TOKEN = 0
LOAD_WINDOW = 5  # steps
COLLECTED_SHARE = 0.05  # of requests, with which the figures of experts are asked for
_QUIET_S = 4 * HEARTBEAT_S  # between the last end and the shutdown


class InvariantViolation(AssertionError):
    """Something that must always hold did not."""

    def __init__(self, invariant: str, what: str, last_events: Sequence[str] = ()) -> None:
        super().__init__("\n".join([f"{invariant}: {what}", *last_events]))
        self.invariant = invariant


class CollectiveFailed(Exception):
    """What a replica meets in a collective when another one has died."""


class SimulatedFault(Exception):
    """What a scenario breaks on purpose."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All that decides a run. Shares and probabilities are from 0 to 1, times in virtual seconds."""

    num_replicas: int
    seed: int
    num_requests: int = 40
    num_busy_replicas: int = 8  # requests go to so many of the replicas; the rest run padding
    span_s: float = 3.0  # arrivals come within this time ...
    num_bursts: int = 2  # ... around so many moments
    abort_share: float = 0.2
    refused_share: float = 0.05  # requests that no scheduler accepts
    wake_loss: float = 0.0
    stall_probability: float = 0.0  # per effect
    local_failure_probability: float = 0.0  # per step: the result is of no use to one replica
    fault: Fault = "none"  # kill: the process is gone; raise: in a forward pass; books: in its own books
    fault_s: float = 0.0
    fault_replica: int = 0
    num_late: int = 0  # replicas that join up to MAX_LATE_S later
    shutdown_s: float | None = None  # None: when all requests have ended

    @classmethod
    def drawn(cls, num_replicas: int, seed: int, num_requests: int) -> Scenario:
        """A scenario with a bit of everything, chosen by the seed."""
        dice = random.Random(f"{num_replicas} {seed}")
        span_s = dice.choice([0.5, 3.0, 12.0])
        num_late = dice.choice([0, 0, 1, num_replicas // 2])
        end_s = span_s + (MAX_LATE_S if num_late else 0.0)
        return cls(
            num_replicas=num_replicas,
            seed=seed,
            num_requests=num_requests,
            num_busy_replicas=dice.choice([1, max(1, num_replicas // 4), num_replicas]),
            span_s=span_s,
            num_bursts=dice.choice([1, 3, 10]),
            abort_share=dice.choice([0.0, 0.2, 0.6]),
            refused_share=dice.choice([0.0, 0.1]),
            wake_loss=dice.choice([0.0, 0.3, 1.0]),
            stall_probability=dice.choice([0.0, 0.0, 1 / (50 * num_replicas)]),
            local_failure_probability=dice.choice([0.0, 0.0, 0.02]),
            fault=dice.choice(["none", "none", "kill", "raise", "books"]),
            fault_s=dice.uniform(0.0, end_s),
            fault_replica=dice.randrange(num_replicas),
            num_late=num_late,
            shutdown_s=dice.choice([None, None, dice.uniform(0.0, end_s)]),
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """What happened in a run without a violation."""

    num_events: int
    num_steps: int  # executed by the worker group
    num_idle_rounds: int
    num_preemptions: int
    ends: dict[str, int]  # requests by how they ended: "stop", "length", "abort", "error"
    virtual_s: float
    slowest_first_token_s: float  # from sending a request to its first token, over all requests
    trace_digest: str  # SHA-256 over all events


def simulate(scenario: Scenario, make_replica: MakeReplica | None = None) -> Report:
    """Plays a scenario to its end.

    Args:
        make_replica: makes the replica of a rank among so many, with its scheduler; none: as the engine does.

    Raises:
        InvariantViolation: what did not hold, with the last events before it.
    """
    return _Simulation(scenario, make_replica or _real_replica).run()


def _real_replica(rank: int, num_replicas: int, scheduler: Scheduler) -> Replica:
    lockstep = Lockstep(rank=rank, num_replicas=num_replicas)
    return Replica(scheduler=scheduler, lockstep=lockstep, load_window=LOAD_WINDOW)


def sampled_token(seed: int, position: int) -> int:
    """The token that every model of the simulation gives, after which 1 in 30 outputs ends."""
    return zlib.crc32(b"%d at %d" % (seed, position)) % 30


def whole_output(request: Request) -> tuple[list[int], str]:
    """Tokens and finish reason of a request that is left alone, counted without a scheduler."""
    most = min(request.params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(request.prompt_token_ids))
    output = [sampled_token(request.seed, position) for position in range(most)]
    if END_TOKEN in output:
        return output[: output.index(END_TOKEN) + 1], "stop"
    return output, "length"


def most_steps(request: Request) -> int:
    """Steps in which a request can be the oldest of its replica: it may have to be computed again, but only once
    from there, and then moves on in each step."""
    num_output = len(whole_output(request)[0])
    return -(-(len(request.prompt_token_ids) + num_output) // MAX_NUM_BATCHED_TOKENS) + num_output


@dataclass(eq=False)
class _ClientRequest:
    """A request as its client sees it."""

    request: Request
    rank: int
    sent_at: float
    token_ids: list[int] = field(default_factory=list)
    end: str | None = None


@dataclass(eq=False)
class _Process:
    """One replica's process: what drives the generator."""

    rank: int
    scheduler: Scheduler
    num_blocks: int
    generator: Generator[Effect, Any, None]
    state: Literal["starting", "alive", "left", "dead"] = "starting"
    effect: Effect | None = None
    turn: int = 0  # grows with each answer, so that an answer meant for an earlier effect is known as such
    inbox: list[ReplicaMessage] = field(default_factory=list)
    last_arrival_s: float = 0.0  # of messages to it: they stay in order
    last_news_s: float = 0.0  # of news from it
    num_collectives: int = 0  # entered
    is_inside: bool = False  # of a collective
    last_step: int = -1
    failed_step: int | None = None  # the round in which it said that it has failed
    was_told_fatal: bool = False  # an error was thrown into it at a collective
    must_sleep: bool = False  # all agreed to idle, so it may only tell and sleep
    has_fault: bool = False  # the next chance to fail is to be taken
    loses_news: bool = False  # it was killed, and what it had written was not sent
    received: dict[str, None] = field(default_factory=dict)  # requests it took in ...
    ended: dict[str, None] = field(default_factory=dict)  # ... and those whose end it told


@dataclass(eq=False)
class _Collective:
    """One meeting of all replicas."""

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
        """Virtual seconds within which a run must be over."""
        per_step_s = 1.0 if self.scenario.stall_probability else 0.05
        return self.scenario.span_s + MAX_LATE_S + 100.0 + per_step_s * self.step_bound

    def _after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self.num_queued += 1  # breaks ties, so that the order never depends on anything else
        heapq.heappush(self.queue, (self.now + delay_s, self.num_queued, action, arguments))

    def _log(self, event: str) -> None:
        line = f"{self.now:.6f} {event}"
        self.trace.update(line.encode())
        self.last_events.append(line)

    def _violated(self, invariant: str, what: str) -> None:
        raise InvariantViolation(invariant, f"at {self.now:.3f} s of {self.scenario}: {what}", self.last_events)

    def _require(self, holds: bool, invariant: str, what: str) -> None:
        if not holds:
            self._violated(invariant, what)

    def _latency(self) -> float:
        """Of a message between processes."""
        return self.dice.uniform(0.00005, 0.002)

    def _work(self) -> float:
        """Of a replica's own work, now and then with a stall."""
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
            self._after(scenario.fault_s, self._break, self.processes[scenario.fault_replica])
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
        first_token = dice.choice([0, 100])  # half of the prompts begin alike
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

    def _hear(self, process: _Process, updates: Sequence[RequestUpdate]) -> None:
        """News reach the client."""
        if process.loses_news:
            return
        for update in updates:
            known = self.requests[update.request_id]
            self._require(known.end is None, "I3", f"request {update.request_id} has news after its end: {update}")
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
            self._require(begun, "I3", f"request {request_id} was told {known.token_ids}; it must begin like {tokens}")
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
        """The client sees that a process is gone, and that no more news will come from it."""
        self._log(f"client: {process.rank} is gone")
        self.client_has_stopped = True
        for known in self.requests.values():
            if known.rank == process.rank and known.end is None:
                self._end(known, "error")

    # Faults

    def _break(self, process: _Process) -> None:
        if process.state != "alive":
            return
        self._log(f"{process.rank}: fault {self.scenario.fault}")
        process.has_fault = True
        if self.scenario.fault == "kill" and self.dice.random() < 0.5:  # otherwise in its next step
            process.has_fault = False
            self.fault_at = self.now
            self._kill(process)

    def _kill(self, process: _Process) -> None:
        process.loses_news = self.dice.random() < 0.5
        self._die(process)

    def _die(self, process: _Process) -> None:
        process.state = "dead"
        process.turn += 1
        process.generator.close()
        # Or later, if news from it are still on their way.
        self._after(max(0.0, process.last_news_s - self.now) + self._latency(), self._notice_exit, process)
        self._after(self.dice.uniform(0.0, DETECTION_S), self._notice_death)

    def _notice_death(self) -> None:
        """The watcher ends the worker group: collectives fail, or processes are killed."""
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
        process.was_told_fatal = True
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
        """Several may be on their way to one effect; the first counts."""
        self._after(delay_s, self._answer, process, process.turn, answer)

    def _answer(self, process: _Process, turn: int, answer: Callable[[_Process], Any]) -> None:
        if process.turn != turn or process.state != "alive":
            return
        fails = self.scenario.fault == "books" and process.has_fault and isinstance(process.effect, (Receive, Deliver))
        if fails:
            process.has_fault = False
            process.failed_step = -1  # to be known at its next gather
            self._advance(process, error=SimulatedFault("the books do not balance"))
        else:
            self._advance(process, answer(process))

    def _advance(self, process: _Process, answer: Any = None, error: Exception | None = None) -> None:
        """Hands the answer to the replica, and starts what it wants next."""
        process.turn += 1
        process.effect = None
        try:
            effect = process.generator.send(answer) if error is None else process.generator.throw(error)
        except StopIteration:
            self._leave(process)
            return
        except Exception as failure:
            self._fall(process, failure)
            return
        books_changed = isinstance(effect, (Deliver, Gather))
        if books_changed and not process.was_told_fatal and self.failed_step is None:
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
        """It returned: only an agreed shutdown is a reason."""
        self._log(f"{process.rank}: left")
        process.state = "left"
        self.leave_counts[process.rank] = process.num_collectives
        counts = set(self.leave_counts.values())
        others = [other.rank for other in self.processes if other.num_collectives > process.num_collectives]
        self._require(len(counts) == 1, "I1", f"replicas left after different rounds: {self.leave_counts}")
        self._require(not others, "I1", f"replica {process.rank} left, and {others} wait for it")
        self._require(
            not process.was_told_fatal, "I7", f"replica {process.rank} met a fault, and left as if all were well"
        )
        self._check_all_told(process)
        all_free = process.scheduler.num_free_blocks == process.num_blocks
        self._require(all_free, "I4", f"replica {process.rank} left with blocks in use")

    def _fall(self, process: _Process, failure: Exception) -> None:
        """It ended by an error."""
        self._log(f"{process.rank}: fell: {type(failure).__name__}")
        could_not_tell = process.failed_step == -1 and self.shutdown_is_agreed  # there was no further round
        expected = process.was_told_fatal or self.failed_step is not None or could_not_tell
        self._require(expected, "crash", f"replica {process.rank} ended by {type(failure).__name__}: {failure}")
        self._check_all_told(process)
        self._die(process)

    def _check_all_told(self, process: _Process) -> None:
        untold = list(process.received.keys() - process.ended.keys())
        self._require(not untold, "I3", f"replica {process.rank} ended without a word of {sorted(untold)}")

    # Effects

    def _begin_deliver(self, process: _Process, effect: Deliver) -> None:
        for update in effect.updates:
            known = update.request_id in process.received and update.request_id not in process.ended
            self._require(known, "I3", f"replica {process.rank} tells of a request that it does not have: {update}")
            if update.finish_reason is not None:
                process.ended[update.request_id] = None
        stats, num_live = effect.stats, len(process.received) - len(process.ended)
        if not process.was_told_fatal and self.failed_step is None:
            if stats.num_running + stats.num_waiting != num_live:
                self._violated("I4", f"replica {process.rank} has {num_live} requests, and says {stats}")
            if num_live == 0 and stats.num_free_blocks != process.num_blocks:
                self._violated("I4", f"replica {process.rank} holds blocks without requests: {stats}")
        process.last_news_s = max(process.last_news_s, self.now + self._latency())
        self._after(process.last_news_s - self.now, self._hear, process, effect.updates)
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
        if self._strikes(process, 1 / 3):
            return
        self._after(self._work(), self._enter_if, process, process.turn, "dispatch")

    def _enter_if(self, process: _Process, turn: int, kind: str) -> None:
        if process.turn == turn and process.state == "alive":
            assert isinstance(process.effect, Execute)
            self._enter(process, kind, process.effect.agreement)

    def _strikes(self, process: _Process, probability: float) -> bool:
        """Whether a fault comes at this point of a forward pass."""
        strikes = process.has_fault and self.scenario.fault != "books" and self.dice.random() < probability
        if strikes:
            process.has_fault = False
            self.fault_at = self.now
            if self.scenario.fault == "kill":
                self._kill(process)
            else:
                self._throw_fatal(process, SimulatedFault("in a forward pass"))
        return strikes

    def _require_going_on(self, process: _Process, does: str) -> None:
        self._require(not process.was_told_fatal, "I7", f"replica {process.rank} {does} after an error in a collective")

    # Collectives

    def _enter(self, process: _Process, kind: str, payload: Any) -> None:
        """A replica enters its next collective, and waits there for all others."""
        number = process.num_collectives
        process.num_collectives += 1
        process.is_inside = True
        if self.leave_counts:
            self._violated("I1", f"replica {process.rank} enters {kind}, but {sorted(self.leave_counts)} have left")
        meeting = self.collectives.get(number)
        if meeting is None:
            meeting = self.collectives[number] = _Collective(kind)
            self._after(self._slack(), self._watch, number)
        first = next(iter(meeting.payloads), process.rank)
        if meeting.kind != kind:
            self._violated("I1", f"collective {number}: {process.rank} enters {kind}, and {first} {meeting.kind}")
        if kind != "gather" and meeting.payloads and payload != meeting.payloads[first]:
            what = f"collective {number}: {process.rank} enters {kind} for {payload}"
            self._violated("I1", f"{what}, and {first} for {meeting.payloads[first]}")
        meeting.payloads[process.rank] = payload
        if self.worker_group_is_broken:
            self._after(self._latency(), self._fail_collective, process, process.turn)
        elif len(meeting.payloads) == self.scenario.num_replicas:
            del self.collectives[number]
            self._complete(meeting)

    def _slack(self) -> float:
        """The longest that a collective may stay open while all are alive: the slowest of all may stall all along."""
        stalls = 8 * MAX_STALL_S if self.scenario.stall_probability else 0.0
        return 2 * HEARTBEAT_S + stalls + (MAX_LATE_S if self.scenario.num_late else 0.0)

    def _watch(self, number: int) -> None:
        meeting = self.collectives.get(number)
        if meeting is None or self.fault_at is not None:
            return
        missing = {p.rank: p.effect for p in self.processes if p.rank not in meeting.payloads}
        self._violated("deadlock", f"collective {number}, a {meeting.kind}, waits for {missing}")

    def _complete(self, meeting: _Collective) -> None:
        self._log(f"{meeting.kind} is complete")
        if meeting.kind == "gather":
            rows = [meeting.payloads[rank] for rank in range(self.scenario.num_replicas)]
            self._count_round(rows)
        for process in self.processes:
            if process.state != "alive":  # died inside
                continue
            delay_s = self.dice.uniform(0.0001, 0.002)
            if meeting.kind == "gather":
                self._answer_later(process, delay_s, lambda process: self._outside(process, rows))
            elif meeting.kind == "dispatch":
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
        """The experts, between dispatch and combine."""
        if process.turn == turn and process.state == "alive" and not self._strikes(process, 0.5):
            self._enter_if(process, turn, "combine")

    def _finish_step(self, process: _Process, turn: int) -> None:
        if process.turn != turn or process.state != "alive" or self._strikes(process, 1.0):
            return
        assert isinstance(process.effect, Execute)
        plan = process.effect.plan
        if plan is not None and self.dice.random() < self.scenario.local_failure_probability:
            self._log(f"{process.rank}: the result is of no use")
            self._answer(process, turn, lambda process: self._outside(process, StepFailed("not a number")))
        else:
            result = None if plan is None else _result_of(plan)
            self._answer(process, turn, lambda process: self._outside(process, result))

    def _closing_report(self) -> Report:
        unfinished = {p.rank: p.effect for p in self.processes if p.state in ("starting", "alive")}
        self._require(not unfinished, "deadlock", f"nothing happens any more, and these wait: {unfinished}")
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
    """What a model would give."""
    specs = [chunk.sample for chunk in plan.chunks]
    tokens = [None if spec is None else sampled_token(spec.seed, spec.position) for spec in specs]
    return StepResult(step=plan.step, chunks=[ChunkResult(token_id=token) for token in tokens])
