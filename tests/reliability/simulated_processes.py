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
        self.next_s = 0.0  # of the next piece
        self.is_cut = False  # all bytes are lost
        self.has_ended = False

    def carry(self) -> None:
        if len(self.bytes) < BUFFER_BYTES and not self.has_ended:
            try:
                piece = self.source.recv(BUFFER_BYTES)
            except BlockingIOError:
                pass
            except ConnectionResetError:
                self.has_ended = True
            else:
                self.has_ended = not piece
                self.bytes += piece
                self._wait_a_moment()
        if self.is_cut:
            self.bytes.clear()
        elif self.bytes and self.next_s <= self.world.now:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                size = self.world.dice.choice([1, 7, 100, BUFFER_BYTES])
                del self.bytes[: self.target.send(memoryview(self.bytes)[:size], socket.MSG_NOSIGNAL)]
            self._wait_a_moment()
        elif self.has_ended and not self.bytes:
            with contextlib.suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)

    def _wait_a_moment(self) -> None:
        self.next_s = self.world.now + self.world.dice.uniform(0.0, 0.001)
        self.world.at(self.next_s, lambda: None)


class Link:
    """The connection of two processes: a socket for each, and what carries the bytes between them."""

    def __init__(self, world: World) -> None:
        self.ours, here = socket.socketpair()
        there, self.theirs = socket.socketpair()
        for each in (self.ours, here, there, self.theirs):
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._between = here, there
        self.to, self.back = Direction(world, here, there), Direction(world, there, here)
        world.between_turns += [self.to.carry, self.back.carry]
        self._world = world

    def close(self) -> None:
        """Lose the connection, and what is on its way."""
        for direction in (self.to, self.back):
            if direction.carry in self._world.between_turns:
                self._world.between_turns.remove(direction.carry)
        for each in self._between:
            each.close()


class SimulatedProcess:
    """A simulated process. See `ProcessHandle`."""

    def __init__(self, world: World, name: str, run: Callable[[SimulatedProcess], None]) -> None:
        self.world = world
        self.name = name
        self.link = Link(world)
        self.children: list[SimulatedProcess] = []
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
            self.task.is_killed = True
            self.link.theirs.close()
            os.eventfd_write(self._ended_fd, 1)
            for child in self.children:
                child.end("killed by SIGKILL")

    def _run(self, run: Callable[[SimulatedProcess], None]) -> None:
        run(self)
        self.end("ended with exit status 0")
