"""Turns of decoding requests, on a machine whose steps take as long as a formula says."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from moeserve.kv.requests import RequestCache
from moeserve.protocol import Request
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.request import LiveRequest
from moeserve.scheduling.turns import LEAST_STEPS, MOST_STEPS, Turns

LONGEST_WAIT = 5.0
MOST_WAIT = 2 * LONGEST_WAIT  # in a round that measures turns whose steps take longer than was assumed
Seconds = Callable[[int, int], float]  # (requests in the step, steps of their turn before it) -> seconds


def faster_alone(num_requests: int, num_before: int) -> float:
    """Eight requests read 8 * .05 s; those that are alone find more in memory with every step."""
    return 0.05 * num_requests * (1.0 if num_requests > 2 else 0.4 + 0.6 * 0.8**num_before)


def faster_together(num_requests: int, num_before: int) -> float:
    return 0.05 + 0.001 * num_requests


class Machine:
    """Decodes requests for ever, and keeps when each got its tokens."""

    def __init__(self, seconds: Seconds) -> None:
        self.turns = Turns(LONGEST_WAIT)
        self.seconds = seconds
        self.now = 0.0
        self.requests: list[LiveRequest] = []
        self.times: dict[LiveRequest, list[float]] = defaultdict(list)
        self.sizes: list[int] = []
        self.last: set[LiveRequest] = set()
        self.num_before = 0

    def add(self, num_requests: int) -> None:
        for _ in range(num_requests):
            request = Request(request_id=f"{len(self.times)}", prompt_token_ids=[1], params=RequestParams(), seed=0)
            live = LiveRequest(request, len(self.times), RequestCache(b"", 1))
            self.requests.append(live)
            self.times[live].append(self.now)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            chosen = self.turns.choose(self.requests)
            assert chosen <= {*self.requests}
            assert chosen
            self.num_before = self.num_before + 1 if chosen == self.last else 0
            self.last = chosen
            seconds = self.seconds(len(chosen), self.num_before)
            self.now += seconds
            self.turns.note_step(len(chosen), seconds, is_decode_only=True)
            self.sizes.append(len(chosen))
            for request in chosen:
                self.times[request].append(self.now)

    def longest_wait(self) -> float:
        live = {request: self.times[request] for request in self.requests}
        return max(later - earlier for times in live.values() for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize(("seconds", "best"), [(faster_alone, {1, 2}), (faster_together, {8})])
def test_the_fastest_number_at_once_is_found(seconds: Seconds, best: set[int]) -> None:
    machine = Machine(seconds)
    machine.add(8)
    machine.run(20_000)
    later = machine.sizes[5_000:]
    assert sum(size in best for size in later) > 0.9 * len(later)
    assert {*later} - best, "others are tried again"


def test_what_becomes_faster_is_found() -> None:
    machine = Machine(faster_together)
    machine.add(8)
    machine.run(20_000)
    machine.seconds = faster_alone
    machine.run(50_000)
    assert sum(size in (1, 2) for size in machine.sizes[-5_000:]) > 4_000


@pytest.mark.parametrize("seconds", [faster_alone, faster_together])
@pytest.mark.parametrize("num_requests", [1, 2, 7, 8, 33])
def test_no_request_waits_much_longer_than_allowed(seconds: Seconds, num_requests: int) -> None:
    machine = Machine(seconds)
    machine.add(num_requests)
    machine.run(30_000)
    assert machine.longest_wait() < MOST_WAIT + (LEAST_STEPS + 1) * seconds(num_requests, 0)
    counts = [len(times) for times in machine.times.values()]
    assert min(counts) > 0.8 * max(counts), "all get their share"


def test_requests_that_come_and_go_get_their_share() -> None:
    machine, dice = Machine(faster_alone), random.Random(0)
    machine.add(3)
    for _ in range(2_000):
        machine.run(dice.randrange(1, 20))
        if len(machine.requests) > 1 and dice.random() < 0.3:
            machine.requests.remove(dice.choice(machine.requests[1:]))
        if len(machine.requests) < 12 and dice.random() < 0.35:
            machine.add(1)
    assert machine.longest_wait() < MOST_WAIT + (LEAST_STEPS + 1) * faster_alone(12, 0)


def test_steps_with_prompts_end_turns_but_say_nothing_of_speed() -> None:
    machine = Machine(faster_alone)
    machine.add(8)
    for _ in range(10_000):
        machine.run(1)
        chosen = machine.turns.choose(machine.requests)
        machine.turns.note_step(2_048, 0.01 if len(chosen) == 8 else 9.0, is_decode_only=False)
    later = machine.sizes[5_000:]
    assert sum(size in (1, 2) for size in later) > 0.9 * len(later)
    members = set()
    for _ in range(20 * MOST_STEPS):
        members |= machine.turns.choose(machine.requests)
        machine.turns.note_step(2_048, 1.0, is_decode_only=False)
    assert members == {*machine.requests}
