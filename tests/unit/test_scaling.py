"""A change of the number of replicas, in every order of messages with at most one fault.

The engine's own `Replicas`, `Scaling` and `Generation` run with processes that the test plays: one replica serves and
two load, so three processes run at once. A process obeys one message at a time, and what the engine runs in the
background is one event among others. A state is reached by playing its events again from the start.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import select
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from test_engine_restart import PlayedProcess, config_of

from moeserve.config.settings import EngineConfig
from moeserve.engine import generation, replicas
from moeserve.engine.generation import Generation
from moeserve.engine.protocol import Delivery, EngineMessage, Ready
from moeserve.engine.replicas import Replicas
from moeserve.errors import EngineError, ScaleError, ScalingInProgressError, SettingsError
from moeserve.processes.channel import Channel
from moeserve.processes.supervision import ProcessPoll, WatchedProcess
from moeserve.processes.worker_group import WorkerGroup
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    ReplicaMessage,
    ReplicaStats,
    Request,
    RequestUpdate,
    Shutdown,
)
from moeserve.sampling_params import RequestParams

STATS = ReplicaStats(num_free_blocks=1000, num_waiting=0, num_running=0, num_rounds=0)


@dataclass(frozen=True)
class Plot:
    """The variables of a story."""

    lengths: tuple[tuple[str, int], ...]  # tokens of each request
    aborts: bool = False  # the client may abort request b
    sizes: tuple[int, int] = (1, 2)  # replicas before the change and after it


UP = Plot((("a", 2),))
DOWN = Plot((("a", 2),), sizes=(2, 1))
ABORTED = Plot((("b", 1),), aborts=True)
TWO = Plot((("a", 2), ("b", 1)), aborts=True)


def token_of(name: str, position: int) -> int:
    return ord(name) * 100 + position


class Process(PlayedProcess):
    """An engine process that computes a token of each of its requests at a time."""

    def __init__(self, name: str, lengths: dict[str, int]) -> None:
        ours, theirs = socket.socketpair()
        self.watched: WatchedProcess[Any] = WatchedProcess(name, ours, EngineMessage, self)
        self.name, self.lengths = name, lengths
        self._channel: Channel[Any] = Channel(theirs, ReplicaMessage)
        self.is_ready = False
        self.num_sent = 0  # messages
        self.num_tokens: dict[str, int] = {}  # of each request, the given ones included

    @property
    def has_mail(self) -> bool:
        if self.cause is not None:
            return False
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(0))

    def load(self) -> None:
        self.is_ready = True
        self.num_sent += 1
        self._channel.send(Ready(num_blocks=1000))

    def take(self) -> None:
        for message in self._channel.receive():
            match message:
                case AddRequest(request=request):
                    self.num_tokens[request.request_id] = len(request.output_token_ids)
                case AbortRequest(request_id=name):
                    if self.num_tokens.pop(name, None) is not None:
                        self._deliver(RequestUpdate(request_id=name, finish_reason="abort"))
                case Shutdown():
                    for name in list(self.num_tokens):
                        del self.num_tokens[name]
                        self._deliver(RequestUpdate(request_id=name, finish_reason="abort"))

    def step(self) -> None:
        """Compute the next token of each request."""
        for name, position in list(self.num_tokens.items()):
            is_last = position + 1 == self.lengths[name]
            self.num_tokens[name] = position + 1
            if is_last:
                del self.num_tokens[name]
            token = token_of(name, position)
            self._deliver(
                RequestUpdate(request_id=name, token_ids=[token], finish_reason="length" if is_last else None)
            )

    def _deliver(self, update: RequestUpdate) -> None:
        self.num_sent += 1
        self._channel.send(Delivery([update], STATS))

    def close(self) -> None:
        self._channel.close()


class Story:
    """An engine with requests whose number of replicas changes, and the events that happen to it."""

    config_of = staticmethod(config_of)

    def __init__(
        self, plot: Plot, engine_class: type[Replicas] = Replicas, refused_sizes: tuple[int, ...] = ()
    ) -> None:
        self.plot, self.lengths, self.sizes = plot, dict(plot.lengths), plot.sizes
        self.groups: list[list[Process]] = []
        self.released: list[None] = []  # one for each group that was released
        self.in_job = False
        self.jobs: list[Callable[[], None]] = []  # in the background
        self.refuses_start = False
        self.refused_sizes = refused_sizes
        self.has_fault = False
        self.is_first_start = True
        self.tokens: dict[str, list[int]] = {name: [] for name in self.lengths}
        self.ends: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.read: tuple[int, ...] = ()  # messages of each process that the client has read
        self.engine = engine_class(
            self.config_of(self.sizes[0]), self.start, config_of=self.config_of, run_in_background=self.jobs.append
        )
        for name, length in plot.lengths:
            params = RequestParams(max_tokens=length)
            self.engine.add(Request(request_id=name, prompt_token_ids=[1], params=params, seed=0))
        self.change = self.engine.scale(self.sizes[1])

    def start(self, config: EngineConfig) -> WorkerGroup:
        if (self.refuses_start and self.in_job) or config.data_parallel_size in self.refused_sizes:
            raise EngineError("no resources")
        group = WorkerGroup(release=functools.partial(self.released.append, None))
        processes = [Process(f"{len(self.groups)}.{index}", self.lengths) for index in range(config.data_parallel_size)]
        self.groups.append(processes)
        group.engines += [process.watched for process in processes]
        if len(self.groups) == 1 or not self.in_job:  # the first start, and a restart, wait until all are ready
            for process in processes:
                process.load()
        return group

    @property
    def alive(self) -> list[Process]:
        return [process for group in self.groups for process in group if process.cause is None]

    def events(self) -> list[str]:
        """Return all events that can happen next."""
        found = ["client"]
        for process in self.alive:
            found += [] if process.is_ready else [f"load {process.name}"]
            found += [f"take {process.name}"] if process.is_ready and process.has_mail else []
            found += [f"step {process.name}"] if process.num_tokens else []
            found += [] if self.has_fault else [f"kill {process.name}"]
        found += ["job"] if self.jobs else []
        if not self.has_fault and self.jobs and len(self.groups) == 1:
            found.append("refuse")
        if self.plot.aborts and not self.aborted and "b" not in self.ends:
            found.append("abort")
        return found

    def play(self, event: str) -> None:
        kind, _, name = event.partition(" ")
        process = next((each for each in self.alive if each.name == name), None)
        match kind:
            case "client":
                self.take()
            case "load":
                assert process is not None
                process.load()
            case "take":
                assert process is not None
                process.take()
            case "step":
                assert process is not None
                process.step()
            case "kill":
                assert process is not None
                process.kill()
                self.has_fault = True
            case "refuse":
                self.refuses_start = self.has_fault = True
            case "job":
                self.in_job = True
                self.jobs.pop(0)()
                self.in_job = False
            case "abort":
                self.engine.abort("b")
                self.aborted.add("b")

    def take(self) -> None:
        """Let the client take what there is, without waiting."""
        self.engine.wake()
        updates = self.engine.step()
        self.read = tuple(process.num_sent for group in self.groups for process in group)
        for update in updates:
            name = update.request_id
            assert name not in self.ends, f"an update of {name} after its end"
            self.tokens[name] += update.token_ids
            expected = [token_of(name, position) for position in range(self.lengths[name])]
            assert self.tokens[name] == expected[: len(self.tokens[name])], f"{name} has {self.tokens[name]}"
            if update.finish_reason is not None:
                self.ends[name] = update.finish_reason
                assert update.finish_reason == "abort" or self.tokens[name] == expected
                assert update.finish_reason != "abort" or name in self.aborted, f"{name} was aborted: {update.error}"

    def state(self) -> Any:
        """Return all that decides what can happen from now on."""
        processes = tuple(
            (each.name, each.cause, each.is_ready, each.num_sent, each.has_mail, tuple(each.num_tokens.items()))
            for group in self.groups
            for each in group
        )
        in_flight = tuple((name, len(tokens)) for name, tokens in self.tokens.items())
        change = (self.change.done(), self.change.done() and self.change.exception() is None, len(self.jobs))
        engine = (self.engine.config.data_parallel_size, self.engine.has_failed, self.engine.has_work)
        return processes, self.read, in_flight, tuple(self.ends), tuple(self.aborted), change, engine, self.has_fault

    def finish(self) -> None:
        """Let everything happen that can, and check what is left."""
        for _ in range(60):
            events = [event for event in self.events() if event.split()[0] in ("load", "take", "step", "job")]
            for event in events:
                if event in self.events():
                    self.play(event)
            self.take()
            if not self.engine.has_work and not self.jobs:
                break
        assert not self.engine.has_work, "it waits for ever"
        assert self.ends.keys() == self.lengths.keys(), f"requests never ended: {self.ends}"
        assert self.change.done(), "the change never ended"
        succeeded = self.change.exception() is None
        size = self.engine.config.data_parallel_size
        assert size == (self.sizes[1] if succeeded else self.sizes[0]), (size, self.change.exception())
        if not succeeded:
            assert isinstance(self.change.exception(), ScaleError)
            assert self.has_fault, f"without a fault: {self.change.exception()}"
        assert len(self.alive) == size == len(self.engine.replica_stats)
        assert len(self.released) == len(self.groups) - 1, "a worker group was not released, or twice"
        self.engine.shutdown()
        assert not self.alive
        assert len(self.released) == len(self.groups)

    def finish_change(self) -> None:
        while not self.change.done():
            for event in self.events():
                if event.split()[0] in ("job", "load"):
                    self.play(event)
            self.take()

    def discard(self) -> None:
        """Close all connections."""
        for group in self.groups:
            for process in group:
                process.kill()
                process.close()
                process.watched.close()


def explore(plot: Plot, engine_class: type[Replicas] = Replicas) -> Counter[str]:
    """Visit every state, and finish the story from each. Return what was seen."""
    seen: set[Any] = set()
    stack: list[tuple[str, ...]] = [()]
    counts: Counter[str] = Counter()
    while stack:
        history = stack.pop()
        story = Story(plot, engine_class)
        try:
            for event in history:
                story.play(event)
            state = story.state()
            if state in seen:
                story.discard()
                continue
            seen.add(state)
            stack += [(*history, event) for event in story.events()]
            story.finish()
        except AssertionError as violation:
            raise AssertionError(f"after {', '.join(history)}: {violation}") from violation
        finally:
            counts["stories"] += 1
            if counts["stories"] % 100 == 0:
                gc.collect()  # closes the pipes of engines
        counts["states"] += 1
        counts["scaled" if story.change.exception() is None else "refused"] += 1
    return counts


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    monkeypatch.setattr(generation, "SECONDS_TO_END", 0.0)
    monkeypatch.setattr(replicas, "SECONDS_TO_END", 0.0)
    monkeypatch.setattr(replicas, "SECONDS_BETWEEN_STARTS", 0.0)


@pytest.mark.parametrize(
    "plot", [UP, DOWN, ABORTED, pytest.param(TWO, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)
def test_every_order_of_messages_with_at_most_one_fault(plot: Plot) -> None:
    counts = explore(plot)
    print(counts)
    assert min(counts["scaled"], counts["refused"]) > 20, counts


class EndsAfterAFailure(Story):
    """An engine that would end its requests if the replicas that serve failed."""

    @staticmethod
    def config_of(num_replicas: int) -> EngineConfig:
        return dataclasses.replace(config_of(num_replicas), on_failure="end")


@pytest.mark.parametrize("killed", ["1.0", "1.1"])
def test_a_new_replica_that_dies_after_it_was_ready(killed: str) -> None:
    story = EndsAfterAFailure(UP)
    for event in ("job", "load 1.0", "load 1.1", f"kill {killed}", "client"):
        story.play(event)
    story.finish()
    assert isinstance(story.change.exception(), ScaleError)


class ListensOnAPort(Story):
    @staticmethod
    def config_of(num_replicas: int) -> EngineConfig:
        return dataclasses.replace(config_of(num_replicas), kv_transfer_address="127.0.0.1:7000")


def test_two_generations_cannot_listen_on_one_port() -> None:
    with pytest.raises(SettingsError, match="without a port"):
        ListensOnAPort(UP)


class TakesOldUpdates(Replicas):
    """Updates of the processes that have served are taken after the change, beside those of the new ones."""

    def _let_serve(self, generation: Generation) -> None:
        old = self._generation if hasattr(self, "_generation") else None
        super()._let_serve(generation)
        if old is not None and old.end.alive:
            generation.index_of |= dict.fromkeys(old.index_of, 0)
            self._poll = ProcessPoll([*old.index_of, *generation.index_of], self._wake_up.fd)


class SwitchesTooEarly(Replicas):
    """Requests go to the new processes before these have loaded."""

    def _advance_scaling(self) -> None:
        loading = self._scaling.loading if self._scaling is not None else None
        if loading is not None:
            loading._loading.clear()
        super()._advance_scaling()


class ForgetsRequests(Replicas):
    """Requests are not continued by the new processes."""

    def _continue_requests(self) -> list[RequestUpdate]:
        return []


class ForgetsAborts(Replicas):
    """A request that was aborted before the change never ends."""

    def _continue_requests(self) -> list[RequestUpdate]:
        return [update for update in super()._continue_requests() if update.finish_reason != "abort"]


class OverlooksFailures(Replicas):
    """A process that fails while it loads is waited for."""

    def _advance_scaling(self) -> None:
        scaling = self._scaling
        if scaling is None or scaling.loading is None or not scaling.loading.group.has_failed:
            super()._advance_scaling()


@pytest.mark.parametrize(
    ("bug", "plot"),
    [
        (TakesOldUpdates, UP),
        (SwitchesTooEarly, UP),
        (ForgetsRequests, UP),
        (ForgetsAborts, ABORTED),
        (OverlooksFailures, DOWN),
    ],
)
def test_planted_bug_is_found(bug: type[Replicas], plot: Plot) -> None:
    with pytest.raises((AssertionError, AttributeError)):
        explore(plot, bug)


@pytest.fixture
def story() -> Story:
    return Story(UP)


def test_a_second_change_is_refused_until_the_first_is_over(story: Story) -> None:
    with pytest.raises(ScalingInProgressError, match="4"):
        story.engine.scale(4)
    story.finish()


def test_the_present_size_changes_nothing(story: Story) -> None:
    story.finish_change()
    num_groups = len(story.groups)
    again = story.engine.scale(2)
    assert again.done()
    assert again.exception() is None
    assert len(story.groups) == num_groups


@pytest.mark.parametrize("size", [0, 10**6])
def test_a_size_that_cannot_be_is_refused_and_changes_nothing(size: int) -> None:
    story = Story(UP)
    story.finish_change()
    with pytest.raises(SettingsError, match=str(size)):
        story.engine.scale(size)
    story.finish()


def test_a_shutdown_ends_both_generations(story: Story) -> None:
    for event in ("job", "load 1.0"):
        story.play(event)
    story.engine.shutdown()
    assert not story.alive
    assert isinstance(story.change.exception(), ScaleError)
    with pytest.raises(EngineError):
        story.engine.scale(3)


def on_a_gpu(num_replicas: int) -> EngineConfig:
    return dataclasses.replace(config_of(num_replicas), device="cuda")


class GpuStory(Story):
    """An engine whose devices hold one generation."""

    config_of = staticmethod(on_a_gpu)


def test_on_gpus_the_old_processes_end_first() -> None:
    story = GpuStory(UP)
    assert story.change.exception() is None
    assert [process.name for process in story.alive] == ["1.0", "1.1"]
    story.finish()


def test_on_gpus_the_old_size_is_started_again_if_the_new_one_cannot_be() -> None:
    story = GpuStory(UP, refused_sizes=(2,))
    assert isinstance(story.change.exception(), ScaleError)
    assert [process.name for process in story.alive] == ["1.0"]
    story.has_fault = True
    story.finish()


@pytest.mark.parametrize("num_refused", [0, 1])
def test_shrink_drops_a_replica_at_each_failure(num_refused: int) -> None:
    def shrinking(num_replicas: int) -> EngineConfig:
        return config_of(num_replicas, "shrink")

    sizes: list[int] = []
    groups: list[list[Process]] = []

    def start(config: EngineConfig) -> WorkerGroup:
        sizes.append(config.data_parallel_size)
        if 1 < len(sizes) <= 1 + num_refused:
            raise EngineError("a node has died")
        group = WorkerGroup()
        groups.append([Process(str(index), {}) for index in range(config.data_parallel_size)])
        for process in groups[-1]:
            process.load()
            group.engines.append(process.watched)
        return group

    engine = Replicas(shrinking(3), start, config_of=shrinking)
    for _ in range(3):
        groups[-1][-1].kill()
        engine.step()
    expected = [3, 2, 1, 1] if num_refused == 0 else [3, 2, 1, 1, 1]
    assert sizes == expected
    assert engine.config.data_parallel_size == len(engine.replica_stats) == 1
    engine.shutdown()
