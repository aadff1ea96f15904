"""The number of threads follows the cores of the container."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moeserve.ops.native import set_num_threads
from moeserve.worker.thread_count import SECONDS_BETWEEN_LOOKS, ThreadCount


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    set_num_threads(before)


@pytest.mark.parametrize(
    ("most", "cores", "expected"),
    [
        (8, [8, 4, 1, 8], [4, 1, 8]),
        (8, [8, 12, 7], [8, 7]),  # never more than at the start
        (2, [8, 4, 1], [1, 1]),  # one of four ranks
        (3, [2, 1, 2], [1, 3]),  # more threads than cores, as the user wanted
    ],
)
def test_threads_follow_cores(most: int, cores: list[int], expected: list[int]) -> None:
    left, seconds = iter(cores), iter(range(0, 1000, int(SECONDS_BETWEEN_LOOKS)))
    count = ThreadCount(most, lambda: next(left), lambda: next(seconds))
    before = most
    for number in expected:
        prepared: list[int] = []
        count.update(lambda: prepared.append(torch.get_num_threads()))  # noqa: B023
        assert count.number == torch.get_num_threads() == number
        assert prepared == ([number] if number != before else [])
        before = number


def test_cores_are_looked_at_seldom() -> None:
    times, looks = iter([0.0, 2.0, 4.9, 5.1, 9.9, 10.2]), []

    def look() -> int:
        looks.append(0)
        return 2

    count = ThreadCount(2, look, lambda: next(times))
    for _ in range(5):
        count.update(lambda: None)
    assert len(looks) == 1 + 2
