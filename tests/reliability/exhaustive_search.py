"""Every interleaving of a few replicas over a few rounds, with at most one fault, without time.

The simulator draws one history at random; this search visits all of them. Whatever can happen next happens, in every
order. So a stall, a late start and a slow message are not faults but orders among others.

How it stays small. Ranks run rounds in order and agree by a function of the rows, so a round has ended once every
replica has sent it, and its result follows from what was sent. What remains is when each replica receives messages and
results. A generator cannot be copied, but the same answers always lead to the same state. So the answers so far
identify the state of a replica (`Local`), and each such history is played once. The state of the worker group is one
`Local` per replica and the fault so far. Each state is expanded once.

Faults, at most one: `internal` (an error in a replica's own code), `row` (a request's logits are unusable), `step` (a
step fails on the only rank), `drop` (a wake-up is lost). Deaths are left to the simulator: then all processes are
ended, and the client ends the requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moeserve.controls import Control, EndRequests, FinishUpdate, Outcome, Pause, StartUpdate
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    ChunkResult,
    CollectLoad,
    Delivery,
    ReplicaMessage,
    Shutdown,
    StepPlan,
    StepResult,
    Wake,
)
from moeserve.scheduling.lockstep import CONTROL, HAS_FAILED, REQUESTS_LOAD, Agreement, Round, RoundResult, agree
from moeserve.scheduling.replica import Events, Replica, Submit, Wait
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.worker.request_table import RequestTable

MakeReplica = Callable[..., Replica]
Agree = Callable[..., Agreement]
Script = Sequence[Sequence[ReplicaMessage]]  # per replica, the messages on their way to it, in order
Row = tuple[int, ...]

MAX_SEQS, BLOCK_SIZE, MAX_MODEL_LEN = 2, 4, 16


class Found(AssertionError):
    """An invariant can be violated."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Answer(NamedTuple):
    """The answer to a `Wait` of a replica."""

    messages: tuple[int, ...]  # places in its script
    results: tuple[Agreement, ...]
    fault: str | None = None  # "internal": its own code fails from now on; "row", "step": the first result has an error


HEARTBEAT = Answer((), ())


@dataclass(eq=False)
class Local:
    """One replica after a history of answers."""

    history: tuple[Answer, ...]
    wait: Wait | None  # None: it has ended
    rows: tuple[Row, ...]  # of the rounds that it has sent
    num_results: int  # received,
    num_steps: int  # of these, steps with tokens
    num_messages: int  # of its script, received or lost
    has_plan: tuple[bool, ...]  # of each round
    next: dict[Answer, Local] = field(default_factory=dict)


class State(NamedTuple):
    """The whole worker group."""

    locals: tuple[Local, ...]
    fault: tuple[Any, ...] | None  # kind, replica, and for a lost message its place


@dataclass(frozen=True)
class Explored:
    num_states: int
    num_ends: int  # states in which every replica has ended
    most_steps: int  # with tokens that were run on the way to a state
    faults: dict[str, int]  # states by the fault so far


def explore(
    script: Script,
    make_replica: MakeReplica,
    agree_as: Agree | None = None,
    *,
    max_sent: int,
    max_rounds: int = 2,
    plans_ahead: bool = True,
) -> Explored:
    """Visit every state.

    Args:
        agree_as: the agreement as the ranks of a replica compute it; None: as the engine does.
        max_sent: most rounds that a replica sends before the search stops following it.
        max_rounds: in flight.

    Raises:
        Found: an invariant can be violated.
    """
    search = _Search(script, make_replica, max_sent, max_rounds, plans_ahead)
    search.agree_as = agree_as or _agree
    return search.run()


def _agree(rows: list[list[int]], *, number: int, num_replicas: int, index: int) -> Agreement:
    return agree(rows, number=number, num_replicas=num_replicas)


