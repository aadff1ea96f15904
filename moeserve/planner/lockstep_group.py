"""Replicas that run in lockstep in one process: the real `Replica`, `Lockstep` and `Scheduler`, no model, no clock.

Only replicas with work are driven. One without work gives the same row in every round but for the number of the step,
runs nothing and tells nothing new, so it may as well be left asleep in its `Receive` and be answered for by that row.
When a message comes, it is told the number of the step and goes on from there. The rows are complete in every round,
and what they mean is computed by `agree`, once for all: it is a function of the rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeserve.protocol import AbortRequest, AddRequest, ReplicaMessage, StepPlan, StepResult
from moeserve.scheduling.lockstep import Agreement, Intent, Lockstep, agree
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica
from moeserve.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class Turn:
    """What all replicas have agreed on, and what those that have something to run are about to run."""

    agreement: Agreement
    plans: Mapping[int, StepPlan]  # by replica


class LockstepGroup:
    """Replicas from round to round: `send` messages, `begin`, run what it says, `finish`, and so on.

    A replica comes to be when it is driven first: those that never get a request take no memory.
    """

    def __init__(
        self, num_replicas: int, make_scheduler: Callable[[], Scheduler], *, drives_sleepers: bool = False
    ) -> None:
        """
        Args:
            drives_sleepers: drive every replica in every round, and let each find its own agreement: the same, slower.
        """
        self.num_replicas = num_replicas
        self.step = 0  # rounds
        self._make_scheduler = make_scheduler
        self._drives_sleepers = drives_sleepers
        self._members: dict[int, _Member] = {}
        self._awake: list[_Member] = []  # in order of rank
        self._woken: set[int] = set()  # those to drive from the next round on
        nothing = Intent(num_tokens=0, is_decode_only=True)
        self._rows_of_sleepers = [
            Lockstep(rank=rank, num_replicas=num_replicas).begin(nothing) for rank in range(num_replicas)
        ]
        self._agreement: Agreement | None = None
        if drives_sleepers:
            self._woken.update(range(num_replicas))

    @property
    def num_preemptions(self) -> int:
        return sum(member.scheduler.num_preemptions for member in self._members.values())

    def num_free_blocks(self, rank: int) -> int:
        """Of a replica that has been driven."""
        return self._members[rank].scheduler.num_free_blocks

    def send(self, rank: int, message: AddRequest | AbortRequest) -> None:
        """It is received in the next round. Other messages would change what a replica says without having work."""
        self._member(rank).inbox.append(message)
        self._woken.add(rank)

    def begin(self) -> Turn:
        """Replicas take in their messages, plan and agree. With an agreement to be idle there are no plans."""
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
                member.told = effect  # all agreed to idle
        self.step += 1
        return Turn(agreement, plans)

    def finish(self, results: Mapping[int, StepResult]) -> list[tuple[int, Deliver]]:
        """What replicas that were driven have to tell, by rank. Those without work are driven no more.

        Args:
            results: of the plans, by replica.
        """
        deliveries = []
        still_awake = []
        for member in self._awake:
            told, member.told = member.told, None
            if told is None:
                told = member.generator.send(results.get(member.rank))
            assert isinstance(told, Deliver), told
            deliveries.append((member.rank, told))
            receive = member.generator.send(None)
            assert isinstance(receive, Receive), receive
            if member.scheduler.has_work or self._drives_sleepers:
                still_awake.append(member)
            else:
                member.is_awake = False
        self._awake = still_awake
        return deliveries

    def _wake(self) -> None:
        if not self._woken:
            return
        for rank in self._woken:
            member = self._member(rank)
            if not member.is_awake:
                member.is_awake = True
                member.lockstep.step = self.step  # it slept through the others
                self._awake.append(member)
        self._woken.clear()
        self._awake.sort(key=lambda member: member.rank)

    def _rows(self) -> list[list[int]]:
        step = self.step
        for row in self._rows_of_sleepers:
            row[_STEP] = step
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
            if self._drives_sleepers:
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

    def agreement_of(self, step: int) -> Agreement:
        """That of the round at hand."""
        assert self._agreement is not None
        assert self._agreement.step == step, (self._agreement.step, step)
        return self._agreement


_STEP = 1  # where a row has the number of the step


class _SharedLockstep(Lockstep):
    """Takes the agreement that was computed for all."""

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
    told: Effect | None = None  # where there was nothing to run
