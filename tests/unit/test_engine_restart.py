"""An engine that restarts its processes after a failure: when, how often it tries, and the ends of requests."""

from __future__ import annotations

import functools
import os
import select
import socket
from typing import Any, ClassVar

import load_windows
import msgspec
import pytest
from test_config import FACTS

from moeserve.config.engine_config import EngineConfig
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.engine import engine as engine_module
from moeserve.engine import generation, in_flight, restart
from moeserve.engine.engine import Engine
from moeserve.engine.launcher import WorkerGroup
from moeserve.engine.protocol import FromReplica, Ready
from moeserve.errors import CheckpointError, EngineError, RequestError, SettingsError
from moeserve.processes.channel import Channel
from moeserve.processes.supervision import ProcessPoll, WatchedProcess
from moeserve.protocol import (
    AddRequest,
    CollectLoad,
    Delivery,
    ReplicaMessage,
    ReplicaStats,
    Request,
    RequestUpdate,
    Shutdown,
)
from moeserve.sampling_params import RequestParams
from moeserve.telemetry.expert_load import LoadWindow


@functools.cache
def config_of(num_replicas: int, on_failure: str = "restart") -> EngineConfig:
    settings = parse_settings({"data_parallel_size": num_replicas, "executor": "mp", "on_failure": on_failure})
    return resolve(settings, FACTS, MachineFacts(num_cores=2))


CONFIG, RESTARTING = config_of(2, "end"), config_of(2)
STATS = ReplicaStats(num_free_blocks=1, num_waiting=0, num_running=1, num_rounds=1)
WINDOW = load_windows.of_counts([[2]], [[2]])


class PlayedProcess:
    """A process that ends when the test lets it. See `ProcessHandle`."""

    watched_fds: ClassVar[list[int]] = []
    cause: str | None = None

    def exit_cause(self) -> str | None:
        return self.cause

    def kill(self) -> None:
        self.cause = self.cause or "killed by SIGKILL"

    def wait(self, timeout_s: float) -> bool:
        return self.cause is not None


