"""Worker groups of 8, 64 and 320 replicas in virtual time, and planted bugs that the simulator must find."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import planted_bugs as bugs
import pytest
from replica_simulator import simulate
from scenario import HEARTBEAT_S, Fault, InvariantViolation, Scenario


def run_scenarios(num_replicas: int, seeds: range, num_requests: int) -> Counter[str]:
    """Run random scenarios. Return how often each kind of event counts."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        scenario = Scenario.drawn(num_replicas, seed, num_requests)
        report = simulate(scenario)
        counts.update(report.ends)
        counts.update({scenario.fault: 1, "steps": report.num_steps, "idle rounds": report.num_idle_rounds})
        counts["preemptions"] += report.num_preemptions
        counts["stalls"] += scenario.stall_probability > 0
        counts["late"] += scenario.num_late > 0
    return counts


@pytest.mark.slow
def test_8_replicas() -> None:
    counts = run_scenarios(8, range(100), 40)
    kinds = ("none", "kill", "raise", "internal", "stalls", "late", "stop", "length", "abort", "error", "preemptions")
    assert all(counts[kind] >= 15 for kind in kinds), counts
    assert counts["steps"] > 2500, counts


def test_64_replicas() -> None:
    counts = run_scenarios(64, range(4), 80)
    assert counts["steps"] > 30, counts


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "kill"])
def test_320_replicas(fault: Fault) -> None:
    scenario = Scenario(
        num_replicas=320,
        seed=1,
        num_requests=60,
        num_busy_replicas=20,
        num_late=3,
        wake_loss=0.3,
        span_s=0.5,
        fault=fault,
        fault_s=24.0,
        fault_replica=100,
    )
    report = simulate(scenario)
    assert report.num_steps > 10
    assert sum(report.ends.values()) == 60


def test_nothing_lost_and_everything_ends_without_faults() -> None:
    report = simulate(
        Scenario(num_replicas=8, seed=3, num_requests=200, num_busy_replicas=1, abort_share=0.0, refused_share=0.0)
    )
    assert set(report.ends) == {"stop", "length"}
    assert sum(report.ends.values()) == 200


def first_token_after_sleep(wake_loss: float) -> float:
    """Return the slowest first token of single requests to a sleeping worker group."""
    times = [
        simulate(
            Scenario(
                num_replicas=8,
                seed=seed,
                num_requests=1,
                span_s=10.0,
                wake_loss=wake_loss,
                abort_share=0.0,
                refused_share=0.0,
            )
        ).slowest_first_token_s
        for seed in range(30)
    ]
    return max(times)


def test_wake_ups_only_shorten_the_wait() -> None:
    assert first_token_after_sleep(wake_loss=0.0) < 0.05 * HEARTBEAT_S
    assert 0.3 * HEARTBEAT_S < first_token_after_sleep(wake_loss=1.0) < 1.1 * HEARTBEAT_S


def test_an_idle_worker_group_agrees_once_a_heartbeat() -> None:
    report = simulate(Scenario(num_replicas=8, seed=0, num_requests=0, shutdown_s=100 * HEARTBEAT_S))
    assert report.num_steps == 0
    assert 90 <= report.num_idle_rounds <= 101


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace() -> None:
    """Two processes have different hash seeds."""
    program = (
        "from replica_simulator import Scenario, simulate\n"
        "for seed in (4, 5): print(simulate(Scenario.drawn(8, seed, 40)).trace_digest)"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0][0] != outputs[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("bug", bugs.PLANTED, ids=[bug.name for bug in bugs.PLANTED])
def test_planted_bug_is_found(bug: bugs.Planted) -> None:
    assert first_violation(bug) in bug.names


def first_violation(bug: bugs.Planted) -> str:
    for seed in range(60):
        try:
            simulate(Scenario.drawn(8, seed, 40), bug.make_replica, bug.agree_as)
        except InvariantViolation as violation:
            return violation.invariant
    return "60 scenarios did not find it"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("num_replicas", "num_seeds", "num_requests"), [(8, 10_000, 40), (64, 200, 200), (320, 12, 200)]
)
def test_many_seeds(num_replicas: int, num_seeds: int, num_requests: int) -> None:
    run_scenarios(num_replicas, range(1000, 1000 + num_seeds), num_requests)
