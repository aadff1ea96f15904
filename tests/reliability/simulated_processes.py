"""Processes of a simulated engine, and the bytes between them: late, in pieces, through small buffers, or lost."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable
from typing import Any

from virtual_time import Task, World

from moeserve.processes.channel import Channel
from moeserve.processes.failures import FailureReport
from moeserve.processes.supervision import SECONDS_TO_EXIT, send_failures

BUFFER_BYTES = 4096  # of a socket


class Direction:
    """The bytes from one socket to another. They are late, and come in pieces."""

    def __init__(self, world: World, source: socket.socket, target: socket.socket) -> None:
        self.world = world
        self.source, self.target = source, target
        self.bytes = bytearray()
        self.is_cut = False  # all bytes are lost
        self._is_sending = self._has_ended = False
        world.when_readable(source.fileno(), self._read)

    def close(self) -> None:
        self.world.when_readable(self.source.fileno(), None)
        self.bytes.clear()
        self._has_ended = False
        self.source.close()

    def _read(self) -> None:
        try:
            piece = self.source.recv(BUFFER_BYTES)
        except ConnectionResetError:
            piece = b""
        self.bytes += piece
        self._has_ended = not piece
        if self._has_ended or len(self.bytes) >= BUFFER_BYTES:
            self.world.when_readable(self.source.fileno(), None)
        self._send_later()

    def _send_later(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self.world.at(self.world.now + self.world.dice.uniform(0.0, 0.001), self._send)

    def _send(self) -> None:
        self._is_sending = False
        if self.is_cut:
            self.bytes.clear()
        if self.bytes:
            size = self.world.dice.choice([1, 7, 100, BUFFER_BYTES])
            try:
                del self.bytes[: self.target.send(memoryview(self.bytes)[:size], socket.MSG_NOSIGNAL)]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                self.bytes.clear()
        if self.bytes:
            self._send_later()
        elif self._has_ended:
            with contextlib.suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)
        if len(self.bytes) < BUFFER_BYTES and not self._has_ended and self.source.fileno() >= 0:
            self.world.when_readable(self.source.fileno(), self._read)


class Link:
    """The connection of two processes: a socket for each, and what carries the bytes between them."""

    def __init__(self, world: World) -> None:
        self.ours, here = socket.socketpair()
        there, self.theirs = socket.socketpair()
        for each in (self.ours, here, there, self.theirs):
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.to, self.back = Direction(world, here, there), Direction(world, there, here)

    def close(self) -> None:
        """Lose the connection, and what is on its way."""
        for direction in (self.to, self.back):
            direction.close()


class SimulatedProcess:
    """A simulated process. See `ProcessHandle`."""

    def __init__(self, world: World, name: str, run: Callable[[SimulatedProcess], None]) -> None:
        self.world = world
        self.name = name
        self.link = Link(world)
        self.children: list[SimulatedProcess] = []
        self.when_ended: list[Callable[[], None]] = []
        self._ended_fd = os.eventfd(0)
        self._cause: str | None = None
        self._is_closed = False
        self.task: Task = world.start(name, functools.partial(self._run, run))

    @property
    def watched_fds(self) -> list[int]:
        return [self._ended_fd]

    def exit_cause(self) -> str | None:
        return self._cause

    def kill(self) -> None:
        self.end("killed by SIGKILL")

    def wait(self, timeout_s: float) -> bool:
        return self._cause is not None or bool(self.world.wait(lambda: self._cause is not None, max(0.0, timeout_s)))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.link.close()
            os.close(self._ended_fd)

    def fail(self, channel: Channel[Any], reports: list[FailureReport]) -> None:
        """Report failures, and end once the reports are on their way."""
        send_failures(channel, reports)
        self.world.wait(lambda: not self.link.back.bytes, SECONDS_TO_EXIT)
        self.end("ended with exit status 1")

    def end(self, cause: str) -> None:
        """End the process and its children, which watch it."""
        if self._cause is None:
            self._cause = cause
            self.world.kill(self.task)
            self.link.theirs.close()
            os.eventfd_write(self._ended_fd, 1)
            for act in self.when_ended:
                act()
            for child in self.children:
                child.end("killed by SIGKILL")

    def _run(self, run: Callable[[SimulatedProcess], None]) -> None:
        run(self)
        self.end("ended with exit status 0")
