"""Watched processes, which may run anywhere: their messages, their failures, and their end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from moeserve.interrupts import interrupts_allowed
from moeserve.processes.channel import Channel
from moeserve.processes.failures import FailureReport

Incoming = TypeVar("Incoming")
Member = TypeVar("Member", bound="Watched")

# Time in which consequences of a failure are collected, so that the first cause can be named. Seconds.
SECONDS_TO_COLLECT = 0.5
# Interval of polling for ended processes where the system has no pidfd. Seconds.
POLL_INTERVAL_S = 0.2
# Time for a process to exit by itself before it is killed. Seconds.
SECONDS_TO_EXIT = 2.0


class _Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last message of a process that fails. All reports are in one message, so none can be lost alone."""

    reports: list[FailureReport]


class ProcessHandle(Protocol):
    """Control of one process: a child of this process or of the fork server, a process elsewhere, or a Ray actor."""

    @property
    def watched_fds(self) -> list[int]:
        """File descriptors that become readable when the process ends; empty if the system has none."""
        ...

    def exit_cause(self) -> str | None:
        """Return how the process ended, in one line; None while it runs."""
        ...

    def kill(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        """Return True if the process ended in time."""
        ...

    def close(self) -> None:
        """Release the handle of a process that has ended. May be called twice."""
        ...


class Watched(Protocol):
    """Another process, or a loop inside this process. This process waits for it to end, or ends it."""

    @property
    def name(self) -> str: ...

    @property
    def fds(self) -> list[int]:
        """File descriptors of which one becomes readable when there is something to receive, or a failure."""
        ...

    @property
    def ends_silently(self) -> bool:
        """True if none of `fds` becomes readable when the process ends, so that its end must be polled."""
        ...

    @property
    def has_messages(self) -> bool:
        """True if there is something to receive although none of `fds` is readable."""
        ...

    @property
    def unsent_fd(self) -> int | None:
        """A file descriptor that becomes writable when `flush` can send more. None if everything was sent."""
        ...

    def flush(self, timeout_s: float = 0.0) -> object:
        """Send as much of the pending data as the other end accepts within the timeout."""
        ...

    def failures(self) -> list[FailureReport]:
        """Return the failures of this process and of its own children; empty while all these processes run."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Return True if the process ended by itself in time."""
        ...

    def kill(self) -> None: ...

    def close(self) -> None:
        """Release the resources of a process that has ended. May be called twice."""
        ...


class WatchedProcess(Generic[Incoming]):
    """A process with which this process exchanges messages, and its failures. See `Watched`."""

    def __init__(self, name: str, connection: socket.socket, incoming: Any, handle: ProcessHandle) -> None:
        """
        Args:
            name: the process's name in messages: "rank 3".
            connection: this side of its channel.
            incoming: type of the messages that the process sends; None if it sends only failure reports.
        """
        self.name = name
        self.channel: Channel[Incoming | _Failed] = Channel(connection, incoming | _Failed)
        self.handle = handle
        self._messages: list[Incoming] = []  # read by `failures`
        self._reports: list[FailureReport] = []

    @property
    def has_ended(self) -> bool:
        return self.handle.exit_cause() is not None

    @property
    def fds(self) -> list[int]:
        return [*([] if self.channel.is_closed else [self.channel.fileno()]), *self.handle.watched_fds]

    @property
    def ends_silently(self) -> bool:
        return not self.handle.watched_fds

    @property
    def has_messages(self) -> bool:
        return bool(self._messages)

    @property
    def unsent_fd(self) -> int | None:
        return self.channel.fileno() if self.channel.has_unsent and not self.channel.is_closed else None

    def send(self, message: Any) -> None:
        """Send a message without waiting; see `Channel.send`."""
        self.channel.send(message)

    def flush(self, timeout_s: float = 0.0) -> None:
        self.channel.flush(timeout_s)

    def receive(self, timeout_s: float = 0.0) -> list[Incoming]:
        """Return all messages that have arrived, failure reports excepted, after waiting for the first one."""
        self._read(0.0 if self._messages else timeout_s)
        messages, self._messages = self._messages, []
        return messages

    def failures(self) -> list[FailureReport]:
        cause = self.handle.exit_cause()  # before the channel is read: a report is sent before the process ends
        with contextlib.suppress(msgspec.DecodeError):  # the last message may be incomplete
            self._read(0.0)
        if self._reports:
            return self._reports
        return [] if cause is None else [FailureReport(name=self.name, cause=cause)]

    def wait(self, timeout_s: float) -> bool:
        return self.handle.wait(timeout_s)

    def kill(self) -> None:
        self.handle.kill()

    def close(self) -> None:
        self.channel.close()
        self.handle.close()

    def _read(self, timeout_s: float) -> None:
        for message in self.channel.receive(timeout_s):
            if isinstance(message, _Failed):
                self._reports += message.reports
            else:
                self._messages.append(message)


def send_failures(channel: Channel[Any], reports: Sequence[FailureReport]) -> None:
    """Send failure reports to the process at the other end, and wait a moment until they are sent."""
    channel.send(_Failed(list(reports)))
    channel.flush(SECONDS_TO_EXIT)


def collect_failures(
    processes: Sequence[Watched], seen: Sequence[FailureReport] = (), *, seconds: float = SECONDS_TO_COLLECT
) -> list[FailureReport]:
    """Return the failures known shortly after the first failure; return early once a root cause is among them.

    Args:
        seen: failures that may follow from failures of the processes. They come last.
    """
    deadline = time.monotonic() + seconds
    while True:
        by_process = [process.failures() for process in processes]
        reports = [*(report for each in by_process for report in each), *seen]
        running = [process for process, failed in zip(processes, by_process, strict=True) if not failed]
        left = deadline - time.monotonic()
        if left <= 0 or not running or any(not report.is_consequence for report in reports):
            return reports
        _wait(running, left)


def wait_for_messages(processes: Sequence[Watched], timeout_s: float | None, *fds: int) -> None:
    """Wait for a message or the end of any process, or until an fd is readable; send what could not be sent before."""
    # A message that `failures` has read does not make the socket readable again.
    _wait(processes, 0.0 if any(process.has_messages for process in processes) else timeout_s, *fds)


class ProcessPoll(Generic[Member]):
    """Finds which of many processes have something to be read, without touching the others."""

    def __init__(self, processes: Sequence[Member], *other_fds: int) -> None:
        """
        Args:
            other_fds: end a wait when they become readable.
        """
        self._processes = list(processes)
        self._poll = select.poll()
        register(self._processes, self._poll)
        for fd in other_fds:
            self._poll.register(fd, select.POLLIN)
        self._process_of_fd = {fd: process for process in self._processes for fd in process.fds}
        self._silently_ending = [process for process in self._processes if process.ends_silently]

    def ready(self, timeout_s: float | None = 0.0) -> list[Member]:
        """Return the processes that have sent a message or ended, after waiting for the first one. Send pending data.

        A Ctrl-C that was deferred is raised while this waits.
        """
        unsent = [(process, fd) for process in self._processes if (fd := process.unsent_fd) is not None]
        found = dict.fromkeys(process for process in self._processes if process.has_messages)
        if found:
            timeout_s = 0.0
        elif self._silently_ending:
            timeout_s = POLL_INTERVAL_S if timeout_s is None else min(timeout_s, POLL_INTERVAL_S)
        for _, fd in unsent:
            self._poll.modify(fd, select.POLLIN | select.POLLOUT)
        if timeout_s == 0.0:
            events = self._poll.poll(0)
        else:
            with interrupts_allowed():
                events = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        for process, fd in unsent:
            self._poll.modify(fd, select.POLLIN)
            process.flush()
        found |= dict.fromkeys(self._silently_ending)
        found |= dict.fromkeys(self._process_of_fd[fd] for fd, _ in events if fd in self._process_of_fd)
        return list(found)


def register(processes: Sequence[Watched], poll: select.poll) -> None:
    """Register the descriptors that are ready once a process sends a message, accepts unsent data, or ends."""
    for process in processes:
        for fd in process.fds:
            poll.register(fd, select.POLLIN)
        if (unsent_fd := process.unsent_fd) is not None:
            poll.register(unsent_fd, select.POLLIN | select.POLLOUT)


def _wait(processes: Sequence[Watched], timeout_s: float | None, *other_fds: int) -> None:
    poll = select.poll()
    register(processes, poll)
    for fd in other_fds:
        poll.register(fd, select.POLLIN)
    if any(process.ends_silently for process in processes):
        timeout_s = POLL_INTERVAL_S if timeout_s is None else min(timeout_s, POLL_INTERVAL_S)
    with interrupts_allowed():
        poll.poll(None if timeout_s is None else timeout_s * 1000)
    for process in processes:
        if process.unsent_fd is not None:
            process.flush()


def end_all(processes: Sequence[Watched], *, patience_s: float = 0.0) -> None:
    """Wait for processes to exit by themselves, then kill those that have not. No process runs afterwards."""
    deadline = time.monotonic() + patience_s
    for process in processes:
        process.flush(max(0.0, deadline - time.monotonic()))
        process.wait(deadline - time.monotonic())
    for process in processes:
        process.kill()
    deadline = time.monotonic() + SECONDS_TO_EXIT
    for process in processes:
        process.wait(deadline - time.monotonic())
        process.close()


def open_pidfd(pid: int) -> int | None:
    """Return a file descriptor that is readable once the process has ended; None if the system has no pidfds."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            return os.pidfd_open(pid)
    return None
