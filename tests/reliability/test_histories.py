"""Histories of an engine with 8 to 320 replicas: ranks are killed, replaced or left out, and join again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from engine_simulator import EngineScenario, Point, simulate_engine
from planted_recovery_bugs import PLANTED_IN_HISTORIES, count_failures_of_all_time
from scenario import InvariantViolation

from moeserve.engine import growing_back


@pytest.fixture(autouse=True)
def replicas_start_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_back, "FIRST_DELAY_S", 0.5)


def play(num_replicas: int, seeds: range) -> Counter[str]:
    """Play histories, and return how often each kind of event has occurred."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        scenario = EngineScenario.history(num_replicas, seed)
        report = simulate_engine(scenario)
        counts += Counter(report.ends)
        counts += Counter(kills=report.num_killed, left_out=report.num_left_out, joined=report.num_groups - 1)
        counts[scenario.on_failure] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "seeds"), [(8, range(8)), (64, range(1))])
def test_no_history_loses_a_request_or_a_survivor(num_replicas: int, seeds: range) -> None:
    counts = play(num_replicas, seeds)
    assert min(counts[kind] for kind in ("kills", "left_out", "joined", "stop", "length")) >= 1, counts
    assert not counts["error"], counts


def test_many_failures_end_only_requests_without_a_token_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = frozenset(Point(epoch, epoch % 3, 4) for epoch in range(5))
    scenario = EngineScenario(seed=1, on_failure="recover", load_s=0.1, kills=kills, span_s=0.2)
    report = simulate_engine(scenario)
    assert report.num_killed == 5
    assert report.ends["error"] > 0
    assert report.ends["stop"] > 0
    count_failures_of_all_time(monkeypatch)
    with pytest.raises(InvariantViolation, match="nobody aborted"):
        simulate_engine(scenario)


@pytest.mark.slow
def test_320_replicas() -> None:
    """Two ranks fail, one of them during the recovery from the first, and both are replaced."""
    kills = frozenset({Point(0, 100, 1), Point(1, 200, -1)})
    report = simulate_engine(
        EngineScenario(seed=1, num_replicas=320, num_requests=20, on_failure="recover", load_s=0.1, kills=kills)
    )
    assert (report.num_killed, report.num_groups, report.num_left_out) == (2, 1, 0)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("num_replicas", "num_seeds"), [(8, 1000), (64, 50), (320, 8)])
def test_many_histories(num_replicas: int, num_seeds: int) -> None:
    play(num_replicas, range(1000, 1000 + num_seeds))


@pytest.mark.slow_but("place_experts_anew")
@pytest.mark.parametrize("plant", PLANTED_IN_HISTORIES, ids=lambda plant: plant.__name__)
def test_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(InvariantViolation):
        play(8, range(12))
