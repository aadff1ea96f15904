"""Actors of Ray: which failures of their calls end them, and when they import torch."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")
from ray.exceptions import GetTimeoutError, RayActorError  # noqa: E402

from moeserve.executor.ray import actors  # noqa: E402
from moeserve.executor.ray.records import SECONDS_WITHOUT_ANSWER, ActorRecords  # noqa: E402
from moeserve.processes.progress_records import ProgressRecord  # noqa: E402

RECORD = ProgressRecord(heartbeat=3, round=2)
ENCODED = struct.pack("=6Q2IQ", *RECORD)


class Method:
    """A method of an actor. Its calls are executed when their result is requested."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def remote(self, *arguments: bytes) -> Callable[[], object]:
        return lambda: self._function(*arguments)


class Actor:
    """An actor whose calls do what the test has set."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.timeouts: list[float | None] = []  # of calls
        self.is_serving = True
        self.fails_to_read: Exception | None = None
        self.fails_to_write: Exception | None = None
        self.read, self.write = Method(self._read), Method(self._write)

    def _read(self) -> tuple[bytes, bytes]:
        time.sleep(0.005)
        if self.fails_to_read:
            raise self.fails_to_read
        return b"", ENCODED if self.is_serving else b""

    def _write(self, data: bytes) -> None:
        if self.fails_to_write:
            raise self.fails_to_write
        self.written.append(data)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    actor = Actor()

    def get(call: Callable[[], object], timeout: float | None = None) -> object:
        actor.timeouts.append(timeout)
        return call()

    monkeypatch.setattr(ray, "get", get)
    return actor


@pytest.fixture
def handle_and_socket(actor: Actor) -> Iterator[tuple[actors.ActorHandle, socket.socket]]:
    ours, tunnel = socket.socketpair()
    handle = actors.ActorHandle(actor, "rank 0", tunnel)
    yield handle, ours
    handle.close()
    ours.close()


def exit_cause(handle: actors.ActorHandle) -> str:
    poll = select.poll()
    poll.register(handle.watched_fds[0], select.POLLIN)
    assert poll.poll(60_000), "the failure is not noticed"
    assert handle.wait(0.0)
    return str(handle.exit_cause())


def test_a_failed_write_ends_an_actor_whose_reads_are_answered(
    actor: Actor, handle_and_socket: tuple[actors.ActorHandle, socket.socket]
) -> None:
    handle, ours = handle_and_socket
    actor.fails_to_write = MemoryError("no room for the call")
    assert handle.exit_cause() is None
    ours.send(b"message")
    assert "MemoryError: no room for the call" in exit_cause(handle)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (GetTimeoutError("slow"), "no answer for"),
        (RayActorError(error_msg="its node has died"), "its node has died"),
        (ValueError("gone"), "ValueError: gone"),
    ],
)
def test_a_failed_read_ends_an_actor(
    actor: Actor, handle_and_socket: tuple[actors.ActorHandle, socket.socket], error: Exception, cause: str
) -> None:
    handle, _ = handle_and_socket
    actor.fails_to_read = error
    assert cause in exit_cause(handle)


def test_an_actor_that_loads_the_model_may_be_silent_for_longer(
    actor: Actor, handle_and_socket: tuple[actors.ActorHandle, socket.socket]
) -> None:
    handle, _ = handle_and_socket

    def wait_for_timeout(seconds: float) -> None:
        deadline = time.monotonic() + 200
        while actor.timeouts[-1:] != [seconds]:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    wait_for_timeout(actors.SECONDS_OF_SILENCE)
    actor.is_serving = False
    wait_for_timeout(actors.SECONDS_TO_START)
    assert handle.record == ProgressRecord()
    actor.is_serving = True
    wait_for_timeout(actors.SECONDS_OF_SILENCE)
    assert handle.record == RECORD


def test_records_of_a_node_are_unknown_once_none_of_its_actors_answers() -> None:
    now_s = time.monotonic()
    late_s = now_s - 100 * SECONDS_WITHOUT_ANSWER
    handles = [SimpleNamespace(record=RECORD, answered_s=at_s) for at_s in (late_s, now_s + 1000, late_s, late_s)]
    assert ActorRecords(handles, "AABB").read() == [RECORD, RECORD, None, None]  # type: ignore[arg-type]


def test_closing_is_no_failure(actor: Actor, handle_and_socket: tuple[actors.ActorHandle, socket.socket]) -> None:
    handle, ours = handle_and_socket
    ours.send(b"message")
    ours.shutdown(socket.SHUT_WR)  # all bytes are carried first
    deadline = time.monotonic() + 200
    while b"".join(actor.written) != b"message":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    handle.close()
    assert handle.exit_cause() is None


def test_a_rank_imports_torch_before_it_answers_calls() -> None:
    """The import can block Python for longer than a process may be silent."""
    program = (
        "import sys; from moeserve.executor.ray.actors import RankActor; assert 'torch' not in sys.modules; "
        "RankActor('rank 0', 30, 'text'); assert 'moeserve.worker.worker' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
