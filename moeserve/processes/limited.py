"""`LimitedProcess`: answers messages in a process of its own, within limits of time and memory.

It runs grammars and chat templates, which come from clients and checkpoints: their cost is known only once they run. A
process that exceeds a limit ends, and the next message starts another process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

START_DEADLINE_S = 60.0
MEMORY_STATUS = 3  # exit status after an allocation of Python that failed
# Exit statuses: too much processor time, allocations that failed, and recursion that a library does not bound.
STATUSES_OF_LIMITS = (-signal.SIGPROF, MEMORY_STATUS, -signal.SIGABRT, -signal.SIGSEGV)
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """The limits of a process."""

    cpu_seconds: float  # maximum processor time of one answer
    deadline_s: float  # maximum time of one answer, also if the process does not run
    max_added_bytes: int  # address space that one answer may add
    max_kept_bytes: int  # memory that the process may keep before it is replaced
    max_answers: int  # maximum number of answers of one process
    niceness: int = 0


class StartError(Exception):
    """A process has refused its first message, or has ended before it was ready."""


class LimitedProcess:
    """Sends messages to a process and returns its answers.

    The process is started for the first message. Thread-safe.
    """

    def __init__(
        self,
        module: str,
        limits: ProcessLimits,
        environment: Callable[[], dict[str, str]],
        first_message: Callable[[], bytes],
    ) -> None:
        """
        Args:
            module: module that is run in the process, and calls `answer_messages`.
            environment: returns the environment of a process.
            first_message: returns the first message of each process.
        """
        self._module, self._limits = module, limits
        self._environment, self._first_message = environment, first_message
        self._process: _Process | None = None
        self._lock = threading.Lock()
        self.num_processes = 0  # number of processes that were started

    def answer(self, message: bytes) -> bytes | None:
        """Return the answer to a message; None if the computation of the answer exceeds a limit.

        Raises:
            StartError: a process does not start.
        """
        with self._lock:
            for _ in range(2):  # again if something else ended the process
                if self._process is None or self._process.creator != os.getpid():
                    self._process = _Process(self._module, self._environment(), self._first_message())
                    self.num_processes += 1
                process = self._process
                answer = process.exchange(message, self._limits.deadline_s)
                if answer is not None:
                    return answer
                self._end()
                if process.has_exceeded_limits:
                    break
        return None

    def close(self) -> None:
        """End the process. A later message starts another process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One process that answers messages. It ends when this process ends, because its input then ends."""

    def __init__(self, module: str, environment: dict[str, str], first_message: bytes) -> None:
        self.creator = os.getpid()  # a fork of the creator must not use the process
        self._is_late = False
        self._socket, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=other.fileno(),
                stderr=subprocess.DEVNULL,  # the system's message when an allocation fails
                env=environment,
                start_new_session=True,  # so that Ctrl-C in the terminal reaches only this process
            )
        refusal = self.exchange(first_message, START_DEADLINE_S)
        if refusal != b"":
            self.end()
            raise StartError("its process ended" if refusal is None else refusal.decode())

    @property
    def has_exceeded_limits(self) -> bool:
        """True if a limit of time or memory has ended the process."""
        return self._is_late or self._process.returncode in STATUSES_OF_LIMITS

    def exchange(self, message: bytes, timeout_s: float) -> bytes | None:
        """Return the answer to a message; None if the process ended before, or was too late."""
        self._socket.settimeout(timeout_s)
        try:
            _send(self._socket, message)
            return _received(self._socket)
        except TimeoutError:
            self._is_late = True
        except OSError:  # the process has ended
            pass
        return None

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


def answer_messages(start: Callable[[bytes], Callable[[bytes], bytes]], limits: ProcessLimits) -> None:
    """Answer the messages of a `LimitedProcess`, in its process.

    Args:
        start: returns the function that answers messages. `start` gets the first message, and raises StartError to
            refuse.
    """
    os.nice(limits.niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=os.dup(0)) as peer, contextlib.suppress(ConnectionError):
        first = _received(peer)
        if first is None:
            return
        try:
            answer = start(first)
        except StartError as error:
            _send(peer, str(error).encode())
            return
        _send(peer, b"")
        address_space, kept = _memory_bytes()
        if address_space:
            limit = address_space + limits.max_added_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            for _ in range(limits.max_answers):
                message = _received(peer)
                if message is None:
                    return
                signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)  # its signal ends the process
                result = answer(message)
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                _send(peer, result)
                if _memory_bytes()[1] > kept + limits.max_kept_bytes:
                    return
        except MemoryError:
            os._exit(MEMORY_STATUS)


def _send(peer: socket.socket, message: bytes) -> None:
    peer.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)


def _received(peer: socket.socket) -> bytes | None:
    """Return the next message; None at the end of the input."""
    length = _exactly(peer, _LENGTH_BYTES)
    return None if length is None else _exactly(peer, int.from_bytes(length, "little"))


def _exactly(peer: socket.socket, num_bytes: int) -> bytes | None:
    """Return the next `num_bytes` bytes; None if the other end closes before."""
    received = bytearray(num_bytes)
    rest = memoryview(received)
    while rest:
        num_received = peer.recv_into(rest)
        if not num_received:
            return None
        rest = rest[num_received:]
    return bytes(received)


def _memory_bytes() -> tuple[int, int]:
    """Return this process's address space, and the part of it that is in memory; zeros if the system has no /proc."""
    statm = Path("/proc/self/statm")
    pages = statm.read_text().split() if statm.exists() else ["0", "0"]
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()
