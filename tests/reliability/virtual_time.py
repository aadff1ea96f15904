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


class Killed(BaseException):
    """Ends the thread of a process that was killed."""


@dataclass(eq=False)
class Task:
    """A simulated process."""

    name: str
    number: int
    run: Callable[[], None]
    is_ready: Callable[[], object] = lambda: True  # what it waits for
    deadline: float = 0.0  # of its wait
    has_waited: bool = False  # long enough
    is_stopped: bool = False  # it gets no turn
    is_killed: bool = False
    has_ended: bool = False
    error: BaseException | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None


class World:
    """The clock, the processes, and what happens between them."""

    def __init__(self, seed: int, longest_s: float, max_turns: int) -> None:
        """
        Args:
            longest_s: a run that takes longer is a violation, as is one with more turns.
        """
        self.dice = random.Random(seed)
        self.now = 0.0
        self.longest_s, self.max_turns = longest_s, max_turns
        self._readers: dict[int, tuple[int, Callable[[], None]]] = {}  # by file descriptor, with a number for the order
        self._num_readers = 0
        self._readable, self._awaited = select.epoll(), select.epoll()  # those of readers, and of tasks that wait
        self._waiting: dict[int, Task] = {}  # tasks that wait for file descriptors, by these,
        self._asked: dict[Task, None] = {}  # and those that wait for something else
        self._deadlines: list[tuple[float, int, Task]] = []
        self.violation: InvariantViolation | None = None  # found by a task, whose error others may take for a failure
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
        task = Task(name, len(self._tasks), run)
        task.thread = threading.Thread(target=self._run_task, args=(task,), name=name, daemon=True)
        task.thread.start()
        self._tasks.append(task)
        self._asked[task] = None
        return task

    def kill(self, task: Task) -> None:
        """End a task in its next turn."""
        task.is_killed = True
        self._end_wait(task)

    def when_readable(self, fd: int, read: Callable[[], None] | None) -> None:
        """Call `read` between two turns while a file descriptor is readable; None: no more. It must not wait."""
        if read is not None and self._readers.get(fd) is None:
            self._readable.register(fd, select.EPOLLIN)
            self._num_readers += 1
            self._readers[fd] = self._num_readers, read
        elif read is None and self._readers.pop(fd, None) is not None:
            self._readable.unregister(fd)

    def wait(
        self, is_ready: Callable[[], object], timeout_s: float | None = None, epoll_fd: int | None = None
    ) -> object:
        """Let others run until something is true or the time is over. Called by a task. Return what `is_ready` does.

        Args:
            epoll_fd: a file descriptor that is readable when `is_ready` returns something true, so that it need not be
                called in each turn of another task.
        """
        task = self._current
        assert task is not None, "only a simulated process may wait"
        task.is_ready, task.has_waited = is_ready, False
        task.deadline = float("inf") if timeout_s is None else self.now + timeout_s
        if timeout_s is not None:
            heapq.heappush(self._deadlines, (task.deadline, task.number, task))
        if epoll_fd is None:
            self._asked[task] = None
        else:
            self._waiting[epoll_fd] = task
            self._awaited.register(epoll_fd, select.EPOLLIN)
        self._turn_ended.release()
        task.turn.acquire()
        if epoll_fd is not None:
            del self._waiting[epoll_fd]
            self._awaited.unregister(epoll_fd)
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
                    if self.violation is not None:
                        raise self.violation
                    if self.num_turns > self.max_turns:
                        raise InvariantViolation("livelock", f"{self.max_turns} turns in {self.now:.1f} s")
            finally:
                for task in self._tasks:
                    self.kill(task)
                    while not task.has_ended:
                        self._give_turn(task)
        if main.error is not None:
            raise main.error

    def _advance(self) -> None:
        self._act_between_turns()
        while (next_s := self._next_deadline()) <= self.now:
            self._end_wait(heapq.heappop(self._deadlines)[2])
        found = self._awaited.poll(0, max(1, len(self._waiting)))
        ready = {self._waiting[fd] for fd, _ in found}
        ready |= {task for task in self._asked if task.has_waited or task.is_ready()}
        able = [task for task in ready if self._is_able(task)]
        if able:
            self._give_turn(self.dice.choice(sorted(able, key=lambda task: task.number)))
            self.now += self.dice.uniform(0.0, 0.0005)
            return
        moment = min([next_s, *(event[0] for event in self._events[:1])])
        if moment > self.longest_s:
            waiting = [task.name for task in self._tasks if not task.has_ended]
            raise InvariantViolation("deadlock", f"at {self.now:.1f} s these wait until {moment}: {waiting}")
        self.now = max(self.now, moment)

    def _end_wait(self, task: Task) -> None:
        task.has_waited = True
        self._asked[task] = None

    def _is_able(self, task: Task) -> bool:
        return not task.has_ended and (task.is_killed or not task.is_stopped)

    def _next_deadline(self) -> float:
        """Return the next deadline of a task that can have a turn, and forget those of waits that are over."""
        while self._deadlines:
            moment, _, task = self._deadlines[0]
            if moment == task.deadline and self._is_able(task):
                return moment
            heapq.heappop(self._deadlines)
        return float("inf")

    def _act_between_turns(self) -> None:
        readable = [self._readers[fd] for fd, _ in self._readable.poll(0, max(1, len(self._readers)))]
        for _, read in sorted(readable, key=lambda reader: reader[0]):
            read()
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()

    def _give_turn(self, task: Task) -> None:
        self.num_turns += 1
        self._current = task
        self._asked.pop(task, None)
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
                self._masks: dict[int, int] = {}

            def register(self, file: Any, mask: int) -> None:
                self._poll.register(file, mask)
                self._masks[file if isinstance(file, int) else file.fileno()] = mask

            modify = register

            def poll(self, timeout_ms: float | None = None) -> Any:
                found = self._poll.poll(0)  # also files that are closed, which epoll does not take
                if found or (timeout_ms is not None and timeout_ms <= 0):
                    if timeout_ms is None or timeout_ms > 0:
                        world.wait(lambda: True)
                    return found
                timeout_s = None if timeout_ms is None else timeout_ms / 1000
                with select.epoll() as epoll:
                    for fd, mask in self._masks.items():
                        epoll.register(fd, mask)
                    return world.wait(lambda: self._poll.poll(0), timeout_s, epoll.fileno())

        with (
            mock.patch("time.monotonic", side_effect=lambda: world.now),
            mock.patch("time.sleep", lambda seconds: world.wait(lambda: False, seconds)),
            mock.patch("select.poll", Poll),
        ):
            yield