class EngineProcess(PlayedProcess):
    """An engine process that only receives."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process: WatchedProcess[Any] = WatchedProcess("rank 0", ours, FromReplica, self)
        self._channel: Channel[Any] = Channel(theirs, ReplicaMessage)
        self._channel.send(Ready(num_blocks=10**4))
        self._received: list[Any] = []

    @property
    def received(self) -> list[Any]:
        """All messages but wake-ups: the id of a request that was added, or the message."""
        shown = [each.request.request_id if isinstance(each, AddRequest) else each for each in self.messages]
        return [each for each in shown if isinstance(each, str | Shutdown)]

    @property
    def requests(self) -> list[Request]:
        """The requests that were added."""
        return [each.request for each in self.messages if isinstance(each, AddRequest)]

    @property
    def messages(self) -> list[Any]:
        self._received += self._channel.receive()
        return self._received

    def send(self, update: RequestUpdate) -> None:
        self._channel.send(Delivery([update], STATS))

    def answer(self, window: LoadWindow) -> None:
        self._channel.send(Delivery([], STATS, window, answers=True))

    def close(self) -> None:
        pass


class Machine:
    """A `Launcher` of one engine process, which raises the faults that the test has set."""

    def __init__(self) -> None:
        self.engines: list[EngineProcess] = []
        self.num_starts = 0
        self.num_closed = 0
        self.sizes: list[int] = []  # of all starts
        self.faults: list[BaseException] = []  # raised by the next starts
        self.lasting_fault: Exception | None = None  # raised by all starts after these

    def start(self, config: EngineConfig) -> WorkerGroup:
        self.num_starts += 1
        self.sizes.append(config.parallel.data_parallel_size)
        if self.faults:
            raise self.faults.pop(0)
        if self.lasting_fault:
            raise self.lasting_fault
        self.engines.append(EngineProcess())
        return WorkerGroup([self.engines[-1].process])

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "SECONDS_TO_RESTART", 0.5)
    monkeypatch.setattr(restart, "SECONDS_BETWEEN_STARTS", 0.005)
    monkeypatch.setattr(generation, "SECONDS_TO_END", 0.0)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def engine(machine: Machine) -> Engine:
    return Engine(RESTARTING, machine, config_of=config_of)


def request(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=[1], params=RequestParams(), seed=0)


def test_requests_continue_on_new_processes_after_the_tokens_that_came(engine: Engine, machine: Machine) -> None:
    for name in ("begun", "new", "aborted"):
        engine.add(request(name))
    machine.engines[0].send(RequestUpdate(request_id="begun", token_ids=[5, 6]))
    assert [update.token_ids for update in engine.step()] == [[5, 6]]
    engine.abort("aborted")
    machine.engines[0].cause = "killed by SIGKILL"
    (update,) = engine.step()
    assert (update.request_id, update.finish_reason) == ("aborted", "abort")
    assert machine.engines[1].received == ["begun", "new"]
    assert [added.output_token_ids for added in machine.engines[1].requests] == [[5, 6], []]
    machine.engines[1].send(RequestUpdate(request_id="begun", token_ids=[7]))
    assert [update.token_ids for update in engine.step()] == [[7]]
    machine.engines[1].cause = "killed by SIGKILL"
    machine.lasting_fault = None
    engine.add(request("another"))
    assert [added.output_token_ids for added in machine.engines[2].requests] == [[5, 6, 7], [], []]


@pytest.mark.parametrize("text", [dict(cache_salt="\ud800"), dict(request_id="\udc00")])
def test_a_request_that_cannot_be_encoded_leaves_nothing(engine: Engine, machine: Machine, text: Any) -> None:
    with pytest.raises(RequestError):
        engine.add(msgspec.structs.replace(request("bad"), **text))
    assert not engine.has_work
    assert machine.engines[0].received == []
    engine.add(request("bad"))
    assert machine.engines[0].received == ["bad"]


def test_requests_end_after_several_failures_without_a_token(engine: Engine, machine: Machine) -> None:
    engine.add(request("poison"))
    for number in range(in_flight.MAX_FRUITLESS_RESTARTS + 1):
        machine.engines[number].cause = f"cause {number}"
        engine.add(request(str(number))) if number == 0 else engine.num_free_blocks
    ends = engine.step()
    assert {update.request_id for update in ends} >= {"poison"}
    assert all(f"cause {in_flight.MAX_FRUITLESS_RESTARTS}" in str(update.error) for update in ends)


def test_a_request_beside_a_poisonous_one_continues(engine: Engine, machine: Machine) -> None:
    """Restarts end, although another request gets tokens between the failures."""
    engine.add(request("poison"))
    engine.add(request("healthy"))
    updates: list[RequestUpdate] = []
    for number in range(in_flight.MAX_FRUITLESS_RESTARTS + 1):
        machine.engines[number].send(RequestUpdate(request_id="healthy", token_ids=[number]))
        machine.engines[number].cause = f"cause {number}"
        updates += engine.step()
    (end,) = (update for update in updates if update.finish_reason)
    assert (end.request_id, machine.engines[-1].received) == ("poison", ["healthy"])
    assert f"cause {in_flight.MAX_FRUITLESS_RESTARTS}" in str(end.error)
    assert [each for update in updates for each in update.token_ids] == machine.engines[-1].requests[0].output_token_ids


def test_a_poisonous_request_alone_ends_before_the_next_restart(engine: Engine, machine: Machine) -> None:
    engine.add(request("poison"))
    for number in range(in_flight.MAX_FRUITLESS_RESTARTS + 1):
        machine.engines[number].kill()
        engine.num_free_blocks  # noqa: B018
    assert machine.num_starts == in_flight.MAX_FRUITLESS_RESTARTS + 1
    assert [update.request_id for update in engine.step()] == ["poison"]
    engine.add(request("healthy"))
    assert machine.engines[-1].received == ["healthy"]


def test_a_restart_ends_soon_if_the_engine_is_to_end(
    engine: Engine, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "SECONDS_TO_RESTART", 1000.0)
    engine.add(request("begun"))
    machine.engines[0].kill()
    machine.lasting_fault = EngineError("no resources")
    engine.cancel_restart()  # as another thread does
    (end,) = engine.step()
    assert end.finish_reason == "abort"
    assert "no resources" in str(end.error)
    assert machine.num_starts == 2


def test_ctrl_c_during_a_restart_loses_nothing(engine: Engine, machine: Machine) -> None:
    engine.add(request("begun"))
    machine.engines[0].send(RequestUpdate(request_id="begun", token_ids=[5, 6]))
    machine.engines[0].kill()
    machine.faults = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [update.token_ids for update in engine.step()] == [[5, 6]]
    assert [added.output_token_ids for added in machine.engines[1].requests] == [[5, 6]]


def test_a_restart_collects_loads_again(engine: Engine, machine: Machine) -> None:
    engine.add(request("one"))
    engine.collect_load()
    machine.engines[0].kill()
    engine.num_free_blocks  # noqa: B018
    machine.engines[1].answer(WINDOW)
    assert engine.take_loads(wait=True) == [WINDOW]
    assert CollectLoad() in machine.engines[1].messages


def test_loads_that_cannot_come_raise_a_named_error(engine: Engine, machine: Machine) -> None:
    engine.collect_load()
    machine.engines[0].kill()
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        engine.take_loads(wait=True)
    engine.add(request("one"))
    assert CollectLoad() not in machine.engines[1].messages
    assert engine.take_loads(wait=True) == []


def test_a_wake_up_is_for_the_next_step_and_ends_no_other_wait(
    engine: Engine, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add(request("one"))
    engine.collect_load()
    engine.wake()
    waits: list[float | None] = []

    def ready(poll: ProcessPoll, timeout_s: float | None = 0.0) -> list[WatchedProcess[Any]]:
        if timeout_s != 0.0:
            waits.append(timeout_s)
            assert not select.select([engine._wake_up.fd], [], [], 0)[0], "the wait would end at once"
            machine.engines[0].answer(WINDOW)
        return poll_ready(poll, timeout_s)

    poll_ready = ProcessPoll.ready
    monkeypatch.setattr(ProcessPoll, "ready", ready)
    assert len(engine.take_loads(wait=True)) == len(waits) == 1
    assert engine.step() == []


@pytest.mark.parametrize("how", [CONFIG, RESTARTING])
def test_a_failure_without_requests_is_noticed_when_free_blocks_are_read(machine: Machine, how: EngineConfig) -> None:
    engine = Engine(how, machine, config_of=config_of)
    machine.engines[0].kill()
    engine.num_free_blocks  # noqa: B018
    assert machine.num_starts == 1
    if how is RESTARTING:
        assert engine.refusal == ""  # the next request is accepted
        machine.lasting_fault = EngineError("no node")
        with pytest.raises(EngineError):
            engine.add(request("one"))
        assert engine.refusal == ""
        engine.shutdown()
    assert engine.refusal


def test_ends_are_not_lost_where_no_new_processes_can_be_started(engine: Engine, machine: Machine) -> None:
    engine.add(request("one"))
    machine.engines[0].kill()
    machine.lasting_fault = EngineError("no node")
    with pytest.raises(EngineError):
        engine.add(request("two"))
    assert engine.has_work
    assert [update.request_id for update in engine.step()] == ["one"]
    machine.lasting_fault = None
    engine.add(request("three"))  # tries again
    assert machine.engines[1].received == ["three"]


def test_a_start_that_fails_is_tried_again(engine: Engine, machine: Machine) -> None:
    machine.engines[0].kill()
    machine.faults = [EngineError("no node"), SettingsError("no room"), CheckpointError("half there")]
    engine.add(request("one"))
    assert machine.num_starts == 5
    assert machine.engines[1].received == ["one"]


def test_after_the_deadline_the_last_fault_is_raised(engine: Engine, machine: Machine) -> None:
    machine.engines[0].kill()
    machine.faults = [EngineError("not this one")]
    machine.lasting_fault = SettingsError("the nodes have no room")
    with pytest.raises(EngineError, match="the nodes have no room") as refusal:
        engine.add(request("one"))
    assert refusal.value.__cause__ is machine.lasting_fault
    assert machine.num_starts > 3


def test_a_fault_of_our_own_is_not_tried_again(engine: Engine, machine: Machine) -> None:
    machine.engines[0].kill()
    machine.lasting_fault = KeyError("slip")
    with pytest.raises(KeyError):
        engine.add(request("one"))
    assert machine.num_starts == 2


def test_the_first_start_is_tried_once_and_closes_what_it_used(machine: Machine) -> None:
    machine.lasting_fault = CheckpointError("no such model")
    with pytest.raises(CheckpointError):
        Engine(RESTARTING, machine, config_of=config_of)
    assert (machine.num_starts, machine.num_closed) == (1, 1)


def test_shutdown_ends_the_processes_and_closes_once(engine: Engine, machine: Machine) -> None:
    machine.engines[0].kill()
    engine.add(request("one"))
    assert machine.num_closed == 0
    engine.shutdown()
    engine.shutdown()
    assert machine.num_closed == 1
    assert isinstance(machine.engines[1].received[-1], Shutdown)
    with pytest.raises(EngineError):
        engine.add(request("two"))
    assert machine.num_starts == 2


@pytest.mark.parametrize("reports_hangs", [False, True])
def test_silence_is_a_failure_unless_replicas_report_hangs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, reports_hangs: bool
) -> None:
    """Such as a replica in this process whose only request waits for blocks of another engine."""
    engine = Engine(CONFIG, machine, config_of=config_of)
    engine.add(request("one"))
    engine._generation.group.reports_hangs = reports_hangs
    monkeypatch.setattr(engine_module, "MOST_SILENT_STEPS", 0)
    engine.num_free_blocks  # noqa: B018
    assert engine.has_failed != reports_hangs


def test_an_engine_that_does_not_restart_refuses_requests_after_a_failure(machine: Machine) -> None:
    engine = Engine(CONFIG, machine, config_of=config_of)
    machine.engines[0].kill()
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        engine.add(request("one"))
    assert machine.num_starts == 1


def test_a_fork_starts_and_closes_nothing(engine: Engine, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.engines[0].kill()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(EngineError):
            engine.add(request("one"))
        engine.shutdown()
    assert (machine.num_starts, machine.num_closed) == (1, 0)
