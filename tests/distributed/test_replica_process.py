"""Messages between a replica and its client: how long an idle replica sleeps, and what wakes it."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from moeserve.engine import replica_process
from moeserve.engine.replica_process import HEARTBEAT_S, ClientConnection
from moeserve.errors import EngineError
from moeserve.processes.channel import Channel
from moeserve.protocol import Delivery, ReplicaMessage, ReplicaStats, RequestUpdate, Shutdown, Wake
from moeserve.telemetry.step_totals import StepTotals


@pytest.fixture
def ends() -> Iterator[tuple[ClientConnection, Channel[object]]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ClientConnection(Channel(theirs, ReplicaMessage), max_rounds=2), Channel(ours, object)


def test_after_a_wake_up_all_rounds_that_may_be_in_flight_end_without_sleep(
    ends: tuple[ClientConnection, Channel[object]],
) -> None:
    client, channel = ends
    channel.send(Wake())
    assert client.receive() == [Wake()]
    assert [client.sleep_s(heartbeat=True) for _ in range(3)] == [0.0, 0.0, HEARTBEAT_S]


def test_a_replica_that_is_shut_down_does_not_sleep(ends: tuple[ClientConnection, Channel[object]]) -> None:
    client, channel = ends
    channel.send(Shutdown())
    assert client.receive() == [Shutdown()]
    assert {client.sleep_s(heartbeat=True) for _ in range(5)} == {0.0}


def test_without_other_replicas_nothing_but_a_message_ends_the_sleep(
    ends: tuple[ClientConnection, Channel[object]],
) -> None:
    assert ends[0].sleep_s(heartbeat=False) is None


def test_an_idle_replica_sends_nothing_twice(ends: tuple[ClientConnection, Channel[object]]) -> None:
    """Else messages would pile up while nobody receives."""
    client, channel = ends
    for step in range(5):
        client.deliver(Delivery([], ReplicaStats(num_free_blocks=7, num_waiting=0, num_running=0, num_rounds=step)))
    client.deliver(Delivery([], ReplicaStats(num_free_blocks=6, num_waiting=0, num_running=0, num_rounds=9)))
    assert len(channel.receive(1.0)) == 2


def test_a_running_request_without_updates_is_no_silence(
    ends: tuple[ClientConnection, Channel[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt has no updates for many steps."""
    client, channel = ends
    monkeypatch.setattr(replica_process, "HEARTBEAT_S", 0.0)
    for step in range(5):
        client.deliver(Delivery([], ReplicaStats(num_free_blocks=7, num_waiting=0, num_running=1, num_rounds=step)))
    assert len(channel.receive(1.0)) == 5


def test_the_steps_of_others_are_reported_while_there_are_some(
    ends: tuple[ClientConnection, Channel[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, channel = ends
    monkeypatch.setattr(replica_process, "HEARTBEAT_S", 0.0)
    for num_steps in (0, 1, 2, 2, 2):
        steps = StepTotals(num_idle_steps=num_steps)
        stats = ReplicaStats(num_free_blocks=7, num_waiting=0, num_running=0, num_rounds=9, steps=steps)
        client.deliver(Delivery([], stats))
    assert len(channel.receive(1.0)) == 3


def test_what_the_socket_does_not_take_at_once_is_sent_later(ends: tuple[ClientConnection, Channel[object]]) -> None:
    """Also if nothing is delivered after it."""
    client, channel = ends
    updates = [RequestUpdate(request_id="0", token_ids=[5] * 2_000_000)]
    client.deliver(Delivery(updates, ReplicaStats(num_free_blocks=7, num_waiting=0, num_running=0, num_rounds=1)))
    received: list[object] = []
    for _ in range(1000):
        received += channel.receive(0.01)
        if received:
            break
        poll = select.poll()
        client.register(poll)
        assert poll.poll(10_000)
        client.receive()
    assert len(received) == 1


def test_the_end_of_the_user_is_an_error(ends: tuple[ClientConnection, Channel[object]]) -> None:
    client, channel = ends
    channel.close()
    with pytest.raises(EngineError):
        client.receive()
