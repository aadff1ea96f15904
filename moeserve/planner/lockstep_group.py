"""Replicas that run in lockstep in one process, with the real `Replica`, `Lockstep` and `Scheduler`, without a model.

Only replicas with work are driven. A replica without work contributes the same row in every round, except for the step
number, and delivers nothing. It stays asleep in its `Receive`, and a prepared row stands for it. `agree` is a function
of the rows alone, so it is computed once for all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeserve.protocol import AddRequest, ReplicaMessage, StepPlan, StepResult
from moeserve.scheduling.lockstep import Agreement, Intent, Lockstep, agree
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica
from moeserve.scheduling.scheduler import Scheduler

_STEP = 1  # index of the step number in a row


@dataclass(frozen=True)
class Round:
    """The agreement of all replicas, and the plans of those that have one."""

    agreement: Agreement
    plans: Mapping[int, StepPlan]  # by replica


class LockstepGroup:
    """Drives replicas round by round: `send` messages, `begin`, run the plans, `finish`.

    A replica is created when it is first driven, so those that never get a request take no memory.
    """

    def __init__(self, num_replicas: int, make_scheduler: Callable[[], Scheduler], *, drives_all: bool = False) -> None:
        """
        Args:
            drives_all: drive every replica in every round, and let each compute its own agreement. The results are
                the same; tests compare them.
        """
        self.num_replicas = num_replicas
        self.step = 0  # number of rounds
        self._make_scheduler = make_scheduler
        self._drives_all = drives_all
        self._members: dict[int, _Member] = {}
        self._awake: list[_Member] = []  # in order of rank
        self._woken: set[int] = set(range(num_replicas)) if drives_all else set()  # driven from the next round on
        nothing = Intent(num_tokens=0, is_decode_only=True)
        self._rows_of_sleepers = [
            Lockstep(rank=rank, num_replicas=num_replicas).begin(nothing) for rank in range(num_replicas)
        ]
        self._agreement: Agreement | None = None

    @property
    def num_preemptions(self) -> int:
        return sum(member.scheduler.num_preemptions for member in self._members.values())

    def num_free_blocks(self, rank: int) -> int:
        """Return the number of free blocks of a replica that has run a round."""
        return self._members[rank].scheduler.num_free_blocks

    def send(self, rank: int, request: AddRequest) -> None:
        """Send a request to a replica, which receives it in the next round."""
        self._member(rank).inbox.append(request)
        self._woken.add(rank)

    def begin(self) -> Round:
        """Begin a round: replicas receive messages, plan and agree. After an idle agreement there are no plans."""
        self._wake()
        rows = self._rows()
        agreement = agree(rows, step=self.step, num_replicas=self.num_replicas)
        self._agreement = agreement
        plans = {}
        for member in self._awake:
            effect = member.generator.send(rows)
            if isinstance(effect, Execute):
                assert effect.agreement is agreement or effect.agreement == agreement, (effect, agreement)
                if effect.plan is not None:
                    plans[member.rank] = effect.plan
            else:
                member.delivery = effect  # all agreed to idle
        self.step += 1
        return Round(agreement, plans)

    def finish(self, results: Mapping[int, StepResult]) -> list[tuple[int, Deliver]]:
        """End the round, and return the rank and the delivery of each replica that took part.

        Args:
            results: the results of the plans, by replica.
        """
        deliveries = []
        still_awake = []
        for member in self._awake:
            delivery, member.delivery = member.delivery, None
            if delivery is None:
                delivery = member.generator.send(results.get(member.rank))
            assert isinstance(delivery, Deliver), delivery
            deliveries.append((member.rank, delivery))
            receive = member.generator.send(None)
            assert isinstance(receive, Receive), receive
            if member.scheduler.has_work or self._drives_all:
                still_awake.append(member)
            else:
                member.is_awake = False
        self._awake = still_awake
        return deliveries

    def agreement_of(self, step: int) -> Agreement:
        """Return the agreement of the current round."""
        assert self._agreement is not None
        assert self._agreement.step == step, (self._agreement.step, step)
        return self._agreement

    def _wake(self) -> None:
        if not self._woken:
            return
        for rank in self._woken:
            member = self._member(rank)
            if not member.is_awake:
                member.is_awake = True
                member.lockstep.step = self.step  # it slept through the rounds before
                self._awake.append(member)
        self._woken.clear()
        self._awake.sort(key=lambda member: member.rank)

    def _rows(self) -> list[list[int]]:
        for row in self._rows_of_sleepers:
            row[_STEP] = self.step
        rows = self._rows_of_sleepers.copy()
        for member in self._awake:
            inbox, member.inbox = member.inbox, []
            gather = member.generator.send(inbox)
            assert isinstance(gather, Gather), gather
            rows[member.rank] = gather.row
        return rows

    def _member(self, rank: int) -> _Member:
        if rank not in self._members:
            scheduler = self._make_scheduler()
            if self._drives_all:
                lockstep = Lockstep(rank=rank, num_replicas=self.num_replicas)
            else:
                lockstep = _SharedLockstep(rank, self)
            generator = Replica(scheduler=scheduler, lockstep=lockstep).run()
            first = next(generator)
            assert isinstance(first, Deliver), first
            receive = generator.send(None)
            assert isinstance(receive, Receive), receive
            self._members[rank] = _Member(rank, scheduler, lockstep, generator)
        return self._members[rank]


class _SharedLockstep(Lockstep):
    """Uses the agreement that the group computed once for all replicas."""

    def __init__(self, rank: int, group: LockstepGroup) -> None:
        super().__init__(rank=rank, num_replicas=group.num_replicas)
        self._group = group

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        agreement = self._group.agreement_of(self.step)
        self.step += 1
        return agreement


@dataclass(eq=False)
class _Member:
    """A replica, asleep in `Receive` between rounds."""

    rank: int
    scheduler: Scheduler
    lockstep: Lockstep
    generator: Generator[Effect, Any, None]
    inbox: list[ReplicaMessage] = field(default_factory=list)
    is_awake: bool = False
    delivery: Effect | None = None  # after an idle round
