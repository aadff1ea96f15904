"""An engine of 320 replicas, whose processes are played by the test: work that does not grow with their number."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from test_engine_restart import CONFIG

from moeserve.config.engine_config import EngineConfig
from moeserve.engine.engine import Engine
from moeserve.engine.launcher import WorkerGroup
from moeserve.engine.protocol import FromReplica, Ready
from moeserve.processes.channel import Channel
from moeserve.processes.failures import FailureReport
from moeserve.processes.supervision import WatchedProcess
from moeserve.protocol import AddRequest, Delivery, ReplicaMessage, ReplicaStats, Request, RequestUpdate, Sample, Wake
from moeserve.sampling_params import RequestParams

NUM_REPLICAS = 320
STATS = ReplicaStats(num_free_blocks=10_000, num_waiting=0, num_running=0, num_rounds=0)


class Handle:
    """A process that does not end before the test says so."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.cause: str | None = None

    @property
    def watched_fds(self) -> list[int]:
        return [self.fd]

    def exit_cause(self) -> str | None:
        return self.cause

    def kill(self) -> None:
        self.cause = self.cause or "killed by SIGKILL"

    def wait(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class CountedProcess(WatchedProcess[FromReplica]):
    """Counts how often the engine looks at each process."""

    looks: ClassVar[Counter[str]] = Counter()

    def receive(self, timeout_s: float = 0.0) -> list[FromReplica]:
        self.looks[self.name] += 1
        return super().receive(timeout_s)

    def failures(self) -> list[FailureReport]:
        self.looks[self.name] += 1
        return super().failures()


class Machine:
    """A `Launcher`, and the processes of all replicas from their own side."""

    def __init__(self) -> None:
        self.channels: list[Channel[ReplicaMessage]] = []
        self.handles: list[Handle] = []

    def start(self, config: EngineConfig) -> WorkerGroup:
        group = WorkerGroup()
        for index in range(NUM_REPLICAS):
            ours, theirs = socket.socketpair()
            self.channels.append(Channel(theirs, ReplicaMessage))
            self.handles.append(Handle())
            group.replicas.append(CountedProcess(f"engine {index}", ours, FromReplica, self.handles[-1]))
            self.channels[-1].send(Ready(num_blocks=10_000))
        return group

    def close(self) -> None:
        pass

    def received(self) -> list[list[Any]]:
        return [channel.receive() for channel in self.channels]


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def engine(machine: Machine) -> Iterator[Engine]:
    engine = Engine(CONFIG, machine, config_of=lambda _: CONFIG)
    CountedProcess.looks.clear()
    yield engine
    for handle in machine.handles:
        handle.cause = "the test is over"
    engine.shutdown()


def request(name: str, token_ids: list[int]) -> Request:
    return Request(request_id=name, prompt_token_ids=token_ids, params=RequestParams(), seed=0)


def test_only_processes_with_news_are_looked_at(engine: Engine, machine: Machine) -> None:
    for number in range(NUM_REPLICAS):
        engine.add(request(str(number), [number] * 64))
    assert not CountedProcess.looks
    machine.channels[7].send(Delivery([RequestUpdate(request_id="7", token_ids=[5])], STATS))
    assert [update.request_id for update in engine.step()] == ["7"]
    assert CountedProcess.looks.keys() == {"engine 7"}
    machine.handles[9].cause = "killed by SIGKILL"
    os.eventfd_write(machine.handles[9].fd, 1)
    ends = engine.step()
    assert len(ends) == NUM_REPLICAS
    assert all("engine 9: killed by SIGKILL" in (update.error or "") for update in ends)


def test_one_wake_up_for_each_replica_whatever_is_added(engine: Engine, machine: Machine) -> None:
    for number in range(3):
        engine.add(request(str(number), [number] * 64))
    assert not [message for messages in machine.received() for message in messages if isinstance(message, Wake)]
    engine.wake()
    engine.step()
    assert [messages.count(Wake()) for messages in machine.received()] == [1] * NUM_REPLICAS
    engine.wake()
    engine.step()
    assert not any(machine.received())


def test_samples_reach_each_replica_in_one_message(engine: Engine, machine: Machine) -> None:
    """The replicas that serve them get the prompt once."""
    engine.add(request("0", [3] * 64), [Sample(str(index), index) for index in range(1, 1000)])
    messages = [message for each in machine.received() for message in each]
    assert len(messages) == NUM_REPLICAS
    served = [each for message in messages if isinstance(message, AddRequest) for each in message.requests]
    assert sorted(int(each.request_id) for each in served) == list(range(1000))
    assert all(each.seed == int(each.request_id) for each in served)


@pytest.mark.parametrize("has_common_prefix", [False, True])
def test_a_request_is_added_in_a_fraction_of_a_millisecond(
    engine: Engine, machine: Machine, has_common_prefix: bool
) -> None:
    """Ten times the measured time of this thread on a processor."""
    seconds = []
    for number in range(3 * NUM_REPLICAS):
        token_ids = [1] * 512 if has_common_prefix else [number] * 512
        token_ids[-1] = number
        added = request(str(number), token_ids)
        began = time.thread_time()
        engine.add(added)
        seconds.append(time.thread_time() - began)
        if number % 100 == 0:
            machine.received()
    assert statistics.median(seconds) < 2e-3
    print(f"{statistics.median(seconds) * 1e6:.0f} µs")
