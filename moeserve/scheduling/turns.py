"""Turns of decoding requests, for models whose experts are partly on disk.

Requests that decode together may need more experts than memory holds, and read them again in every step. A few requests
at a time find most of their experts in memory. Which is faster depends on the model, the disk and the texts, so speeds
are measured: each power of two is, for one round, the number of requests that decode at once, and the fastest number is
kept. Now and then another number is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.scheduling.request import LiveRequest

LEAST_STEPS, MOST_STEPS = 8, 64  # steps of a turn, of which the first read experts that other turns did not need
ROUNDS_BETWEEN_TRIALS = 32


@dataclass(frozen=True)
class _Speed:
    """The speed of a number of requests that decode at once."""

    tokens_per_second: float
    seconds_per_step: float


class Turns:
    """Chooses the requests that decode in each step. In a round, each request has one turn."""

    def __init__(self, longest_wait: float) -> None:
        """
        Args:
            longest_wait: seconds that a request may wait for its next token while others have their turns.
        """
        self._longest_wait = longest_wait
        self._speeds: dict[int, _Speed] = {}  # by number of requests at once
        self._size = 1  # number of requests at once
        self._turn = 0  # number of the present turn
        self._first_turn = -1  # first turn of the present round
        self._steps_left = 0  # steps left in the present turn
        self._num_tokens, self._num_steps, self._seconds = 0, 0, 0.0  # decoded in the present round
        self._num_rounds = 0  # number of rounds in which a measured size was chosen

    def choose(self, decoding: Sequence[LiveRequest]) -> set[LiveRequest]:
        """Return the requests that decode in the next step.

        Args:
            decoding: all decoding requests, oldest first.
        """
        for request in decoding:
            if request.turn is None:  # it has just got its first token
                request.turn = self._turn - 1
        if self._steps_left <= 0 or all(request.turn != self._turn for request in decoding):
            self._begin_turn(decoding)
        waiting = sorted(decoding, key=lambda request: request.turn or 0)  # requests whose turn it is are the last
        num_members = sum(request.turn == self._turn for request in decoding)
        for request in waiting[: max(self._size - num_members, 0)]:
            request.turn = self._turn
        return {request for request in decoding if request.turn == self._turn}

    def note_step(self, num_tokens: int, seconds: float, *, is_decode_only: bool) -> None:
        """Note that a step has ended."""
        self._steps_left -= 1
        if is_decode_only:
            self._num_tokens += num_tokens
            self._num_steps += 1
            self._seconds += seconds

    def _begin_turn(self, decoding: Sequence[LiveRequest]) -> None:
        if all((request.turn or 0) >= self._first_turn for request in decoding):
            self._end_round(len(decoding))
        self._turn += 1
        self._steps_left = self._length_of_turn(len(decoding))

    def _end_round(self, num_requests: int) -> None:
        """Note the speed of the round, and choose how many requests decode at once in the next round."""
        if self._num_steps and self._seconds > 0:
            self._speeds[self._size] = _Speed(self._num_tokens / self._seconds, self._seconds / self._num_steps)
        self._num_tokens, self._num_steps, self._seconds = 0, 0, 0.0
        self._first_turn = self._turn + 1
        self._size = self._next_size(num_requests)

    def _next_size(self, num_requests: int) -> int:
        all_at_once = 1 << max(num_requests - 1, 0).bit_length()
        if all_at_once not in self._speeds:  # measured first, because its time bounds the time of other turns
            return all_at_once
        sizes = [1 << power for power in range(all_at_once.bit_length())]
        sizes = [size for size in sizes if self._wait(size, num_requests, LEAST_STEPS) <= self._longest_wait]
        if unknown := [size for size in sizes if size not in self._speeds]:
            return unknown[-1]
        fastest = max(sizes, key=lambda size: self._speeds[size].tokens_per_second)
        others = [size for size in sizes if size != fastest]
        self._num_rounds += 1
        num_trials, num_since = divmod(self._num_rounds, ROUNDS_BETWEEN_TRIALS)
        return others[num_trials % len(others)] if others and num_since == 0 else fastest

    def _length_of_turn(self, num_requests: int) -> int:
        """Return the number of steps of a turn: the maximum with which no request, also a new one, waits too long."""
        if self._size not in self._speeds:
            return LEAST_STEPS
        wait = self._wait(self._size, max(num_requests, self._size + 1), 1)
        return int(min(max(self._longest_wait / wait, LEAST_STEPS), MOST_STEPS))

    def _wait(self, size: int, num_requests: int, num_steps: int) -> float:
        """Return the seconds that a request waits during turns of `num_steps` steps of all others; 0 if unknown.

        If steps of this size have not been measured, their time is estimated as a proportional part of the time of a
        larger size. The true time may be up to twice as long; after one round, the measurement replaces the estimate.
        """
        num_others = -(-num_requests // size) - 1
        larger = sorted(known for known in self._speeds if known >= size)
        return num_others * num_steps * self._speeds[larger[0]].seconds_per_step * size / larger[0] if larger else 0.0
