"""An engine whose number of replicas changes, with a client and processes that the test plays.

The client calls `step` until its requests have ended and the change is over. Its control returns to the test where the
engine sleeps: in the poll of its processes and its wake-up. Their file descriptors are real. The client goes on only
when one of them is ready, and never because time has passed. Control returns, too, between the last look for messages
and the sending of a request that is added. What the engine runs in the background is one event, or with `Plot.pauses`
one for each piece between its wake-ups.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from played_replicas import Group, Job, PausingWakeUp, Process, token_of
from test_engine_restart import config_of

from moeserve.config.engine_config import EngineConfig
from moeserve.engine import engine, generation, restart
from moeserve.engine.engine import Engine
from moeserve.engine.launcher import WorkerGroup
from moeserve.errors import EngineError, ScaleError
from moeserve.processes.supervision import ProcessPoll
from moeserve.protocol import Request, RequestUpdate
from moeserve.sampling_params import RequestParams

FAULTS = ("kill", "refuse")
OPTIONAL = (*FAULTS, "abort", "shutdown")  # no state may depend on one of these
MAX_STEPS_AT_ONCE = 20  # of the client, without sleep


@dataclass(frozen=True)
class Plot:
    """The variables of a story."""

    lengths: tuple[tuple[str, int], ...]  # tokens of each request; b is added by an event
    aborts: bool = False  # the client may abort request b
    shuts_down: bool = False  # the client may shut the engine down
    sizes: tuple[int, int] = (1, 2)  # replicas before the change and after it
    on_failure: str = "restart"
    pauses: bool = False  # work in the background pauses after it has woken the client


class SleepingPoll(ProcessPoll):
    """A poll whose waits last until the story goes on."""

    story: ClassVar[Story | None] = None
    latest: ClassVar[SleepingPoll]

    def __init__(self, processes: Any, *other_fds: int) -> None:
        super().__init__(processes, *other_fds)
        self.processes, self.other_fds = processes, other_fds
        SleepingPoll.latest = self

    @property
    def is_ready(self) -> bool:
        return any(process.has_messages for process in self.processes) or bool(self._poll.poll(0))

    @property
    def is_woken(self) -> bool:
        return any(fd in self.other_fds for fd, _ in self._poll.poll(0))

    def ready(self, timeout_s: float | None = 0.0) -> list[Any]:
        if timeout_s != 0.0:
            assert self.story is not None
            self.story.let_happen("asleep")
        found = super().ready(0.0)
        if self.story is not None and self.story.is_adding:
            self.story.let_happen("adding")
        return found


class Story:
    """An engine with requests whose number of replicas changes, and the events that happen to it. A `Launcher`."""

    def __init__(self, plot: Plot, engine_class: type[Engine] = Engine, refused_sizes: tuple[int, ...] = ()) -> None:
        self.plot, self.lengths, self.sizes = plot, dict(plot.lengths), plot.sizes
        self.groups: list[Group] = []
        self.released: list[None] = []  # one for each group that was released
        self.num_restarts = 0
        self.is_closed = False
        self.in_job = False
        self.jobs: deque[Job] = deque()  # in the background
        self.refuses_start = False
        self.refused_sizes = refused_sizes
        self.has_fault = False
        self.tokens: dict[str, list[int]] = {}  # of each request that was added
        self.ends: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.to_do: deque[Callable[[], None]] = deque()  # by the client, between two steps
        self.place = "in no step"  # of the client
        self.num_steps = 0  # since its last sleep
        self.is_adding = False
        self.is_refused = False  # the engine takes no more calls
        self.is_shut_down = False
        SleepingPoll.story = self
        self.engine = engine_class(
            self.config_of(self.sizes[0]),
            self,
            config_of=self.config_of,
            run_in_background=lambda work: self.jobs.append(Job(work, pauses=plot.pauses)),
        )
        for name in self.lengths:
            if name == "a" or "a" not in self.lengths:
                self.add(name)
        self.change = self.engine.scale(self.sizes[1])

    def config_of(self, num_replicas: int) -> EngineConfig:
        return config_of(num_replicas, self.plot.on_failure)

    def start(self, config: EngineConfig) -> WorkerGroup:
        if (self.refuses_start and self.in_job) or config.parallel.data_parallel_size in self.refused_sizes:
            raise EngineError("no resources")
        group = Group(config.parallel.data_parallel_size, f"{len(self.groups)}", self.lengths)
        self.groups.append(group)
        if len(self.groups) == 1 or not self.in_job:  # the first start, and a restart, wait until all are ready
            self.num_restarts += len(self.groups) > 1
            for process in group.processes:
                process.load()

        return group.workers(release=functools.partial(self.released.append, None))

    def close(self) -> None:
        assert not self.is_closed, "the machine is closed twice"
        assert not self.alive, "the machine is closed while processes run"
        assert self.change.done(), "the machine is closed during a change"
        self.is_closed = True

    @property
    def alive(self) -> list[Process]:
        return [process for group in self.groups for process in group.processes if process.cause is None]

    def add(self, name: str) -> None:
        self.tokens[name] = []
        params = RequestParams(max_tokens=self.lengths[name])
        self.engine.add(Request(request_id=name, prompt_token_ids=[1], params=params, seed=0))

    def add_meanwhile(self, name: str) -> None:
        """Add a request, and let events happen after the engine has looked for messages and before it sends it."""
        self.is_adding = True
        self.add(name)
        self.is_adding = False

    def events(self) -> list[str]:
        """Return all events that can happen next."""
        is_asleep = self.place == "asleep" and not SleepingPoll.latest.is_ready
        found = [] if is_asleep or (self.place == "idle" and not self.to_do) else ["client"]
        for process in self.alive:
            found += [] if process.is_ready else [f"load {process.name}"]
            if process.watched in SleepingPoll.latest.processes:
                found += [f"take {process.name}"] if process.is_ready and process.mail else []
                found += [f"step {process.name}"] if process.can_step else []
        found += ["job"] if self.jobs else []
        if not self.is_shut_down and not self.to_do:
            found += [f"add {name}" for name in self.lengths if name not in self.tokens]
            if self.plot.aborts and "b" in self.tokens and not self.aborted and "b" not in self.ends:
                found.append("abort b")
            found += ["shutdown"] if self.plot.shuts_down else []
        if not self.has_fault:
            found += [f"kill {process.name}" for process in self.alive]
            found += ["refuse"] if self.jobs and len(self.groups) == 1 else []
        return found

    def play(self, event: str) -> None:
        kind, _, name = event.partition(" ")
        processes = {process.name: process for process in self.alive}
        match kind:
            case "load":
                processes[name].load()
            case "take":
                processes[name].take()
            case "step":
                processes[name].step()
            case "kill":
                processes[name].kill()
            case "refuse":
                self.refuses_start = True
            case "job":
                self.in_job = True
                self.jobs[0].take_turn()
                self.in_job = False
                if self.jobs[0].is_over:
                    self.jobs.popleft()
            case "add":
                self.request(functools.partial(self.add_meanwhile, name))
            case "abort":
                self.aborted.add(name)
                self.request(functools.partial(self.engine.abort, name))
            case "shutdown":
                self.request(self.shut_down)
        self.has_fault |= kind in FAULTS

    def request(self, call: Callable[[], None]) -> None:
        """Make the client call something when its step has returned, as another thread does."""
        self.to_do.append(call)
        self.engine.wake()

    def serve(self, choose: Callable[[Story], str]) -> None:
        """Let the client take steps until no work is left, or the engine refuses.

        Args:
            choose: returns the next event: "client" lets the client go on, "look" ends its sleep by the time limit.
        """
        self.choose = choose
        while self.engine.has_work or self.to_do or self.will_add:
            self.num_steps += 1
            assert self.num_steps < MAX_STEPS_AT_ONCE, "the client goes on for ever, without sleep"
            try:
                if self.engine.has_work:
                    self.take(self.engine.step())
                else:
                    self.let_happen("idle")
                while self.to_do:
                    self.to_do.popleft()()
            except EngineError:
                assert self.engine.refusal, "it raises an error and takes requests"
                self.is_refused = True
                break
        self.place = "done"

    @property
    def will_add(self) -> bool:
        return not self.is_shut_down and len(self.tokens) < len(self.lengths)

    def shut_down(self) -> None:
        self.is_shut_down = True
        self.engine.shutdown()

    def let_happen(self, place: str) -> None:
        self.place, self.num_steps = place, 0
        while (event := self.choose(self)) not in ("client", "look"):
            self.play(event)

    def take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            name = update.request_id
            assert name not in self.ends, f"an update of {name} after its end"
            self.tokens[name] += update.token_ids
            expected = [token_of(name, position) for position in range(self.lengths[name])]
            assert self.tokens[name] == expected[: len(self.tokens[name])], f"{name} has {self.tokens[name]}"
            if update.finish_reason is not None:
                self.ends[name] = update.finish_reason
                assert update.finish_reason == "abort" or self.tokens[name] == expected
                may_fail = self.plot.on_failure == "end" and self.has_fault and update.error is not None
                is_expected = name in self.aborted or may_fail or self.is_shut_down
                assert update.finish_reason != "abort" or is_expected, f"{name} was aborted: {update.error}"

    def state(self) -> Any:
        """Return all that decides what can happen from now on."""
        groups = []
        for group in self.groups:
            is_retired = group.was_used and group.processes[0].watched not in SleepingPoll.latest.processes
            processes = [process.cause is None if is_retired else process.state() for process in group.processes]
            groups.append(tuple(processes if group.was_used else sorted(processes, key=repr)))
        in_flight = tuple((name, len(tokens)) for name, tokens in self.tokens.items())
        succeeded = self.change.done() and self.change.exception() is None
        jobs = tuple(job.num_turns for job in self.jobs)
        change = (self.change.done(), succeeded, jobs, len(self.released), self.refuses_start)
        engine = (self.engine.config.parallel.data_parallel_size, self.engine.has_failed, self.engine.has_work)
        poll = SleepingPoll.latest.is_woken
        client = (self.place, len(self.to_do), tuple(self.ends), tuple(self.aborted), self.is_shut_down, poll)
        return tuple(groups), in_flight, change, engine, client, self.has_fault

    def check_end(self) -> None:
        """Check what is left when the client has no more work, and after a shutdown."""
        is_over = self.change.done()
        assert is_over or self.is_refused, "the change never ended"
        if not (self.is_refused or self.is_shut_down):
            self._check_size()
        assert self.ends.keys() == self.tokens.keys(), f"requests never ended: {self.ends}"
        if not self.is_shut_down:
            self.shut_down()
        while self.jobs:
            self.play("job")
        assert self.change.done(), "the change never ended"
        assert not self.alive, "processes are left"
        assert len(self.released) == len(self.groups), "a worker group was not released, or twice"
        assert self.is_closed, "the machine was not closed"

    def _check_size(self) -> None:
        error = self.change.exception()
        assert error is None or isinstance(error, ScaleError)
        assert error is None or self.has_fault, f"without a fault: {error}"
        size = self.sizes[error is None]
        if self.plot.on_failure == "shrink" and self.num_restarts:
            size = max(1, size - 1)
        assert self.engine.config.parallel.data_parallel_size == size, (
            self.engine.config.parallel.data_parallel_size,
            error,
        )
        assert len(self.engine.replica_stats) == size
        if not self.engine.has_failed:
            assert len(self.alive) in (size, size - self.has_fault), self.alive
            assert len(self.released) == len(self.groups) - 1, "a worker group was not released, or twice"

    def finish(self, *events: str) -> None:
        """Play events, then let everything happen that can, and check what is left."""
        script = deque(events)
        self.serve(lambda story: script.popleft() if script else go_on(story))
        self.check_end()

    def discard(self) -> None:
        """Close all connections, and end what is paused."""
        for job in self.jobs:
            job.drop()
        for group in self.groups:
            group.close()


def go_on(story: Story) -> str:
    """Return an event that brings the story to its end."""
    return next(event for event in story.events() if event.split()[0] not in OPTIONAL)


def patch_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines sleep in a story, and wait for nothing else."""
    monkeypatch.setattr(engine, "ProcessPoll", SleepingPoll)
    monkeypatch.setattr(engine, "WakeUp", PausingWakeUp)
    monkeypatch.setattr(generation, "SECONDS_TO_END", 0.0)
    monkeypatch.setattr(engine, "SECONDS_TO_END", 0.0)
    monkeypatch.setattr(restart, "SECONDS_BETWEEN_STARTS", 0.0)
