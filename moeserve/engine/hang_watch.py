"""`HangWatch`: finds ranks that are stopped or hang, from their progress records over time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from moeserve.processes.failures import FailureReport
from moeserve.processes.progress_records import Phase, ProgressRecord

# Seconds between two looks at the records. A longer pause of the reader counts as twice this time.
SECONDS_BETWEEN_LOOKS = 0.25

Verdict = Literal["stopped", "hung", "host lost", "broken link"]


@dataclass(frozen=True, kw_only=True)
class HangRule:
    """The rule by which a process counts as stopped, hung or lost. Times are in seconds."""

    stopped: float = 4.0  # seconds without a heartbeat after which a process counts as stopped
    host_lost: float = 6.0  # seconds without a record from any process of a host after which the host counts as lost
    # A rank hangs if others wait for it and it makes no progress for `factor` times the longest pause in its last
    # `num_rounds` rounds, but at least `least_hung`, and at most `most_hung`, which also holds for a new rank.
    least_hung: float = 3.0
    most_hung: float = 8.0
    factor: float = 20.0
    num_rounds: int = 1000
    num_new_rounds: int = 100
    between_looks: float = SECONDS_BETWEEN_LOOKS
    # Time between two records of a running process. Records of other hosts arrive less often than they are looked at.
    between_records: float = 0.0


# The rule for processes that send their records.
RULE_OF_HOSTS = HangRule(between_looks=0.5, between_records=1.0)


@dataclass(frozen=True)
class Watchable:
    """A process with a progress record."""

    name: str
    host: int = 0
    engine: int | None = None  # for a rank, index of the process that sends it rounds; None: this is such a process


@dataclass(frozen=True)
class Finding:
    """A verdict, and the processes that caused it."""

    verdict: Verdict
    guilty: tuple[int, ...]  # indices of processes
    report: FailureReport


@dataclass
class _Watched:
    """One process as seen so far. Times are seconds during which both the reader and the process ran."""

    record: ProgressRecord | None = None
    unseen: float = 0.0  # seconds without a record
    still: float = 0.0  # seconds without a heartbeat
    stalled: float = 0.0  # seconds without progress
    silent: float = 0.0  # seconds without progress, and without a look for the data of other ranks
    # (round, seconds) of long pauses, the longest first
    pauses: deque[tuple[int, float]] = field(default_factory=deque)
    first_round: int | None = None  # first round since the epoch began

    def see(self, record: ProgressRecord | None, seconds: float, rule: HangRule) -> None:
        before, self.record = self.record, record or self.record
        if record is None:
            self.unseen += seconds
            return
        self.unseen = 0.0
        if before is None or record.epoch != before.epoch or not record.heartbeat:
            self.still = self.stalled = self.silent = 0.0
            self.first_round = record.round
            self.pauses.clear()
            return
        if record.heartbeat == before.heartbeat:
            self.still += seconds
            return
        seconds += min(self.still, rule.between_records)
        self.still = 0.0
        has_begun = record.phase != before.phase and not {record.phase, before.phase} <= {
            Phase.COMPUTING,
            Phase.WAITING,
        }
        if record.counters != before.counters or has_begun:
            self._note_pause(record.round, rule)
            self.stalled = self.silent = 0.0
        else:
            self.stalled += seconds
            self.silent = 0.0 if record.num_looks != before.num_looks else self.silent + seconds

    def hung_after(self, rule: HangRule) -> float:
        """Return the seconds without progress after which this rank hangs."""
        assert self.record is not None
        assert self.first_round is not None
        if self.record.round - self.first_round < rule.num_new_rounds:
            return rule.most_hung
        longest = self.pauses[0][1] if self.pauses else 0.0
        return min(rule.most_hung, max(rule.least_hung, rule.factor * longest))

    def _note_pause(self, number: int, rule: HangRule) -> None:
        while self.pauses and self.pauses[0][0] < number - rule.num_rounds:
            self.pauses.popleft()
        if self.silent * rule.factor > rule.least_hung:  # a wait for other ranks is no pause
            while self.pauses and self.pauses[-1][1] <= self.silent:
                self.pauses.pop()
            self.pauses.append((number, self.silent))


class HangWatch:
    """Judges the progress records of all processes of a worker group.

    A process whose heartbeat does not change is stopped. A rank hangs if it makes no progress while others wait for it.
    Layers, collectives, kernels and reads from disks count as progress, so slow ranks do not hang. Times in which the
    reader or all processes were stopped do not count.
    """

    def __init__(
        self, processes: Sequence[Watchable], rule: HangRule | None = None, *, judges_hangs: bool = True
    ) -> None:
        """
        Args:
            judges_hangs: False if ranks compute on devices whose progress the records do not show.
        """
        self.processes = list(processes)
        self._rule = rule or HangRule()
        self._judges_hangs = judges_hangs
        self._watched = [_Watched() for _ in processes]
        self._last_s: float | None = None

    def is_due(self, now_s: float) -> bool:
        """True if the last look was long enough ago for another look."""
        return self._last_s is None or now_s - self._last_s >= self._rule.between_looks

    def look(self, now_s: float, records: Sequence[ProgressRecord | None]) -> Finding | None:
        """Return what the records show together with the records of earlier calls; None if nothing is wrong.

        Args:
            now_s: a monotonic time.
            records: the record of each process; None: it could not be read. Processes that have ended are not judged
                here.
        """
        rule, last_s = self._rule, self._last_s
        self._last_s = now_s
        if last_s is None:
            for each, record in zip(self._watched, records, strict=True):
                each.see(record, 0.0, rule)
            return None
        seconds = min(now_s - last_s, 2 * rule.between_looks)
        if all(record == each.record for each, record in zip(self._watched, records, strict=True)):
            return None  # all heartbeats stand: the machine was suspended, or all its cores are taken
        for each, record in zip(self._watched, records, strict=True):
            each.see(record, seconds, rule)
        return self._lost_host() or self._stopped() or self._hung() or self._idle() or self._broken_link()

    def _lost_host(self) -> Finding | None:
        for host in sorted({process.host for process in self.processes}):
            members = [index for index, process in enumerate(self.processes) if process.host == host]
            if all(self._watched[index].unseen >= self._rule.host_lost for index in members):
                cause = f"no sign of life from any process of its host for {self._rule.host_lost:g} s"
                return self._finding("host lost", members, cause)
        return None

    def _stopped(self) -> Finding | None:
        stopped = [index for index, each in enumerate(self._watched) if each.still >= self._rule.stopped]
        if not stopped:
            return None
        cause = f"stopped: no heartbeat for {self._rule.stopped:g} s (SIGSTOP, a debugger, or a host without memory)"
        return self._finding("stopped", stopped, cause)

    def _hung(self) -> Finding | None:
        found = [index for index in self._ranks(Phase.COMPUTING, Phase.WAITING) if self._hangs(index)]
        if not found:
            return None
        index = min(found, key=lambda index: self._position(index))
        record, seconds = self._record(index), self._watched[index].silent
        layer = f", layer {record.layer - 1}" if record.layer else ""
        cause = (
            f"hangs: no progress for {seconds:.1f} s in round {record.round}{layer}, after {record.num_collectives} "
            "collectives, while other ranks wait for it"
        )
        return self._finding("hung", [index], cause)

    def _hangs(self, index: int) -> bool:
        limit = self._watched[index].hung_after(self._rule)
        return self._watched[index].silent >= limit and any(
            self._watched[other].stalled >= limit for other in self._waiting() if other != index
        )

    def _idle(self) -> Finding | None:
        """Find a replica whose engine sends its ranks no round, although other replicas wait for it."""
        limit = self._rule.most_hung
        idle = [index for index in self._ranks(Phase.IDLE) if self._watched[index].stalled >= limit]
        if not idle or not any(self._watched[other].stalled >= limit for other in self._waiting()):
            return None
        engine = self.processes[min(idle, key=self._position)].engine
        assert engine is not None
        return self._finding("hung", [engine], f"hangs: it has sent no round for {limit:g} s, and other ranks wait")

    def _broken_link(self) -> Finding | None:
        ranks = [index for index, process in enumerate(self.processes) if process.engine is not None]
        waiting, limit = self._waiting(), self._rule.most_hung
        if len(ranks) < 2 or waiting != ranks or min(self._watched[index].stalled for index in ranks) < limit:
            return None
        cause = f"all ranks have waited for each other for {limit:g} s, so data was lost between them"
        return self._finding("broken link", waiting, cause)

    def _waiting(self) -> list[int]:
        """Return the indices of ranks that wait for other ranks, without ranks that are stuck in their wait."""
        return [
            index
            for index in self._ranks(Phase.WAITING, Phase.BLOCKED)
            if self._record(index).phase == Phase.BLOCKED or self._watched[index].silent < self._rule.least_hung
        ]

    def _ranks(self, *phases: Phase) -> list[int]:
        if not self._judges_hangs:
            return []
        return [
            index
            for index, (process, each) in enumerate(zip(self.processes, self._watched, strict=True))
            if process.engine is not None and each.record is not None and each.record.phase in phases
        ]

    def _record(self, index: int) -> ProgressRecord:
        record = self._watched[index].record
        assert record is not None
        return record

    def _position(self, index: int) -> tuple[int, int]:
        record = self._record(index)
        return record.round, record.num_collectives

    def _finding(self, verdict: Verdict, guilty: Sequence[int], cause: str) -> Finding:
        names = ", ".join(self.processes[index].name for index in guilty)
        return Finding(verdict, tuple(guilty), FailureReport(name=names, cause=cause))


class Records(Protocol):
    """The progress records of several processes, wherever these run."""

    def read(self) -> Sequence[ProgressRecord | None]:
        """Return the present record of each process; None: the process's host has sent no record for a while."""
        ...


class RecordWatch:
    """A `HangWatch` with the records that it judges."""

    def __init__(self, watch: HangWatch, records: Records, places: Sequence[int]) -> None:
        """
        Args:
            places: the index of each process's record.
        """
        self._watch, self._records, self._places = watch, records, places

    def look(self) -> Finding | None:
        """Judge the present records, unless that was done a moment ago."""
        now_s = time.monotonic()
        return self._watch.look(now_s, self._read()) if self._watch.is_due(now_s) else None

    def _read(self) -> list[ProgressRecord | None]:
        records = self._records.read()
        return [records[place] for place in self._places]

    def late_ranks(self, epoch: int) -> Finding | None:
        """Return a finding that names the ranks that have not begun an epoch yet as hung; None if all have begun it."""
        processes = self._watch.processes
        records = zip(processes, self._read(), strict=True)
        late = [
            index
            for index, (each, record) in enumerate(records)
            if each.engine is not None and (record is None or record.epoch != epoch)
        ]
        names, cause = ", ".join(processes[index].name for index in late), "hangs: it does not answer"
        return Finding("hung", tuple(late), FailureReport(name=names, cause=cause)) if late else None
