"""Verdicts on progress records that are made up: every combination of what three ranks and their engines can do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from moeserve.engine.hang_watch import RULE_OF_HOSTS, Finding, HangRule, HangWatch, Watchable
from moeserve.processes.progress_records import Phase, ProgressRecord, ProgressRecords, attach

RULE = HangRule()
LOOK_S = RULE.between_looks
Behaviour = Callable[[int], ProgressRecord | None]  # the record at each look

STUCK = ProgressRecord(round=7, num_collectives=30)


def standing(phase: Phase, *, is_behind: bool = False, looks: bool = False) -> Behaviour:
    record = STUCK._replace(phase=phase, num_collectives=30 - is_behind)
    return lambda look: record._replace(heartbeat=look, num_looks=look if looks else 0)


BEHAVIOURS: dict[str, Behaviour] = {
    "computes": lambda look: STUCK._replace(heartbeat=look, phase=Phase.COMPUTING, num_kernels=look),
    "pages": lambda look: STUCK._replace(heartbeat=look, phase=Phase.COMPUTING, num_reads=look),
    "waits": standing(Phase.WAITING, looks=True),
    "is blocked": standing(Phase.BLOCKED),
    "loads": standing(Phase.LOADING),
    "updates": standing(Phase.UPDATING),
    "is idle": standing(Phase.IDLE),
    "loops": standing(Phase.COMPUTING, is_behind=True),
    "loops in a collective": standing(Phase.WAITING, is_behind=True),
    "is stopped": lambda look: STUCK._replace(phase=Phase.COMPUTING, heartbeat=min(look, 8)),
    "is lost": lambda look: None if look > 8 else STUCK._replace(heartbeat=look),
}
WAITS = {"waits", "is blocked"}
LOOPS = {"loops", "loops in a collective"}
NUM_RANKS = 3
ENGINES = [NUM_RANKS + rank for rank in range(NUM_RANKS)]
PROCESSES = [
    *(Watchable(f"rank {rank}", host=rank, engine=ENGINES[rank]) for rank in range(NUM_RANKS)),
    *(Watchable(f"engine {rank}", host=rank) for rank in range(NUM_RANKS)),
]


def watched(
    behaviours: Sequence[Behaviour], seconds: float, *, watch: HangWatch | None = None, first_look: int = 0
) -> tuple[float, Finding | None]:
    """Return the first finding, and the time until it."""
    watch = watch or HangWatch(PROCESSES)
    for look in range(first_look, first_look + int(seconds / LOOK_S) + 1):
        if (finding := watch.look(look * LOOK_S, [each(look) for each in behaviours])) is not None:
            return (look - first_look) * LOOK_S, finding
    return seconds, None


def expected(names: Sequence[str]) -> set[tuple[str, tuple[int, ...]]]:
    """Return every verdict that these behaviours allow; empty: nothing is wrong."""
    indices = {name: [rank for rank, each in enumerate(names) if each == name] for name in BEHAVIOURS}
    waiting = [rank for rank, name in enumerate(names) if name in WAITS]
    if indices["is stopped"]:
        return {("stopped", tuple(indices["is stopped"]))}
    if indices["is lost"]:  # the engine process on its host is lost too
        return {("host lost", (rank, ENGINES[rank])) for rank in indices["is lost"]}
    if waiting and (looping := [rank for rank, name in enumerate(names) if name in LOOPS]):
        return {("hung", (rank,)) for rank in looping}
    if waiting and indices["is idle"]:
        return {("hung", (ENGINES[rank],)) for rank in indices["is idle"]}
    if len(waiting) == NUM_RANKS:
        return {("broken link", (0, 1, 2))}
    return set()


def test_every_combination_has_the_verdict_that_follows() -> None:
    for names in itertools.product(BEHAVIOURS, repeat=NUM_RANKS):
        engines = [BEHAVIOURS["is lost" if name == "is lost" else "loads"] for name in names]
        seconds, finding = watched([*(BEHAVIOURS[name] for name in names), *engines], 30.0)
        found = set() if finding is None else {(finding.verdict, finding.guilty)}
        assert found <= expected(names), (names, finding)
        assert bool(found) == bool(expected(names)), (names, finding)
        if finding is not None:
            assert seconds <= 8 * LOOK_S + RULE.most_hung + 2 * LOOK_S
            assert all(PROCESSES[index].name in finding.report.name for index in finding.guilty)


@pytest.mark.parametrize("looks_between_records", [2, 3])
def test_records_that_arrive_less_often_than_looks_give_the_same_verdicts(looks_between_records: int) -> None:
    """As from other hosts. The records of different ranks arrive at different looks."""

    def seldom(behaviour: Behaviour, offset: int) -> Behaviour:
        return lambda look: behaviour((look + offset) // looks_between_records * looks_between_records)

    for names in itertools.product(BEHAVIOURS, repeat=NUM_RANKS):
        engines = [BEHAVIOURS["is lost" if name == "is lost" else "loads"] for name in names]
        behaviours = [
            seldom(each, index) for index, each in enumerate([*(BEHAVIOURS[name] for name in names), *engines])
        ]
        _, finding = watched(behaviours, 60.0, watch=HangWatch(PROCESSES, RULE_OF_HOSTS))
        assert (finding is None) == (not expected(names)), (names, finding)
        if finding is not None:  # of several that fail at once, one may be noticed first
            idle = {("hung", (ENGINES[rank],)) for rank, name in enumerate(names) if name == "is idle"}
            verdicts = [set(guilty) for verdict, guilty in expected(names) | idle if verdict == finding.verdict]
            assert any(set(finding.guilty) <= guilty for guilty in verdicts), (names, finding)


def play(behaviours: Sequence[str], engines: Sequence[Behaviour] | None = None) -> list[Behaviour]:
    return [*(BEHAVIOURS[name] for name in behaviours), *(engines or [BEHAVIOURS["loads"]] * NUM_RANKS)]


def test_pauses_that_are_shorter_than_the_rule_are_no_hangs() -> None:
    def pauses(look: int) -> ProgressRecord:  # advances once in 7.5 s, as with layers that take so long
        return STUCK._replace(heartbeat=look, phase=Phase.COMPUTING, num_kernels=look // 30)

    assert watched([pauses, *play(["waits"] * 3)[1:]], 120.0)[1] is None


def test_a_rank_that_was_always_fast_hangs_sooner() -> None:
    watch = HangWatch(PROCESSES)
    fast: list[Behaviour] = [lambda look: STUCK._replace(heartbeat=look, round=10 * look, phase=Phase.COMPUTING)] * 3
    assert watched([*fast, *play([])], 30.0, watch=watch)[1] is None
    last = int(30.0 / LOOK_S)

    def loops(look: int) -> ProgressRecord:
        return STUCK._replace(heartbeat=look, round=10 * last, phase=Phase.COMPUTING)

    def waits(look: int) -> ProgressRecord:
        return STUCK._replace(heartbeat=look, round=10 * last, phase=Phase.WAITING, num_looks=look)

    seconds, finding = watched([loops, waits, waits, *play([])], 30.0, watch=watch, first_look=last)
    assert finding is not None
    assert finding.verdict == "hung"
    assert finding.guilty == (0,)
    assert RULE.least_hung <= seconds <= RULE.least_hung + 2 * LOOK_S


def test_long_pauses_make_the_rule_patient_for_a_thousand_rounds() -> None:
    watch = HangWatch(PROCESSES)

    def rounds(look: int) -> ProgressRecord:  # one pause of 1 s
        return STUCK._replace(heartbeat=look, round=0 if look < 4 else 5 * look, phase=Phase.COMPUTING)

    assert watched([rounds] * 3 + play([]), 30.0, watch=watch)[1] is None
    stood = rounds(int(30.0 / LOOK_S))

    def loops(look: int) -> ProgressRecord:
        return stood._replace(heartbeat=look)

    def waits(look: int) -> ProgressRecord:
        return stood._replace(heartbeat=look, phase=Phase.BLOCKED)

    seconds, finding = watched([loops, waits, waits, *play([])], 30.0, watch=watch, first_look=120)
    assert finding is not None
    assert seconds >= RULE.most_hung


@pytest.mark.parametrize("stopped", ["the reader", "all processes"])
def test_times_in_which_the_reader_or_all_processes_stood_do_not_count(stopped: str) -> None:
    watch = HangWatch(PROCESSES)
    assert watched(play(["loops", "waits", "waits"]), 2.0, watch=watch)[1] is None
    if stopped == "the reader":
        assert watch.look(2.0 + 15.0, [each(100) for each in play(["loops", "waits", "waits"])]) is None
    else:
        frozen = [each(8) for each in play(["loops", "waits", "waits"])]
        assert all(watch.look(2.0 + LOOK_S * look, frozen) is None for look in range(1, 60))


def test_a_stop_of_two_seconds_is_no_failure_although_others_wait() -> None:
    def stops(look: int) -> ProgressRecord:
        return STUCK._replace(
            heartbeat=look if look < 8 else max(8, look - 8), phase=Phase.COMPUTING, num_kernels=max(0, look - 16)
        )

    assert watched([stops, *play(["waits"] * 3)[1:]], 30.0)[1] is None


def test_a_new_epoch_begins_without_a_past() -> None:
    watch = HangWatch(PROCESSES)
    assert watched(play(["loops", "waits", "waits"]), 7.0, watch=watch)[1] is None
    renewed: list[Behaviour] = [
        (lambda look, each=each: each(look)._replace(epoch=1)) for each in play(["loops", "waits", "waits"])
    ]
    seconds, finding = watched(renewed, 30.0, watch=watch, first_look=29)
    assert finding is not None
    assert seconds >= RULE.most_hung


def test_ranks_on_devices_are_watched_for_stops_only() -> None:
    watch = HangWatch(PROCESSES, judges_hangs=False)
    assert watched(play(["loops", "waits", "is idle"]), 30.0, watch=watch)[1] is None
    assert watched(play(["is stopped", "waits", "waits"]), 30.0, watch=HangWatch(PROCESSES, judges_hangs=False))[1]


def test_a_record_that_does_not_exist_is_refused() -> None:
    records = ProgressRecords(2)
    assert records.read() == [ProgressRecord()] * 2
    with pytest.raises(RuntimeError, match="no record 2"):
        attach(records.fd, 2)
    attach(None, 0)
    records.close()
    records.close()
