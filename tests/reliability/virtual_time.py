"""Threads that take turns in virtual time: code that waits for sockets, clocks and timeouts runs as it is.

Each simulated process is a thread. Only one of them runs at a time; it runs until it waits in `time.sleep`,
`select.poll` or `World.wait`. Then the world draws another one, or advances the clock if all of them wait.
"""

from __future__ import annotations

import heapq
import random
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from scenario import InvariantViolation

_RealPoll = select.poll
MAX_TURNS = 30_000  # more than any run takes


class Killed(BaseException):
    """Ends the thread of a process that was killed."""


@dataclass(eq=False)
class Task:
    """A simulated process."""

    name: str
    run: Callable[[], None]
    is_ready: Callable[[], object] = lambda: True  # what it waits for
    deadline: float = 0.0  # of its wait
    is_stopped: bool = False  # it gets no turn
    is_killed: bool = False
    has_ended: bool = False
    error: BaseException | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None


class World:
    """The clock, the processes, and what happens between them."""

    def __init__(self, seed: int, longest_s: float) -> None:
        """
        Args:
            longest_s: a run that takes longer is a violation.
        """
        self.dice = random.Random(seed)
        self.now = 0.0
        self.longest_s = longest_s
        self.between_turns: list[Callable[[], None]] = []  # carries bytes
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._turn_ended = threading.Semaphore(0)
        self.num_turns = 0

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Call `action` between two turns. It must not wait."""
        self._num_events += 1
        heapq.heappush(self._events, (max(moment, self.now), self._num_events, action))

    def start(self, name: str, run: Callable[[], None]) -> Task:
        task = Task(name, run)
        task.thread = threading.Thread(target=self._run_task, args=(task,), name=name, daemon=True)
        task.thread.start()
        self._tasks.append(task)
        return task

    def wait(self, is_ready: Callable[[], object], timeout_s: float | None = None) -> object:
        """Let others run until something is true or the time is over. Called by a task. Return what `is_ready` does."""
        task = self._current
        assert task is not None, "only a simulated process may wait"
        task.is_ready = is_ready
        task.deadline = float("inf") if timeout_s is None else self.now + timeout_s
        self._turn_ended.release()
        task.turn.acquire()
        if task.is_killed:
            raise Killed
        return is_ready()

    def run(self, client: Callable[[], None]) -> None:
        """Run until the client has ended, and raise its error.

        Raises:
            InvariantViolation: everything waits for ever, or the run takes too long.
        """
        main = self.start("client", client)
        with self._virtual():
            try:
                while not main.has_ended:
                    self._advance()
                    if self.num_turns > MAX_TURNS:
                        raise InvariantViolation("livelock", f"{MAX_TURNS} turns in {self.now:.1f} s")
            finally:
                for task in self._tasks:
                    task.is_killed = True
                    while not task.has_ended:
                        self._give_turn(task)
        if main.error is not None:
            raise main.error

    def _advance(self) -> None:
        for carry in self.between_turns:
            carry()
        able = [task for task in self._tasks if not task.has_ended and (task.is_killed or not task.is_stopped)]
        ready = [task for task in able if task.is_killed or task.deadline <= self.now or task.is_ready()]
        if ready:
            self._give_turn(self.dice.choice(ready))
            self.now += self.dice.uniform(0.0, 0.0005)
            return
        moments = [task.deadline for task in able] + [event[0] for event in self._events[:1]]
        moment = min(moments, default=float("inf"))
        if moment > self.longest_s:
            waiting = [task.name for task in self._tasks if not task.has_ended]
            raise InvariantViolation("deadlock", f"at {self.now:.1f} s these wait until {moment}: {waiting}")
        self.now = max(self.now, moment)
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()

    def _give_turn(self, task: Task) -> None:
        self.num_turns += 1
        self._current = task
        task.turn.release()
        self._turn_ended.acquire()
        self._current = None

    def _run_task(self, task: Task) -> None:
        task.turn.acquire()
        try:
            if not task.is_killed:
                task.run()
        except Killed:
            pass
        except BaseException as error:
            task.error = error
        task.has_ended = True
        self._turn_ended.release()

    @contextmanager
    def _virtual(self) -> Iterator[None]:
        world = self

        class Poll:
            """As `select.poll`, in virtual time."""

            def __init__(self) -> None:
                self._poll = _RealPoll()
                self.register, self.modify = self._poll.register, self._poll.modify

            def poll(self, timeout_ms: float | None = None) -> Any:
                if timeout_ms is not None and timeout_ms <= 0:
                    return self._poll.poll(0)
                return world.wait(lambda: self._poll.poll(0), None if timeout_ms is None else timeout_ms / 1000)

        with (
            mock.patch("time.monotonic", side_effect=lambda: world.now),
            mock.patch("time.sleep", lambda seconds: world.wait(lambda: False, seconds)),
            mock.patch("select.poll", Poll),
        ):
            yield
