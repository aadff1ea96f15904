"""Every interleaving of a few replicas over a few steps, with at most one fault, without time.

The simulator draws one history at random; this search visits all of them. Whatever can happen next happens, in every
order. So a stall, a late start and a slow message are not faults but orders among others.

How it stays small. A generator cannot be copied, but the same answers always lead to the same state. So the answers so
far identify the state of a replica (`Local`), and each such history is played once. The state of the worker group is
one `Local` per replica, the number of messages each has read, and the fault so far. Each state is expanded once.

Faults, at most one: `kill` (any replica, anywhere, having reached the others in its collective or not), `raise` (in a
forward pass, before or after the others were reached), `local` (an unusable result), `internal` (an error outside of
collectives), `drop` (a wake-up is lost). After a kill or a raise the collectives of all others may fail at any time, as
the watcher causes. It may also kill the others; this needs no further move, because a killed replica does nothing more.
The requests of a killed replica are ended by their client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moeserve.protocol import AddRequest, ChunkResult, ReplicaMessage, StepPlan, StepResult, Wake
from moeserve.scheduling.lockstep import HAS_FAILED, REQUESTS_LOAD, REQUESTS_SHUTDOWN
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica, StepFailed
from moeserve.scheduling.scheduler import Scheduler, SchedulerConfig

MakeReplica = Callable[[int, int, Scheduler], Replica]
Script = Sequence[Sequence[ReplicaMessage]]  # per replica, the messages on their way to it, in order


class Found(AssertionError):
    """An invariant can be violated."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Thrown(Exception):
    """The error that is thrown into a replica. Errors of the same place are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thrown) and self.args == other.args

    def __hash__(self) -> int:
        return hash(self.args)


@dataclass(eq=False)
class Local:
    """One replica after a history of answers."""

    history: tuple[Any, ...]
    effect: Effect | None  # None: it has ended
    collectives: tuple[Any, ...]  # entered so far, this one too if the effect is one
    num_rounds: int
    num_steps: int
    unended: frozenset[str]  # requests it received and whose end it has not delivered
    fell: bool = False
    next: dict[Any, Local] = field(default_factory=dict)


class State(NamedTuple):
    """The whole worker group."""

    locals: tuple[Local, ...]
    num_read: tuple[int, ...]  # messages, by replica
    fault: tuple[Any, ...] | None  # kind, replica, collectives in which it reached the others


@dataclass(frozen=True)
class Explored:
    num_states: int
    num_transitions: int
    num_histories: int  # of single replicas
    num_ends: int  # states in which every process has ended
    faults: dict[str, int]  # states by the fault so far


def explore(
    script: Script, make_replica: MakeReplica, *, max_steps: int, max_idle_rounds: int, is_reduced: bool
) -> Explored:
    """Visit every state.

    Args:
        max_steps: most steps that are executed; idle rounds are bounded on their own.
        is_reduced: after the fault, the moves of replicas outside of collectives are visited in one order only. They
            touch no other replica and cannot be taken away, so every end is reached all the same.

    Raises:
        Found: an invariant can be violated.
    """
    return _Search(script, make_replica, max_steps, max_idle_rounds, is_reduced).run()


class _Search:
    def __init__(
        self, script: Script, make_replica: MakeReplica, max_steps: int, max_idle_rounds: int, is_reduced: bool
    ) -> None:
        self.script = [tuple(messages) for messages in script]
        self.num_replicas = len(script)
        self.make_replica = make_replica
        self.max_steps = max_steps
        self.max_idle_rounds = max_idle_rounds
        self.is_reduced = is_reduced
        self.num_histories = 0
        self.graves: dict[Any, Local] = {}

    def run(self) -> Explored:
        ranks = range(self.num_replicas)
        start = State(tuple(self.run_history(rank, ()) for rank in ranks), (0,) * self.num_replicas, None)
        seen, stack = {start}, [start]
        num_transitions = num_ends = 0
        faults: Counter[str] = Counter()
        while stack:
            state = stack.pop()
            faults["none" if state.fault is None else state.fault[0]] += 1
            is_stuck = True
            for successor in self.successors(state):
                num_transitions += 1
                is_stuck = False
                if successor not in seen:
                    seen.add(successor)
                    stack.append(successor)
            if is_stuck:
                num_ends += self.check_end(state)
        return Explored(len(seen), num_transitions, self.num_histories, num_ends, dict(sorted(faults.items())))

    # One replica

    def run_history(self, rank: int, history: tuple[Any, ...]) -> Local:
        """Run a history from its beginning, and check the invariants of a single replica."""
        self.num_histories += 1
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=4,
                block_size=4,
                max_num_seqs=2,
                max_num_batched_tokens=4,
                max_model_len=16,
                enable_prefix_caching=False,
            ),
            b"explored",
        )
        generator = self.make_replica(rank, self.num_replicas, scheduler).run()
        collectives: list[Any] = []
        received: dict[str, None] = {}
        ended: dict[str, None] = {}
        last_rows: tuple[tuple[int, ...], ...] = ()
        num_rounds = num_steps = num_receives = 0
        effect, fell, failed_step, is_fatal = None, False, None, False
        try:
            effect = next(generator)
            for position in range(len(history) + 1):
                match effect:
                    case Gather(row):
                        if failed_step == -1:
                            failed_step = row[1]
                        elif row[6] & HAS_FAILED:
                            raise Found("crash", f"replica {rank} failed without a fault")
                        last = [entry[1][1] for entry in collectives if entry[0] == "gather"]
                        if last and row[1] <= last[-1]:
                            raise Found("I6", f"replica {rank}: step {row[1]} after {last[-1]}")
                        collectives.append(("gather", tuple(row)))
                        num_rounds += 1
                        num_receives = 0
                    case Execute(plan, agreement):
                        collectives.append(("execute", agreement))
                        num_steps += 1
                        num_tokens = 0 if plan is None else sum(len(chunk.token_ids) for chunk in plan.chunks)
                        is_padding_alone = not any(agreement.num_tokens) and not agreement.collects_load
                        if agreement.num_tokens[rank] != num_tokens or is_padding_alone:
                            raise Found("I5", f"replica {rank} runs {num_tokens} tokens, agreed: {agreement}")
                        if failed_step is not None and agreement.step >= failed_step:
                            raise Found("I7", f"replica {rank} runs step {agreement.step} after it has failed")
                    case Receive(block=block):
                        num_receives += 1
                        if num_receives > 3:
                            raise Found("livelock", f"replica {rank} receives repeatedly without an agreement")
                        agreed_idle = last_rows and not any(row[3] or row[6] & REQUESTS_LOAD for row in last_rows)
                        if agreed_idle and not block and failed_step is None:
                            raise Found("idle", f"replica {rank} goes on without sleeping, with nothing to do")
                    case Deliver(updates, stats):
                        for update in updates:
                            if update.request_id not in received or update.request_id in ended:
                                raise Found("I3", f"replica {rank} delivers an update of an unknown request: {update}")
                            if update.finish_reason is not None:
                                ended[update.request_id] = None
                        num_live = len(received) - len(ended)
                        is_ending = is_fatal or any(row[6] & HAS_FAILED for row in last_rows)
                        if not is_ending and failed_step is None and stats.num_running + stats.num_waiting != num_live:
                            raise Found("I4", f"replica {rank} has {num_live} requests, and says {stats}")
                if is_fatal and not isinstance(effect, Deliver):
                    raise Found("I7", f"replica {rank} goes on with {effect} after an error in a collective")
                scheduler.check_invariants()
                if position == len(history):
                    break
                answer = history[position]
                if isinstance(answer, Thrown):
                    if isinstance(effect, (Gather, Execute)):
                        is_fatal = True
                    else:
                        failed_step = -1
                    effect = generator.throw(answer)
                    continue
                if isinstance(effect, Receive):
                    answer = [self.script[rank][place] for place in answer]
                    received.update({m.request.request_id: None for m in answer if isinstance(m, AddRequest)})
                elif isinstance(effect, Gather):
                    last_rows = answer
                    answer = [list(row) for row in answer]
                elif isinstance(effect, Execute) and answer == "ran":
                    answer = None if effect.plan is None else _result_of(effect.plan)
                effect = generator.send(answer)
        except StopIteration:
            effect = None
        except Found:
            raise
        except Exception as error:
            last_flags = [row[6] for row in last_rows]
            was_leaving = failed_step == -1 and all(flags & REQUESTS_SHUTDOWN for flags in last_flags)
            if not (is_fatal or was_leaving or any(flags & HAS_FAILED for flags in last_flags)):
                raise Found("crash", f"replica {rank} ended by {type(error).__name__}: {error}") from error
            effect, fell = None, True
        finally:
            generator.close()
        return Local(
            history=history,
            effect=effect,
            collectives=tuple(collectives),
            num_rounds=num_rounds,
            num_steps=num_steps,
            unended=frozenset(received.keys() - ended.keys()),
            fell=fell,
        )

    def after(self, rank: int, local: Local, answer: Any) -> Local:
        child = local.next.get(answer)
        if child is None:
            child = local.next[answer] = self.run_history(rank, (*local.history, answer))
        return child

    # The worker group

    def successors(self, state: State) -> Iterator[State]:
        awake = [(rank, local) for rank, local in enumerate(state.locals) if local.effect is not None]
        if state.fault is not None and self.is_reduced:
            awake = [pair for pair in awake if isinstance(pair[1].effect, (Deliver, Receive))][:1] or awake
        for rank, local in awake:
            yield from self.moves(state, rank, local)
            if state.fault is None:
                yield from self.faults(state, rank, local)
            elif state.fault[0] in ("kill", "raise") and state.fault[1] != rank:
                yield from self.watcher(state, rank, local)

    def moves(self, state: State, rank: int, local: Local) -> Iterator[State]:
        """Yield the states after one replica's next move, without a new fault."""
        match local.effect:
            case Deliver():
                yield self.moved(state, rank, self.after(rank, local, None))
            case Receive(block=block, heartbeat=heartbeat):
                num_read = state.num_read[rank]
                waiting = self.places(state, rank)[num_read:]
                for count in range(len(waiting) + 1):
                    if count > 0 or not block or heartbeat:
                        successor = self.after(rank, local, waiting[:count])
                        yield self.moved(state, rank, successor, num_read=num_read + count)
            case Gather() | Execute():
                if not self.is_within_bounds(local) or not self.all_have_entered(state, len(local.collectives)):
                    return
                entered = [other.collectives[len(local.collectives) - 1] for other in state.locals]
                if isinstance(local.effect, Gather):
                    yield self.moved(state, rank, self.after(rank, local, tuple(row for _, row in entered)))
                else:
                    yield self.moved(state, rank, self.after(rank, local, "ran"))

    def places(self, state: State, rank: int) -> tuple[int, ...]:
        """Return the messages that reach a replica, as places in its script."""
        places = tuple(range(len(self.script[rank])))
        if state.fault is not None and state.fault[:2] == ("drop", rank):
            return places[: state.fault[2]] + places[state.fault[2] + 1 :]
        return places

    def is_within_bounds(self, local: Local) -> bool:
        num_idle_rounds = local.num_rounds - local.num_steps
        return local.num_steps <= self.max_steps and num_idle_rounds <= self.max_idle_rounds + isinstance(
            local.effect, Gather
        )

    def all_have_entered(self, state: State, number: int) -> bool:
        """True if every replica has reached the others in its collective of this number."""
        for rank, local in enumerate(state.locals):
            reached = len(local.collectives)
            if state.fault is not None and state.fault[0] in ("kill", "raise") and state.fault[1] == rank:
                reached = min(reached, state.fault[2])
            if reached < number:
                return False
        return True

    def moved(
        self,
        state: State,
        rank: int,
        local: Local,
        *,
        num_read: int | None = None,
        fault: tuple[Any, ...] | None = None,
    ) -> State:
        """Return the state after one replica's move. A collective that it entered must be that of the others."""
        locals_ = (*state.locals[:rank], local, *state.locals[rank + 1 :])
        num_entered = len(local.collectives)
        if num_entered > len(state.locals[rank].collectives) or local.effect is None:
            for other_rank, other in enumerate(state.locals):
                if other_rank != rank:
                    self.check_same(rank, local, other_rank, other)
        counts = state.num_read
        if num_read is not None:
            counts = (*counts[:rank], num_read, *counts[rank + 1 :])
        return State(locals_, counts, fault or state.fault)

    def check_same(self, rank: int, local: Local, other_rank: int, other: Local) -> None:
        """Check that two replicas enter equal collectives, and that neither waits for one that left."""
        num_entered = len(local.collectives)
        if 0 < num_entered <= len(other.collectives):
            mine, theirs = local.collectives[-1], other.collectives[num_entered - 1]
            if mine[0] != theirs[0] or (mine[0] == "execute" and mine != theirs):
                raise Found("I1", f"replica {rank} enters {mine}, replica {other_rank} {theirs}")
        for one, one_rank, many in ((local, rank, other), (other, other_rank, local)):
            if one.effect is None and not one.fell and len(many.collectives) > len(one.collectives):
                raise Found("I1", f"replica {one_rank} left, and another goes on")

    def killed(self, state: State, rank: int, collectives: tuple[Any, ...]) -> State:
        """Return the state after a kill. Only the collectives remain in which the replica reached the others."""
        grave = self.graves.get((rank, collectives))
        if grave is None:
            grave = Local((), None, collectives, num_rounds=0, num_steps=0, unended=frozenset(), fell=True)
            self.graves[rank, collectives] = grave
        locals_ = (*state.locals[:rank], grave, *state.locals[rank + 1 :])
        num_read = (*state.num_read[:rank], 0, *state.num_read[rank + 1 :])
        return State(locals_, num_read, ("kill", rank, len(collectives)))

    def faults(self, state: State, rank: int, local: Local) -> Iterator[State]:
        entered = len(local.collectives)
        is_inside = isinstance(local.effect, (Gather, Execute))
        for reached in {entered, entered - is_inside}:
            yield self.killed(state, rank, local.collectives[:reached])
            if isinstance(local.effect, Execute) and (reached < entered or self.all_have_entered(state, entered)):
                fault = ("raise", rank, reached)
                yield self.moved(state, rank, self.after(rank, local, Thrown("in a forward pass")), fault=fault)
        match local.effect:
            case Execute(plan=StepPlan()) if self.all_have_entered(state, entered):
                successor = self.after(rank, local, StepFailed("not a number"))
                yield self.moved(state, rank, successor, fault=("local", rank))
            case Receive() | Deliver():
                yield self.moved(
                    state, rank, self.after(rank, local, Thrown("internal error")), fault=("internal", rank)
                )
        for place, message in enumerate(self.script[rank]):
            if isinstance(message, Wake) and place >= state.num_read[rank]:
                yield State(state.locals, state.num_read, ("drop", rank, place))

    def watcher(self, state: State, rank: int, local: Local) -> Iterator[State]:
        """Yield the states after the watcher acts on a replica: its collective fails, or its sleep ends."""
        assert state.fault is not None
        match local.effect:
            case Gather() | Execute():
                yield self.moved(state, rank, self.after(rank, local, Thrown("another replica died")))
            case Receive(block=True):
                yield self.moved(state, rank, self.after(rank, local, ()))

    def check_end(self, state: State) -> bool:
        """Return True for a final state, False for one at the bounds of the search. Raise Found for others."""
        waiting = {}
        for rank, local in enumerate(state.locals):
            if local.effect is not None:
                if not self.is_within_bounds(local):
                    return False
                waiting[rank] = local.effect
            elif local.unended:
                raise Found("I3", f"replica {rank} ended without ending {sorted(local.unended)}")
        if waiting:
            raise Found("deadlock", f"no move is left, and these wait: {waiting}; fault: {state.fault}")
        return True


def _result_of(plan: StepPlan) -> StepResult:
    tokens = [None if chunk.sample is None else 7 for chunk in plan.chunks]
    return StepResult(step=plan.step, chunks=[ChunkResult(token_id=token) for token in tokens])