class _Search:
    agree_as: Agree

    def __init__(
        self, script: Script, make_replica: MakeReplica, max_sent: int, max_rounds: int, plans_ahead: bool
    ) -> None:
        self.script = [tuple(messages) for messages in script]
        self.num_replicas = len(script)
        self.make_replica = make_replica
        self.max_sent = max_sent
        self.max_rounds = max_rounds
        self.plans_ahead = plans_ahead
        self.agreed: dict[tuple[Row, ...], Agreement] = {}

    def run(self) -> Explored:
        start = State(tuple(self.play(index, ()) for index in range(self.num_replicas)), None)
        seen, stack = {start}, [start]
        num_ends = most_steps = 0
        faults: Counter[str] = Counter()
        while stack:
            state = stack.pop()
            faults["none" if state.fault is None else state.fault[0]] += 1
            most_steps = max(most_steps, max(local.num_steps for local in state.locals))
            is_stuck = True
            for successor in self.successors(state):
                is_stuck = False
                if successor not in seen:
                    seen.add(successor)
                    stack.append(successor)
            if is_stuck:
                num_ends += self.check_end(state)
        return Explored(len(seen), num_ends, most_steps, dict(sorted(faults.items())))

    def play(self, index: int, history: tuple[Answer, ...]) -> Local:
        """Play a history from its beginning."""
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=4,
                block_size=BLOCK_SIZE,
                max_num_seqs=MAX_SEQS,
                max_num_batched_tokens=4,
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=False,
                plans_ahead=self.plans_ahead,
            ),
            b"explored",
        )
        replica = self.make_replica(scheduler, index=index, num_replicas=self.num_replicas, max_rounds=self.max_rounds)
        return _Player(index, scheduler, self.script[index], self.max_rounds).play(replica, history)

    # The worker group

    def agreements(self, state: State) -> list[Agreement]:
        """Return the agreements of the rounds that all replicas have sent, up to one that ends them all."""
        found: list[Agreement] = []
        for number in range(min(len(local.rows) for local in state.locals)):
            rows = tuple(local.rows[number] for local in state.locals)
            if rows not in self.agreed:
                self.agreed[rows] = self.agree(rows, number)
            found.append(self.agreed[rows])
            if found[-1].ends_all:
                break
        return found

    def agree(self, rows: tuple[Row, ...], number: int) -> Agreement:
        """Return what the ranks of all replicas agree on, and check that it is the same and may be run."""
        first, *others = [
            self.agree_as([list(row) for row in rows], number=number, num_replicas=self.num_replicas, index=index)
            for index in range(self.num_replicas)
        ]
        if any(other != first for other in others):
            raise Found("I1", f"the ranks agree on {first} and {others}")
        if any(row[-1] & HAS_FAILED for row in rows) and not first.ends_all:
            raise Found("I7", f"a step is run in a round in which a replica failed: {rows}")
        if not first.is_idle and not any(first.num_tokens) and not first.collects_load and not first.control:
            raise Found("I5", "a step of nothing but padding")
        return first

    def successors(self, state: State) -> Iterator[State]:
        agreements = self.agreements(state)
        for index, local in enumerate(state.locals):
            if local.wait is None or len(local.rows) > self.max_sent:
                continue
            results = agreements[local.num_results :]
            places = [place for place in range(len(self.script[index])) if place >= local.num_messages]
            if state.fault is not None and state.fault[:2] == ("drop", index):
                places = [place for place in places if place != state.fault[2]]
            for num_messages in range(len(places) + 1):
                for num_results in range(len(results) + 1):
                    answer = Answer(tuple(places[:num_messages]), tuple(results[:num_results]))
                    if not num_messages and not num_results and not local.wait.heartbeat:
                        continue
                    yield self.moved(state, index, answer)
                    if state.fault is None:
                        yield from self.with_fault(state, index, local, answer)
            if state.fault is None:
                for place in places:
                    if isinstance(self.script[index][place], Wake):
                        yield State(state.locals, ("drop", index, place))

    def with_fault(self, state: State, index: int, local: Local, answer: Answer) -> Iterator[State]:
        yield self.moved(state, index, answer._replace(fault="internal"), ("internal", index))
        first = local.num_results
        if any(local.has_plan[first : first + len(answer.results)]):
            yield self.moved(state, index, answer._replace(fault="row"), ("row", index))
            if self.num_replicas == 1:
                yield self.moved(state, index, answer._replace(fault="step"), ("step", index))

    def moved(self, state: State, index: int, answer: Answer, fault: tuple[Any, ...] | None = None) -> State:
        local = state.locals[index]
        if answer not in local.next:
            local.next[answer] = self.play(index, (*local.history, answer))
        return State((*state.locals[:index], local.next[answer], *state.locals[index + 1 :]), state.fault or fault)

    def check_end(self, state: State) -> bool:
        """Return True for a final state, False for one at the bounds of the search. Raise Found for others."""
        waiting = {index: local.wait for index, local in enumerate(state.locals) if local.wait is not None}
        if not waiting:
            return True
        if any(len(local.rows) > self.max_sent for local in state.locals):
            return False
        raise Found("deadlock", f"no move is left, and these wait: {waiting}; fault: {state.fault}")


