"""The helper that runs functions on ranks."""

from __future__ import annotations

import os
import time

from ranks import Place, Ranks


def describe(place: Place, word: str) -> list[object]:
    return [place.rank, place.num_ranks, word, os.getpid()]


def fail_on(place: Place, rank: int) -> int:
    if place.rank == rank:
        raise ValueError(f"rank {rank} was told to fail")
    return place.rank


def sleep(place: Place, seconds: float) -> None:
    time.sleep(seconds)


def test_each_rank_returns_its_value_and_lives_on(ranks: Ranks) -> None:
    first = ranks.run(2, "test_ranks:describe", word="grün")
    assert [values[:3] for values in first] == [[0, 2, "grün"], [1, 2, "grün"]]
    again = ranks.run(2, "test_ranks:describe", word="grün")
    assert first == again
    assert len({values[3] for values in first} | {os.getpid()}) == 3


def test_an_error_is_the_ranks_own_traceback(ranks: Ranks) -> None:
    outcomes = ranks.start(2, "test_ranks:fail_on", rank=1).outcomes()
    assert outcomes[0].value == 0
    assert outcomes[0].error is None
    assert "in fail_on" in str(outcomes[1].error)
    assert "ValueError: rank 1 was told to fail" in str(outcomes[1].error)


def test_the_dead_are_reported_and_replaced(ranks: Ranks) -> None:
    run = ranks.start(2, "test_ranks:sleep", seconds=0.2)
    ranks.processes[1].kill()
    assert [outcome.error for outcome in run.outcomes()] == [None, "killed by SIGKILL"]
    assert [values[0] for values in ranks.run(2, "test_ranks:describe", word="")] == [0, 1]


def test_who_does_not_end_in_time_is_killed(ranks: Ranks) -> None:
    outcomes = ranks.start(2, "test_ranks:sleep", seconds=30).outcomes(within_s=0.1)
    assert [outcome.error for outcome in outcomes] == ["did not end in time"] * 2
