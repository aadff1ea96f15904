"""An engine of several replicas with its processes, router and channels in virtual time, and planted bugs."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_simulator import EngineReport, EngineScenario, simulate_engine
from planted_engine_bugs import PLANTED_IN_ENGINE, PlantedInEngine
from scenario import InvariantViolation

from moeserve.engine import engine


def run_scenarios(seeds: range) -> Counter[str]:
    """Run random scenarios. Return how often each kind of event counts."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        scenario = EngineScenario.drawn(seed)
        report = simulate_engine(scenario)
        counts.update(report.ends)
        counts.update({scenario.fault: 1, scenario.on_failure: 1, "restarts": report.num_groups - 1})
    return counts


@pytest.mark.slow
def test_random_faults() -> None:
    counts = run_scenarios(range(40))
    faults = ("none", "kill engine", "kill rank", "stop engine", "stop rank", "raise", "cut to", "cut from", "close")
    assert all(counts[fault] >= 1 for fault in faults), counts
    assert min(counts[kind] for kind in ("recover", "restart")) >= 5, counts
    assert min(counts[kind] for kind in ("restarts", "end", "stop", "length", "abort", "error")) >= 10, counts


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> EngineReport:
        return simulate_engine(EngineScenario(seed=5, fault="kill rank", fault_s=1.0))

    assert run() == run()


@pytest.mark.slow_but("ForgetsAborts", "ReplacesEvery")
@pytest.mark.parametrize("bug", PLANTED_IN_ENGINE, ids=[bug.name for bug in PLANTED_IN_ENGINE])
def test_planted_bug_is_found(bug: PlantedInEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RequestsInFlight", bug.requests_class)
    monkeypatch.setattr(engine, "Recovery", bug.recovery_class)
    assert first_violation(bug) in bug.names


def first_violation(bug: PlantedInEngine) -> str:
    for seed in range(80):
        try:
            simulate_engine(EngineScenario.drawn(seed), bug.engine_class, bug.channel_class)
        except InvariantViolation as violation:
            return violation.invariant
    return "80 scenarios did not find it"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_seeds() -> None:
    run_scenarios(range(1000, 3000))
