"""Every interleaving of a few replicas over a few rounds, with at most one fault, without time.

The simulator draws one history at random; this search visits all of them. Whatever can happen next happens, in every
order. So a stall, a late start and a slow message are not faults but orders among others.

How it stays small. Ranks run rounds in order and agree by a function of the rows, so a round has ended once every
replica has sent it, and its outcome follows from what was sent. What remains is when each replica receives messages and
outcomes. A generator cannot be copied, but the same answers always lead to the same state. So the answers so far
identify the state of a replica (`Local`), and each such history is played once. The state of the worker group is one
`Local` per replica and the fault so far. Each state is expanded once.

Faults, at most one: `internal` (an error in a replica's own code), `row` (a request's logits are unusable), `drop` (a
wake-up is lost). Deaths are left to the simulator: then all processes are ended, and the client ends the requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moeserve.protocol import AddRequest, ChunkResult, ReplicaMessage, StepPlan, StepResult, Wake
from moeserve.scheduling.lockstep import HAS_FAILED, Agreement, Outcome, agree
from moeserve.scheduling.replica import Deliver, Events, Replica, Submit, Wait
from moeserve.scheduling.scheduler import Scheduler, SchedulerConfig
from moeserve.worker.request_table import RequestTable

MakeReplica = Callable[..., Replica]
Script = Sequence[Sequence[ReplicaMessage]]  # per replica, the messages on their way to it, in order
Row = tuple[int, ...]

MAX_SEQS, BLOCK_SIZE, MAX_MODEL_LEN = 2, 4, 16


class Found(AssertionError):
    """An invariant can be violated."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Answer(NamedTuple):
    """What a replica gets from a `Wait`."""

    messages: tuple[int, ...]  # places in its script
    outcomes: tuple[Agreement, ...]
    fault: str | None = None  # "internal": its own code fails from now on; "row": the first of the results has an error


@dataclass(eq=False)
class Local:
    """One replica after a history of answers."""

    history: tuple[Answer, ...]
    wait: Wait | None  # None: it has ended
    rows: tuple[Row, ...]  # of the rounds that it has sent
    num_outcomes: int  # received
    num_messages: int  # of its script, received or lost
    unended: frozenset[str]  # requests it received and whose end it has not delivered
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
    faults: dict[str, int]  # states by the fault so far


def explore(
    script: Script, make_replica: MakeReplica, *, max_sent: int, max_rounds: int = 2, plans_ahead: bool = True
) -> Explored:
    """Visit every state.

    Args:
        max_sent: most rounds that a replica sends before the search stops following it.
        max_rounds: in flight.

    Raises:
        Found: an invariant can be violated.
    """
    return _Search(script, make_replica, max_sent, max_rounds, plans_ahead).run()


