"""Three ranks, three rounds, and two of the ranks are killed, each at every point: also during the recovery."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from engine_simulator import EngineScenario, Point, simulate_engine
from planted_recovery_bugs import PLANTED_IN_RECOVERY
from scenario import InvariantViolation

NUM_RANKS, NUM_ROUNDS = 3, 3


def scenarios() -> Iterator[EngineScenario]:
    """Yield a scenario for each pair of points: in the first epoch, and in the first two."""
    points = [Point(0, rank, number) for rank in range(NUM_RANKS) for number in range(NUM_ROUNDS)]
    later = [Point(1, rank, number) for rank in range(NUM_RANKS) for number in range(-1, NUM_ROUNDS)]
    pairs = [pair for pair in itertools.combinations(points, 2) if pair[0].replica != pair[1].replica]
    for seed, pair in enumerate([*pairs, *itertools.product(points, later)]):
        yield EngineScenario(
            seed=seed,
            num_replicas=NUM_RANKS,
            num_requests=4,
            on_failure="recover",
            load_s=0.1,
            abort_share=0.0,
            bad_share=0.0,
            kills=frozenset(pair),
        )


@pytest.mark.slow
def test_no_order_of_two_failures_loses_a_request_or_a_survivor() -> None:
    ends = simulate_all()
    assert len(ends) == 27 + 108
    assert all({*each} <= {"length", "stop"} for each in ends)


@pytest.mark.slow_but("twice")
@pytest.mark.parametrize("plant", PLANTED_IN_RECOVERY, ids=lambda plant: plant.__name__)
def test_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(InvariantViolation):
        simulate_all()


def simulate_all() -> list[dict[str, int]]:
    """Return how the requests of each scenario have ended."""
    return [simulate_engine(scenario).ends for scenario in scenarios()]
