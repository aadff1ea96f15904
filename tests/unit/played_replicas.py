"""Parts of an engine that a test plays: processes that load and compute tokens, and work in the background."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from test_engine_restart import PlayedProcess

from moeserve.config.engine_config import EngineConfig
from moeserve.engine.launcher import WorkerGroup
from moeserve.engine.protocol import FromReplica, Ready
from moeserve.processes.channel import Channel
from moeserve.processes.supervision import WatchedProcess
from moeserve.processes.wake_up import WakeUp
from moeserve.protocol import AbortRequest, AddRequest, Delivery, ReplicaMessage, ReplicaStats, RequestUpdate, Shutdown

STATS = ReplicaStats(num_free_blocks=1000, num_waiting=0, num_running=0, num_rounds=0)
MOST_BYTES = 2**16  # unread in a socket


def token_of(name: str, position: int) -> int:
    return ord(name) * 100 + position


class Job(threading.Thread):
    """Work in the background, which can stop at each wake-up of the engine until the test lets it go on."""

    def __init__(self, work: Callable[[], None], *, pauses: bool) -> None:
        super().__init__(daemon=True)
        self._work, self._pauses = work, pauses
        self._may_go_on, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self.num_turns = 0
        self.is_over = False
        self._is_dropped = False

    def take_turn(self) -> None:
        """Let the work go on, to its next wake-up or to its end."""
        self.num_turns += 1
        if not self._pauses:
            self._work()
            self.is_over = True
            return
        if self.num_turns == 1:
            self.start()
        else:
            self._may_go_on.release()
        self._has_stopped.acquire()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self.is_over = True
        self._has_stopped.release()

    def pause(self) -> None:
        """Wait for the next turn. Called by the work."""
        self._has_stopped.release()
        self._may_go_on.acquire()
        if self._is_dropped:
            raise SystemExit

    def drop(self) -> None:
        """End work that is paused."""
        if self.is_alive():
            self._is_dropped = True
            self._may_go_on.release()
            self.join()


class PausingWakeUp(WakeUp):
    """A wake-up at which jobs pause."""

    def wake(self) -> None:
        super().wake()
        if isinstance(job := threading.current_thread(), Job):
            job.pause()


class Group:
    """The processes of all replicas. They sleep while there are no requests, and compute only if all are awake."""

    def __init__(self, num_replicas: int, name: str, lengths: dict[str, int]) -> None:
        self.processes = [Process(self, f"{name}.{index}", lengths) for index in range(num_replicas)]
        self.was_used = False  # it has received something

    def workers(self, release: Callable[[], None] = lambda: None) -> WorkerGroup:
        """Return the group as the engine knows it."""
        return WorkerGroup([process.watched for process in self.processes], release=release)

    @property
    def is_awake(self) -> bool:
        return all(process.cause is None and process.is_awake for process in self.processes)

    def rest(self) -> None:
        """Let all processes sleep if none has a request."""
        if not any(process.num_tokens or process.mail for process in self.processes):
            for process in self.processes:
                process.is_awake = False

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.watched.close()


class Process(PlayedProcess):
    """An engine process that computes a token of each of its requests at a time."""

    def __init__(self, group: Group, name: str, lengths: dict[str, int]) -> None:
        self._connection, self._theirs = socket.socketpair()
        self.watched: WatchedProcess[Any] = WatchedProcess(name, self._connection, FromReplica, self)
        self.group, self.name, self.lengths = group, name, lengths
        self._channel: Channel[Any] = Channel(self._theirs, ReplicaMessage)
        self._ended_fd: int | None = os.eventfd(0)
        self.is_ready = self.is_awake = False
        self.num_sent = 0  # messages
        self.num_tokens: dict[str, int] = {}  # of each request, the given ones included

    @property
    def watched_fds(self) -> list[int]:  # type: ignore[override]
        return [] if self._ended_fd is None else [self._ended_fd]

    def kill(self) -> None:
        if self.cause is None:
            super().kill()
            self._channel.close()
            assert self._ended_fd is not None
            os.eventfd_write(self._ended_fd, 1)

    def close(self) -> None:
        if self._ended_fd is not None:
            os.close(self._ended_fd)
            self._ended_fd = None

    @property
    def mail(self) -> bytes:
        """Messages that the process has not taken."""
        if self.cause is not None:
            return b""
        try:
            return self._theirs.recv(MOST_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return b""

    @property
    def num_unread(self) -> int:
        """Bytes that the engine has not read."""
        if self._connection.fileno() == -1:
            return 0
        (num_bytes,) = struct.unpack("i", fcntl.ioctl(self._connection, termios.FIONREAD, bytes(4)))
        return int(num_bytes)

    @property
    def can_step(self) -> bool:
        return bool(self.num_tokens) and self.group.is_awake

    def state(self) -> Any:
        """Return all that decides what the process can do from now on."""
        tokens = tuple(self.num_tokens.items())
        counts = (self.num_sent, self.num_unread)
        return self.cause is None, self.is_ready, self.is_awake, counts, self.mail, tokens

    def load(self) -> None:
        self.is_ready = True
        self.num_sent += 1
        self._channel.send(Ready(num_blocks=1000))

    def take(self) -> None:
        self.is_awake = self.group.was_used = True
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
        self.group.rest()

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
        self.group.rest()

    def _deliver(self, update: RequestUpdate) -> None:
        self.num_sent += 1
        self._channel.send(Delivery([update], STATS))


@dataclass(frozen=True)
class PlayedLauncher:
    """A `Launcher` that calls a function of the test."""

    start: Callable[[EngineConfig], WorkerGroup]

    def close(self) -> None:
        pass
