"""The engine process's ear: how long an idle replica sleeps, and what wakes it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from moeserve.engine.process import HEARTBEAT_S, User
from moeserve.errors import EngineError
from moeserve.processes.channel import Channel
from moeserve.protocol import ReplicaMessage, ReplicaStats, Shutdown, Wake
from moeserve.scheduling.replica import Deliver


@pytest.fixture
def ends() -> Iterator[tuple[User, Channel[object]]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield User(Channel(theirs, ReplicaMessage)), Channel(ours, object)


def seconds_asleep(user: User) -> float:
    started = time.monotonic()
    assert user.receive(block=True, heartbeat=True) == []
    return time.monotonic() - started


def test_a_wake_up_is_good_for_two_agreements(ends: tuple[User, Channel[object]]) -> None:
    user, channel = ends
    channel.send(Wake())
    assert user.receive(block=True, heartbeat=True) == [Wake()]
    assert seconds_asleep(user) < HEARTBEAT_S / 2
    assert seconds_asleep(user) > HEARTBEAT_S / 2


def test_who_is_to_leave_sleeps_no_more(ends: tuple[User, Channel[object]]) -> None:
    user, channel = ends
    channel.send(Shutdown())
    assert user.receive(block=True, heartbeat=True) == [Shutdown()]
    assert max(seconds_asleep(user) for _ in range(5)) < HEARTBEAT_S / 2


def test_a_busy_replica_does_not_wait(ends: tuple[User, Channel[object]]) -> None:
    user, _ = ends
    started = time.monotonic()
    assert user.receive(block=False, heartbeat=False) == []
    assert time.monotonic() - started < HEARTBEAT_S / 2


def test_nothing_is_told_twice_while_idle(ends: tuple[User, Channel[object]]) -> None:
    """A message per heartbeat would pile up where nobody listens."""
    user, channel = ends
    for step in range(5):
        user.tell(Deliver([], ReplicaStats(num_free_blocks=7, num_waiting=0, num_running=0, step=step)))
    user.tell(Deliver([], ReplicaStats(num_free_blocks=6, num_waiting=0, num_running=0, step=9)))
    assert len(channel.receive(1.0)) == 2


def test_the_end_of_the_user_is_an_error(ends: tuple[User, Channel[object]]) -> None:
    user, channel = ends
    channel.close()
    with pytest.raises(EngineError, match="has gone"):
        user.receive(block=True, heartbeat=False)
