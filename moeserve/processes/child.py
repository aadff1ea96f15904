"""The life of a process that `start_process` started, from its first message to its exit."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from moeserve.processes.channel import Channel, receive_frame
from moeserve.processes.failures import FailureReport, report_of
from moeserve.processes.logs import LogFormat, start_log
from moeserve.processes.supervision import (
    POLL_INTERVAL_S,
    WatchedProcess,
    collect_failures,
    open_pidfd,
    send_failures,
)

Config = TypeVar("Config")

PR_SET_NAME = 15  # Linux
FIRST_BYTE = b"\0"  # sent to a child before the first message, with file descriptors


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a child."""

    name: str
    parent_pid: int
    log_level: int
    log_format: LogFormat
    config: msgspec.Raw


class Parent:
    """The process that started this one: the configuration from it, the channel to it, and failure reports to it."""

    def __init__(
        self,
        connection: socket.socket,
        launch: Launch,
        pidfd: int | None,
        records_fd: int | None = None,
        channel: socket.socket | None = None,
    ) -> None:
        """
        Args:
            pidfd: pidfd of the parent; None if the system has no pidfds.
            records_fd: a file of `ProgressRecords`, for this process and its children; None: no records are written.
            channel: a connection to another host, from which the request to start this process came; None: the
                connection to the parent.
        """
        self.name = launch.name
        self.records_fd = records_fd
        self._config = launch.config
        self._socket = channel or connection
        self._channel: Channel[Any] | None = None
        self._children: Sequence[WatchedProcess[Any]] = ()
        threading.Thread(
            target=_end_with_parent, args=(connection, pidfd, launch.parent_pid), name="watch-parent", daemon=True
        ).start()

    def config(self, kind: type[Config]) -> Config:
        """Return the configuration that the parent passed to `start_process`."""
        return msgspec.msgpack.decode(self._config, type=kind)

    def channel(self, incoming: Any) -> Channel[Any]:
        """Return the channel to the parent. May be called once.

        Args:
            incoming: type of the messages that the parent sends.
        """
        self._channel = Channel(self._socket, incoming)
        return self._channel

    def fail(self, reports: Sequence[FailureReport]) -> NoReturn:
        """Report failures of this process and of its children to the parent, and terminate all of them."""
        reports = collect_failures(self._children, reports)
        for child in self._children:
            child.handle.kill()
        send_failures(self._channel or self.channel(None), reports)
        _exit(1)

    def adopt(self, children: Sequence[WatchedProcess[Any]]) -> None:
        """Report failures of children like failures of this process, and terminate the children with this process."""
        self._children = children


def run(target: str, connection: socket.socket, parent_pidfd: int | None = None) -> NoReturn:
    """Call a function with this process's `Parent`, report an exception of the function to the parent, and exit.

    Nothing is released at exit, because waiting for a collective could block if its other ranks have exited.

    Args:
        target: "module:function".
        parent_pidfd: pidfd of the parent; None: this process is a child of the parent, and opens the pidfd itself.
    """
    connection.setblocking(True)
    try:
        _, fds, *_ = socket.recv_fds(connection, len(FIRST_BYTE), 2)
        launch = msgspec.msgpack.decode(receive_frame(connection), type=Launch)
    except (EOFError, OSError):  # the parent ended before it sent anything
        _exit(1)
    start_log(launch.log_level, launch.log_format, process=launch.name)
    _set_process_name(launch.name)
    if parent_pidfd is None:
        parent_pidfd = open_pidfd(launch.parent_pid)
        if os.getppid() != launch.parent_pid:
            _exit(1)
    channel = socket.socket(fileno=fds[1]) if len(fds) > 1 else None
    parent = Parent(connection, launch, parent_pidfd, fds[0] if fds else None, channel)
    try:
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(parent)
    except BaseException as error:
        parent.fail([report_of(error, parent.name)])
    _exit(0)


def _end_with_parent(connection: socket.socket, pidfd: int | None, pid: int) -> None:
    """Exit when the parent process has exited, even if other threads are busy."""
    poll = select.poll()
    poll.register(connection, 0)  # hang-ups only: messages are for the main thread
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)
    while not poll.poll(POLL_INTERVAL_S * 1000 if pidfd is None else None):
        if os.getppid() != pid:
            break
    os._exit(1)


def _set_process_name(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show: "rank 3". The command line is that of the fork server."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.partition(" (")[0].encode()[:15])


def _exit(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
