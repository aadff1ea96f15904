"""Replicas in lockstep in one process, with the real `Replica`, agreement and `Scheduler`, but without a model.

Only replicas with work are run. A replica without work sends the same row in every round, except for the round's
number, and delivers no updates. Its generator therefore stays suspended in its `Wait`, and a prepared row is used
in place of the one that it would send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moeserve import protocol
from moeserve.protocol import AddRequest, Delivery, ReplicaMessage, StepPlan, StepResult, TransferResult
from moeserve.scheduling.lockstep import Agreement, Intent, Round, RoundResult, agree, make_row
from moeserve.scheduling.replica import Effect, Events, Replica, Submit, Transfer
from moeserve.scheduling.scheduler import Scheduler

_NUMBER = 1  # index of the round's number in a row
_NOTHING = Intent(num_tokens=0, is_decode_only=True)  # intent of a replica without work


@dataclass(frozen=True)
class Step:
    """The agreement of all replicas in a round, and the plans of the replicas that have a plan."""

    agreement: Agreement
    plans: Mapping[int, StepPlan]  # by replica
    planned_after: int  # number of rounds that had ended when the last plan was sent; 0 without plans
    woken: Sequence[tuple[int, Delivery]] = ()  # replicas that resumed in this round, with their deliveries


class LockstepGroup:
    """Runs replicas round by round: `send` messages, `begin`, run the plans, `finish`.

    KV cache transfers run concurrently with rounds: call `take_transfers`, copy the blocks, call `end_transfer`.

    A replica is created when it is first run, so replicas that never receive a request take no memory.
    """

    def __init__(
        self,
        num_replicas: int,
        make_scheduler: Callable[[int], Scheduler],
        *,
        max_rounds: int = 2,
        drives_all: bool = False,
    ) -> None:
        """
        Args:
            make_scheduler: returns the scheduler of the replica with a given index.
            max_rounds: maximum number of rounds of each replica in flight.
            drives_all: run every replica in every round, for tests. The results must be the same.
        """
        self.num_replicas = num_replicas
        self.num_rounds = 0
        self._make_scheduler = make_scheduler
        self._max_rounds = max_rounds
        self._drives_all = drives_all
        self._members: dict[int, _Member] = {}
        self._awake: list[_Member] = []  # ordered by index
        self._woken: set[int] = set(range(num_replicas)) if drives_all else set()  # to run from the next round on
        self._rows_of_sleepers = [make_row(_NOTHING, number=0, replica=index) for index in range(num_replicas)]
        self._agreement: Agreement | None = None
        self._recent: deque[Agreement] = deque(maxlen=max_rounds)  # newest last
        self._new_transfers: list[tuple[int, protocol.Transfer]] = []

    @property
    def num_preemptions(self) -> int:
        return sum(member.scheduler.num_preemptions for member in self._members.values())

    def num_free_blocks(self, index: int) -> int:
        """Return the number of free blocks of a replica that has run at least one round."""
        return self._members[index].scheduler.num_free_blocks

    def send(self, index: int, request: AddRequest) -> None:
        """Send a request to a replica, which schedules it as soon as the replica may send another round."""
        self._member(index).inbox.append(request)
        self._woken.add(index)

    def take_transfers(self) -> list[tuple[int, protocol.Transfer]]:
        """Return the transfers that replicas have begun since the last call, each with the index of its replica."""
        begun = self._new_transfers.copy()
        self._new_transfers.clear()
        return begun

    def end_transfer(self, index: int, outcome: TransferResult) -> None:
        """Report the end of a transfer to its replica, which handles the report before it plans another round."""
        self._member(index).inbox.append(outcome)
        self._woken.add(index)

    def begin(self) -> Step:
        """Begin a round, in which all replicas agree on the oldest plans that they sent. An idle round has no plans."""
        woken = self._wake()
        for row in self._rows_of_sleepers:
            row[_NUMBER] = self.num_rounds
        rows = self._rows_of_sleepers.copy()
        plans = {}
        planned_after = 0
        for member in self._awake:
            if not member.rounds and self._drives_all:
                woken.append((member.index, member.handle([], self.num_rounds)))  # the replica resumes from its sleep
            if not member.rounds:  # the replica has no work
                continue
            first = member.rounds[0]
            rows[member.index] = first.work.row
            if not self._drives_all:  # the row was numbered before the replica was suspended
                rows[member.index][_NUMBER] = self.num_rounds
            if first.work.plan is not None:
                plans[member.index] = first.work.plan
                planned_after = max(planned_after, first.num_ended)
        self._agreement = agree(rows, number=self.num_rounds, num_replicas=self.num_replicas)
        self.num_rounds += 1
        return Step(self._agreement, plans, planned_after, woken)

    def finish(self, results: Mapping[int, StepResult], step_seconds: float = 0.0) -> list[tuple[int, Delivery]]:
        """End the round. Return the index and the delivery of each replica that took part.

        Args:
            results: the results of the plans, by replica.
            step_seconds: seconds of the step.
        """
        assert self._agreement is not None
        self._recent.append(self._agreement)
        deliveries = []
        still_awake = []
        for member in self._awake:
            outcomes = []
            if member.rounds:
                member.rounds.popleft()
                result = None if self._agreement.is_idle else results.get(member.index, StepResult(step=0, chunks=[]))
                outcomes.append(RoundResult(agreement=self._agreement, result=result, step_seconds=step_seconds))
            deliveries.append((member.index, member.handle(outcomes, self.num_rounds)))
            if member.scheduler.has_work or self._drives_all or member.announces_work:
                still_awake.append(member)
            else:
                member.sleep(self._agreement, self.num_rounds)
        self._awake = still_awake
        return deliveries

    def _wake(self) -> list[tuple[int, Delivery]]:
        woken = []
        for index in sorted(self._woken):
            member = self._member(index)
            if not member.is_awake:
                member.is_awake = True
                self._awake.append(member)
                if self.num_replicas > 1:  # a single replica never sends a round without a plan
                    member.catch_up(self._recent, self.num_rounds)
                woken.append((index, member.handle([], self.num_rounds)))
        if self._woken:
            self._woken.clear()
            self._awake.sort(key=lambda member: member.index)
        return woken

    def _member(self, index: int) -> _Member:
        if index not in self._members:
            scheduler = self._make_scheduler(index)
            replica = Replica(scheduler, index=index, num_replicas=self.num_replicas, max_rounds=self._max_rounds)
            self._members[index] = _Member(index, scheduler, replica.run(), self._new_transfers)
        return self._members[index]


@dataclass(frozen=True)
class _Sent:
    work: Round
    num_ended: int  # number of rounds that had ended when this round was sent


@dataclass(eq=False)
class _Member:
    """A replica that is suspended in its `Wait` between rounds."""

    index: int
    scheduler: Scheduler
    loop: Generator[Effect, Any, None]
    transfers: list[tuple[int, protocol.Transfer]]  # shared by all replicas, which append the transfers that they begin
    inbox: list[ReplicaMessage | TransferResult] = field(default_factory=list)
    rounds: deque[_Sent] = field(default_factory=deque)  # in flight
    num_ended: int = 0  # number of rounds that had ended when the replica was last run
    is_awake: bool = False
    has_started: bool = False

    @property
    def announces_work(self) -> bool:
        """True if a row in flight differs from the row of a replica without work."""
        sent = (each.work.row for each in self.rounds)
        return any(row != make_row(_NOTHING, number=row[_NUMBER], replica=self.index) for row in sent)

    def handle(self, outcomes: list[RoundResult], num_ended: int) -> Delivery:
        """Resume the replica with its messages and the outcomes of its rounds. Return its delivery.

        Args:
            outcomes: outcomes of the replica's rounds that have ended.
            num_ended: number of rounds that have ended.
        """
        self.num_ended = num_ended
        if not self.has_started:
            self.has_started = True
            self._run(None)
        inbox, self.inbox = self.inbox, []
        transfers = [each for each in inbox if isinstance(each, TransferResult)]
        messages = [each for each in inbox if not isinstance(each, TransferResult)]
        return self._run(Events(messages, outcomes, transfers))

    def catch_up(self, recent: Sequence[Agreement], num_ended: int) -> None:
        """Take part in the most recent rounds without a plan. New messages arrive with the outcome of the last round.

        Args:
            recent: agreements of the most recent rounds, at most as many as can be in flight.
        """
        inbox = self.inbox
        self.inbox = [] if recent else inbox
        for agreement in recent:
            if not self.rounds:
                self.handle([], num_ended)  # the replica resumes from its sleep
            if agreement is recent[-1]:
                self.inbox = inbox
            self.rounds.popleft()
            result = None if agreement.is_idle else StepResult(step=0, chunks=[])
            self.handle([RoundResult(agreement=agreement, result=result)], num_ended)

    def sleep(self, agreement: Agreement, num_ended: int) -> None:
        """Suspend the replica. Its rounds in flight, which have no plans, end as if all replicas had agreed to idle."""
        idle = RoundResult(agreement=replace(agreement, is_idle=True))
        rounds, self.rounds = len(self.rounds), deque()
        self.handle([idle] * rounds, num_ended)
        self.is_awake = False

    def _run(self, events: Events | None) -> Delivery:
        delivery: Delivery | None = None
        effect = self.loop.send(events)
        while True:
            match effect:
                case Submit(work=work):
                    self.rounds.append(_Sent(work, self.num_ended))
                case Transfer(work=transfer):
                    self.transfers.append((self.index, transfer))
                case Delivery():
                    assert delivery is None, "two deliveries without a wait between them"
                    delivery = effect
                case _:
                    assert delivery is not None
                    return delivery
            effect = self.loop.send(None)