class _Search:
    def __init__(
        self, script: Script, make_replica: MakeReplica, max_sent: int, max_rounds: int, plans_ahead: bool
    ) -> None:
        self.script = [tuple(messages) for messages in script]
        self.num_replicas = len(script)
        self.make_replica = make_replica
        self.max_sent = max_sent
        self.max_rounds = max_rounds
        self.plans_ahead = plans_ahead

    def run(self) -> Explored:
        start = State(tuple(self.play(index, ()) for index in range(self.num_replicas)), None)
        seen, stack = {start}, [start]
        num_ends = 0
        faults: Counter[str] = Counter()
        while stack:
            state = stack.pop()
            faults["none" if state.fault is None else state.fault[0]] += 1
            is_stuck = True
            for successor in self.successors(state):
                is_stuck = False
                if successor not in seen:
                    seen.add(successor)
                    stack.append(successor)
            if is_stuck:
                num_ends += self.check_end(state)
        return Explored(len(seen), num_ends, dict(sorted(faults.items())))

    # One replica

    def play(self, index: int, history: tuple[Answer, ...]) -> Local:
        """Play a history from its beginning, and check the invariants of a single replica."""
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
        table = RequestTable(MAX_SEQS, MAX_MODEL_LEN // BLOCK_SIZE)
        generator = replica.run()
        rows: list[Row] = []
        plans: list[StepPlan | None] = []
        received: dict[str, None] = {}
        ended: dict[str, None] = {}
        num_outcomes = num_messages = 0
        has_fault = has_ended = False
        answer: Events | None = None
        given: Answer | None = None
        wait: Wait | None = None
        remaining = iter(history)
        while True:
            try:
                effect = generator.send(answer)
            except StopIteration:
                has_ended = True
            except AssertionError as error:
                raise Found("I4", f"replica {index}: {error}") from error
            except Exception as error:
                if not any(agreement.failed_ranks for agreement in (given.outcomes if given else ())):
                    raise Found("crash", f"replica {index}: {type(error).__name__}: {error}") from error
                return Local(history, None, tuple(rows), num_outcomes, num_messages, frozenset(), ())
            answer = None
            if not has_fault:
                try:
                    scheduler.check_invariants()
                except AssertionError as error:
                    raise Found("I4", f"replica {index}: {error}") from error
            if has_ended:
                wait = None
                break
            match effect:
                case Submit(work=work):
                    row = tuple(work.row)
                    if rows and row[1] != rows[-1][1] + 1:
                        raise Found("I6", f"replica {index}: round {row[1]} after {rows[-1][1]}")
                    if row[3] != (0 if work.plan is None else work.plan.num_tokens):
                        raise Found("I5", f"replica {index} announces {row[3]} tokens, and plans {work.plan}")
                    if row[6] & HAS_FAILED and not has_fault:
                        raise Found("crash", f"replica {index} failed without a fault")
                    is_needless = given is not None and not given.messages and not row[3] and not row[6]
                    if is_needless and given and given.outcomes and all(each.is_idle for each in given.outcomes):
                        raise Found("idle", f"replica {index} goes on without sleeping, with nothing to do")
                    rows.append(row)
                    plans.append(work.plan)
                    if len(rows) - num_outcomes > self.max_rounds:
                        raise Found("I2", f"replica {index} has {len(rows) - num_outcomes} rounds in flight")
                case Deliver(updates=updates, stats=stats):
                    for update in updates:
                        if update.request_id not in received or update.request_id in ended:
                            raise Found("I3", f"replica {index} delivers an update of an unknown request: {update}")
                        if update.finish_reason is not None:
                            ended[update.request_id] = None
                    num_live = len(received) - len(ended)
                    if not has_fault and stats.num_running + stats.num_waiting != num_live:
                        raise Found("I4", f"replica {index} has {num_live} requests, and says {stats}")
                case Wait():
                    wait = effect
                    given = next(remaining, None)
                    if given is None:
                        break
                    messages = [self.script[index][place] for place in given.messages]
                    num_messages = max([num_messages, *(place + 1 for place in given.messages)])
                    received.update({m.request.request_id: None for m in messages if isinstance(m, AddRequest)})
                    outcomes = []
                    for agreement in given.outcomes:
                        plan = plans[num_outcomes]
                        num_outcomes += 1
                        outcomes.append(_outcome(agreement, plan, table, row_fails=given.fault == "row"))
                    if given.fault == "internal":
                        has_fault = True
                        scheduler.schedule = scheduler.commit = _fail  # type: ignore[method-assign]
                    answer = Events(messages, outcomes)
        if has_ended and received.keys() - ended.keys():
            raise Found("I3", f"replica {index} ended without ending {sorted(received.keys() - ended.keys())}")
        return Local(
            history,
            wait,
            tuple(rows),
            num_outcomes,
            num_messages,
            frozenset(received.keys() - ended.keys()),
            tuple(plan is not None for plan in plans),
        )

    # The worker group

    def agreements(self, state: State) -> list[Agreement]:
        """Return the agreements of the rounds that all replicas have sent, up to one that ends them all."""
        found: list[Agreement] = []
        for number in range(min(len(local.rows) for local in state.locals)):
            rows = [list(local.rows[number]) for local in state.locals]
            found.append(agree(rows, number=number, num_replicas=self.num_replicas))
            if found[-1].ends_all:
                break
        return found

    def successors(self, state: State) -> Iterator[State]:
        agreements = self.agreements(state)
        for index, local in enumerate(state.locals):
            if local.wait is None or len(local.rows) > self.max_sent:
                continue
            outcomes = agreements[local.num_outcomes :]
            places = [place for place in range(len(self.script[index])) if place >= local.num_messages]
            if state.fault is not None and state.fault[:2] == ("drop", index):
                places = [place for place in places if place != state.fault[2]]
            for num_messages in range(len(places) + 1):
                for num_outcomes in range(len(outcomes) + 1):
                    answer = Answer(tuple(places[:num_messages]), tuple(outcomes[:num_outcomes]))
                    if not num_messages and not num_outcomes and not local.wait.heartbeat:
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
        first = local.num_outcomes
        if any(local.has_plan[first : first + len(answer.outcomes)]):
            yield self.moved(state, index, answer._replace(fault="row"), ("row", index))

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


def _fail(*_: Any) -> Any:
    raise RuntimeError("internal error")


def _outcome(agreement: Agreement, plan: StepPlan | None, table: RequestTable, *, row_fails: bool) -> Outcome:
    """Return what the ranks of a replica send for a round."""
    if agreement.is_idle or agreement.ends_all:
        return Outcome(agreement=agreement)
    if plan is None:
        return Outcome(agreement=agreement, result=StepResult(step=0, chunks=[]))
    chunks = table.apply(plan)
    results = [ChunkResult(token_id=7) if chunk.samples else ChunkResult() for chunk in chunks]
    table.append_tokens(chunks, [7] * sum(chunk.samples for chunk in chunks))
    if row_fails:
        results[0] = ChunkResult(error="not a number")
    return Outcome(agreement=agreement, result=StepResult(step=plan.step, chunks=results))
