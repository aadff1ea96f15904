"""Starts watched processes on this host, through the fork server where there can be one."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from moeserve.errors import EngineError
from moeserve.processes.channel import frame
from moeserve.processes.child import FIRST_BYTE, Launch
from moeserve.processes.failures import shown_status
from moeserve.processes.interpreter import same_modules
from moeserve.processes.logs import log_format, log_level
from moeserve.processes.memory_kills import MEMORY_KILLS
from moeserve.processes.supervision import ProcessHandle, WatchedProcess, open_pidfd

if sys.platform == "linux":
    from moeserve.processes import fork_server


def start_process(
    target: str,
    name: str,
    config: Any,
    incoming: Any,
    *,
    environment: Mapping[str, str],
    records_fd: int | None = None,
    channel: socket.socket | None = None,
) -> WatchedProcess[Any]:
    """Start a process that calls a function, and send it its configuration.

    The process is in a session of its own, so a Ctrl-C in the terminal reaches this process alone. The new process ends
    when this process ends or is killed.

    Args:
        target: "module:function"; the function is called with a `child.Parent`.
        name: the process's name in messages: "rank 3".
        config: anything that msgspec can encode; the function reads it with `Parent.config`.
        incoming: type of the messages that the process sends; None if it sends none.
        environment: the environment variables of the process.
        records_fd: a file of `ProgressRecords`, which the process finds as `Parent.records_fd`.
        channel: a connection over which the process exchanges messages with another host; None: with this process.

    Raises:
        EngineError: this Python cannot start another Python, or the limits on processes or open files do not allow it.
    """
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            handle = _forked(target, environment, theirs) or SpawnedProcess(target, environment, theirs)
        with contextlib.suppress(BrokenPipeError):  # a process that has ended is noticed later
            fds = [] if records_fd is None else [records_fd]
            if channel is not None:
                assert fds, "the process finds the channel behind the records"
                fds.append(channel.fileno())
            socket.send_fds(ours, [FIRST_BYTE], fds)
    except OSError as error:
        raise EngineError(f"{name} could not be started: {error}; see `ulimit -n` and `ulimit -u`") from None
    process: WatchedProcess[Any] = WatchedProcess(name, ours, incoming, handle)
    launch = Launch(
        name=name,
        parent_pid=os.getpid(),
        log_level=log_level(),
        log_format=log_format(),
        config=msgspec.Raw(msgspec.msgpack.encode(config)),
    )
    process.channel.send_frame(frame(launch))
    return process


def _forked(target: str, environment: Mapping[str, str], channel: socket.socket) -> ProcessHandle | None:
    """Start a process through the fork server. Return None if the server cannot start the process."""
    if sys.platform == "linux":
        return fork_server.fork(target, environment, channel)
    else:
        return None


class SpawnedProcess:
    """A process that was started without a fork server. See `ProcessHandle`."""

    def __init__(self, target: str, environment: Mapping[str, str], channel: socket.socket) -> None:
        if not sys.executable:
            raise EngineError("sys.executable is empty, so this Python cannot start the processes of ranks")
        fd = channel.fileno()
        self._cause: str | None = None
        self._num_memory_kills = MEMORY_KILLS.count()
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "moeserve.processes", "child", str(fd), target],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            env=dict(environment) | same_modules(),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._pidfd = open_pidfd(self.pid)

    @property
    def watched_fds(self) -> list[int]:
        return [] if self._pidfd is None else [self._pidfd]

    def exit_cause(self) -> str | None:
        if self._cause is None and (status := self._process.poll()) is not None:
            self._cause = shown_status(status, self._num_memory_kills)
        return self._cause

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