class _Player:
    """Plays a history of one replica, and checks the invariants of a single replica on the way."""

    def __init__(self, index: int, scheduler: Scheduler, script: tuple[ReplicaMessage, ...], max_rounds: int) -> None:
        self.name = f"replica {index}"
        self.scheduler = scheduler
        self.script = script
        self.max_rounds = max_rounds
        self.table = RequestTable(MAX_SEQS, MAX_MODEL_LEN // BLOCK_SIZE)
        self.rows: list[Row] = []
        self.plans: list[StepPlan | None] = []
        self.num_results = self.num_messages = self.num_steps = 0
        self.received: dict[str, int] = {}  # requests, and the tokens that they may have
        self.ended: dict[str, None] = {}
        self.num_tokens: Counter[str] = Counter()  # delivered, by request
        self.may_abort: set[str] = set()  # requests
        self.may_fail: set[str] = set()
        self.num_loads_due = 0  # expert loads that were asked for, and not requested in a round
        self.controls: dict[int, Control] = {}  # received, by number
        self.before_control: dict[int, set[str]] = {}  # requests that it had when it received each
        self.num_controls = 0  # that its ranks have run
        self.ended_controls: list[int] = []  # delivered
        self.is_paused = False
        self.has_fault = self.is_ending = False

    def play(self, replica: Replica, history: tuple[Answer, ...]) -> Local:
        generator = replica.run()
        remaining = iter(history)
        given: Answer | None = None  # the answer to the last wait
        answer: Events | None = None
        num_rows_before = 0
        while True:
            try:
                effect = generator.send(answer)
            except StopIteration:
                self.check_scheduler()
                if unended := self.unended():
                    raise Found("I3", f"{self.name} ended without ending {sorted(unended)}") from None
                return self.local(history, None)
            except AssertionError as error:
                raise Found("I4", f"{self.name}: {error}") from error
            except Exception as error:
                if not any(agreement.failed_ranks for agreement in (given.results if given else ())):
                    raise Found("crash", f"{self.name}: {type(error).__name__}: {error}") from error
                return self.local(history, None)
            answer = None
            self.check_scheduler()
            match effect:
                case Submit(work=work):
                    self.submit(work, given)
                case Delivery():
                    self.deliver(effect)
                case Wait():
                    if given == HEARTBEAT and len(self.rows) == num_rows_before:
                        raise Found("deadlock", f"{self.name} goes back to sleep after a heartbeat")
                    num_rows_before = len(self.rows)
                    given = next(remaining, None)
                    if given is None:
                        return self.local(history, effect)
                    answer = self.events(given)

    def submit(self, work: Round, given: Answer | None) -> None:
        row = tuple(work.row)
        if self.rows and row[1] != self.rows[-1][1] + 1:
            raise Found("I6", f"{self.name}: round {row[1]} after {self.rows[-1][1]}")
        if row[3] != (0 if work.plan is None else work.plan.num_tokens):
            raise Found("I5", f"{self.name} announces {row[3]} tokens, and plans {work.plan}")
        if row[-1] & HAS_FAILED and not self.has_fault:
            raise Found("crash", f"{self.name} failed without a fault")
        follows_control = any(earlier[CONTROL] for earlier in self.rows[self.num_results :])
        if follows_control or (row[3] and (row[CONTROL] or self.is_paused)):
            raise Found("I8", f"{self.name} sends {row} although it announces a control or is paused")
        is_needless = given is not None and not given.messages and not row[3] and not row[CONTROL] and not row[-1]
        if is_needless and given and given.results and not any(each.has_requests for each in given.results):
            raise Found("idle", f"{self.name} goes on without sleeping, with nothing to do")
        self.num_loads_due -= bool(row[-1] & REQUESTS_LOAD)
        if self.num_loads_due < 0 and not self.has_fault:
            raise Found("idle", f"{self.name} requests expert loads again")
        self.rows.append(row)
        self.plans.append(work.plan)
        if len(self.rows) - self.num_results > self.max_rounds:
            raise Found("I2", f"{self.name} has {len(self.rows) - self.num_results} rounds in flight")

    def deliver(self, effect: Delivery) -> None:
        self.ended_controls += [result.number for result in effect.controls]
        if not self.has_fault and self.ended_controls != list(range(1, self.num_controls + 1)):
            raise Found("I8", f"{self.name} delivers the controls {self.ended_controls}; {self.num_controls} have run")
        for update in effect.updates:
            if update.request_id not in self.received or update.request_id in self.ended:
                raise Found("I3", f"{self.name} delivers an update of an unknown request: {update}")
            self.num_tokens[update.request_id] += len(update.token_ids)
            if update.finish_reason is not None:
                self.ended[update.request_id] = None
            may = self.may_abort if update.error is None else self.may_fail
            if update.finish_reason == "abort" and update.request_id not in may:
                raise Found("I3", f"{self.name} ends a request without a cause: {update}")
            expected = self.received[update.request_id]
            if update.finish_reason == "length" and self.num_tokens[update.request_id] != expected:
                raise Found("I3", f"{self.name} delivers {self.num_tokens} tokens; {update} is the last of {expected}")
        num_live = len(self.unended())
        if not self.has_fault and effect.stats.num_running + effect.stats.num_waiting != num_live:
            raise Found("I4", f"{self.name} has {num_live} requests, and says {effect.stats}")

    def events(self, given: Answer) -> Events:
        messages = [self.script[place] for place in given.messages]
        self.num_messages = max([self.num_messages, *(place + 1 for place in given.messages)])
        for message in messages:
            self.num_loads_due += isinstance(message, CollectLoad)
            if isinstance(message, AddRequest):
                self.received[message.request.request_id] = message.request.params.max_tokens or 0
                if not message.request.prompt_token_ids or self.is_ending:
                    self.may_fail.add(message.request.request_id)
            elif isinstance(message, Control):
                self.controls[message.number] = message
                self.before_control[message.number] = self.received.keys() - self.ended.keys()
                command = message.command
                if isinstance(command, EndRequests) or (isinstance(command, Pause) and command.mode == "abort"):
                    self.may_abort |= self.received.keys()
            elif isinstance(message, AbortRequest):
                self.may_abort.add(message.request_id)
            elif isinstance(message, Shutdown):
                self.is_ending = True
                self.may_abort |= self.received.keys()
        results = []
        for agreement in given.results:
            plan = self.plans[self.num_results]
            self.num_results += 1
            self.num_steps += any(agreement.num_tokens)
            if agreement.control:
                self.run_control(agreement.control)
            results.append(self.result(agreement, plan, given.fault))
        if given.fault == "internal":
            self.has_fault = True
            self.scheduler.schedule = self.scheduler.commit = _fail  # type: ignore[method-assign]
        return Events(messages, results)

    def run_control(self, number: int) -> None:
        """Note that the ranks have run a control, of which each runs once and in order, and what it waits for."""
        if number != self.num_controls + 1:
            raise Found("I8", f"{self.name} runs control {number} after {self.num_controls}")
        self.num_controls = number
        command = self.controls[number].command
        self.is_paused = isinstance(command, Pause | StartUpdate)
        must_wait = isinstance(command, Pause) and command.mode == "wait"
        if must_wait and not self.has_fault and (left := self.unended() & self.before_control[number]):
            raise Found("I8", f"{self.name} pauses before {sorted(left)} have ended")

    def result(self, agreement: Agreement, plan: StepPlan | None, fault: str | None) -> RoundResult:
        """Return what the ranks of the replica send for a round."""
        if agreement.is_idle or agreement.ends_all:
            return RoundResult(agreement=agreement)
        command = self.controls[agreement.control].command if agreement.control else None
        if isinstance(command, StartUpdate | FinishUpdate):
            is_open = isinstance(command, StartUpdate)
            return RoundResult(agreement=agreement, outcome=Outcome(is_open=is_open, is_whole=not is_open))
        if plan is None:
            return RoundResult(agreement=agreement, result=StepResult(step=0, chunks=[]))
        chunks = self.table.apply(plan)
        results = [ChunkResult(token_ids=[7]) if chunk.samples else ChunkResult() for chunk in chunks]
        if self.scheduler.config.plans_ahead:
            self.table.append_tokens(chunks, [7] * sum(chunk.samples for chunk in chunks))
        ids = [chr(chunk.request.seed) for chunk in chunks]
        if fault == "step":
            self.may_fail.update(ids)
            return RoundResult(agreement=agreement, result=StepResult(step=plan.step, chunks=[]), error="out of memory")
        if fault == "row":
            self.may_fail.add(ids[0])
            results[0] = ChunkResult(error="not a number")
        return RoundResult(agreement=agreement, result=StepResult(step=plan.step, chunks=results))

    def unended(self) -> set[str]:
        return self.received.keys() - self.ended.keys()

    def check_scheduler(self) -> None:
        if not self.has_fault:
            try:
                self.scheduler.check_invariants()
            except AssertionError as error:
                raise Found("I4", f"{self.name}: {error}") from error

    def local(self, history: tuple[Answer, ...], wait: Wait | None) -> Local:
        return Local(
            history=history,
            wait=wait,
            rows=tuple(self.rows),
            num_results=self.num_results,
            num_steps=self.num_steps,
            num_messages=self.num_messages,
            has_plan=tuple(plan is not None for plan in self.plans),
        )


def _fail(*_: Any) -> Any:
    raise RuntimeError("internal error")
