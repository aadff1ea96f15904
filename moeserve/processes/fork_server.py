"""A process that has loaded torch and the engine, and forks ranks, which then start in milliseconds.

A process starts its server with its first rank, and the server exits with that process. The server stays after an
engine has been shut down, so that the next start is fast. Ranks can start further ranks through the same server.
Environment variables, working folder, import path, usable cores and output of a new process are those of the process
that requests the new process. A fork cannot change variables that libraries have read while they were loaded, so there
is one server for each set of such variables. The servers and `MEMORY_KILLS` are the only process-wide state of the
package: a second engine must find the server of the first.

If a server cannot be used or was killed, processes are started without it. Processes that the server has forked
continue.

Linux only: libraries of macOS do not survive a fork, and without pidfds a process can watch only its own children.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from moeserve.errors import EngineError
from moeserve.processes import child
from moeserve.processes.channel import frame, receive_frame
from moeserve.processes.failures import shown_status
from moeserve.processes.interpreter import import_path, same_modules, working_folder
from moeserve.processes.local_sockets import NO_SIGNAL
from moeserve.processes.memory_kills import MEMORY_KILLS
from moeserve.processes.streams import copy_of_stream

assert sys.platform == "linux"

# Prefixes of environment variables that the interpreter, the loader or libraries read only once, as they start.
READ_AT_START = (
    *("ATEN_", "CUDA_", "GLIBC_", "GOMP_", "HF_", "KMP_", "LD_", "MALLOC_", "MKL_", "MOESERVE_ISA", "NUMEXPR_", "OMP_"),
    *("OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_"),
)
SECONDS_TO_FORK = 120.0  # the server may still be loading torch
# Seconds to wait for an exit status, which the server reports at once unless it is stopped or busy.
SECONDS_TO_REPORT = 2.0
NUM_FDS = 5  # sent with each request
MAX_REQUEST_BYTES = 2**20  # more than the socket takes


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """A process to fork. Names and paths are bytes, as the system has them."""

    target: str
    environment: dict[bytes, bytes]
    path: list[bytes]
    folder: bytes
    cores: list[int]


# ---- The side that requests processes


class ForkedProcess:
    """A process that the fork server started. See `ProcessHandle`."""

    def __init__(self, pid: int, pidfd: int, reports: socket.socket) -> None:
        """
        Args:
            reports: socket on which the server sends the exit status.
        """
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._reports = reports
        self._cause: str | None = None
        self._num_memory_kills = MEMORY_KILLS.count()

    @property
    def watched_fds(self) -> list[int]:
        return [] if self._pidfd is None else [self._pidfd]

    def exit_cause(self) -> str | None:
        if self._cause is None and self._has_ended(0.0):
            self._reports.settimeout(SECONDS_TO_REPORT)
            try:
                status = msgspec.msgpack.decode(receive_frame(self._reports), type=int)
                self._cause = shown_status(status, self._num_memory_kills)
            except (EOFError, OSError):
                self._cause = "ended; its exit status is unknown, because the fork server was killed or is stopped"
        return self._cause

    def kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        return self._has_ended(max(0.0, timeout_s)) and self.exit_cause() is not None

    def close(self) -> None:
        self._reports.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _has_ended(self, timeout_s: float) -> bool:
        if self._cause is not None or self._pidfd is None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))


class _Server:
    """A connection to a running fork server, with the server's process if this process has started the server."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._control = control
        self._process = process
        self.has_ended = False

    def fork(self, request: _Request, channel: socket.socket) -> ForkedProcess | None:
        """Fork a process whose channel is `channel`. Return None if the server has exited or could not fork.

        Raises:
            EngineError: the server does not respond.
        """
        ours, theirs = socket.socketpair()
        opened: list[int] = []
        try:
            with theirs:
                opened += [copy_of_stream(1), copy_of_stream(2), os.pidfd_open(os.getpid())]
                fds = [theirs.fileno(), channel.fileno(), *opened]
                socket.send_fds(self._control, [msgspec.msgpack.encode(request)], fds)
            ours.settimeout(SECONDS_TO_FORK)
            pid, received, *_ = socket.recv_fds(ours, 64, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            self.has_ended = True
            raise EngineError(f"the fork server did not respond within {SECONDS_TO_FORK:g} s") from None
        except OSError:
            received, self.has_ended = [], True
            if self._process is not None:
                self._process.poll()  # so that it is no zombie
        finally:
            for fd in opened:
                os.close(fd)
        if not received:
            ours.close()
            return None
        return ForkedProcess(int(pid), received[0], ours)

    def end(self) -> None:
        """Disconnect. The server then terminates all its processes, and exits."""
        self._control.close()
        if self._process is not None:
            try:
                self._process.wait(SECONDS_TO_REPORT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


_servers: dict[frozenset[tuple[str, str]], _Server] = {}  # by the variables that libraries read as they start
_owner = 0  # process id: a fork of this process has servers of its own
_lock = threading.Lock()


def is_available() -> bool:
    """True if this Python can watch and signal processes that are not its children."""
    return hasattr(os, "pidfd_open")


def start(environment: Mapping[str, str]) -> _Server:
    """Return the server for an environment, and start it if it does not run. The server may still be loading torch."""
    global _owner
    with _lock:
        if _owner != os.getpid():
            _owner = os.getpid()
            _servers.clear()
        key = _key(environment)
        if key not in _servers:
            _servers[key] = _started(environment)
        return _servers[key]


def fork(target: str, environment: Mapping[str, str], channel: socket.socket) -> ForkedProcess | None:
    """Start a process through the server. Return None if that fails; the process must then be started without a server.

    Args:
        target: "module:function", called with the process's `Parent`.
        channel: the process's end of its channel.
    """
    if not is_available():
        return None
    request = _Request(
        target=target,
        environment={os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
        path=[os.fsencode(folder) for folder in import_path()],
        folder=os.fsencode(working_folder()),
        cores=sorted(os.sched_getaffinity(0)),
    )
    try:
        server = start(environment)
    except OSError:  # this Python cannot start another
        return None
    try:
        return server.fork(request, channel)
    finally:
        if server.has_ended:
            with _lock:
                _servers.pop(_key(environment), None)


def _key(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in ("PYTHONPATH", "PYTHONSAFEPATH")
    )


def _started(environment: Mapping[str, str]) -> _Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "moeserve.processes", "fork-server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # Processes that are forked must not inherit a library that had threads.
            env=dict(environment) | same_modules() | {"OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # a Ctrl-C in the terminal is handled by this process alone
        )
    server = _Server(ours, process)
    atexit.register(_end_at_exit, server, os.getpid())  # keeps the server connected if it is replaced
    return server


def _end_at_exit(server: _Server, owner: int) -> None:
    if os.getpid() == owner:
        server.end()


# ---- The server


@dataclass(frozen=True)
class _Forked:
    """The task of a forked process, and its connections."""

    request: _Request
    channel: socket.socket
    control: socket.socket  # through which the process can fork further processes
    parent_pidfd: int


class _ServerLoop:
    """Forks processes on request, and reports their exit statuses.

    A process is killed when the process that requested it exits, because a stopped process could not exit by itself.
    """

    def __init__(self, control: socket.socket) -> None:
        self._first = control.fileno()  # closed when the process that started the server ends
        self._user = os.pidfd_open(os.getppid())  # a fork of that process may hold a copy of the socket
        self._controls = {self._first: control}
        self._children: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: process id, and the socket for its status
        self._pidfds: dict[int, int] = {}  # pidfds of children, by the socket where the status goes
        self._poll = select.poll()
        self._poll.register(self._first, select.POLLIN)
        self._poll.register(self._user, select.POLLIN)

    def run(self) -> _Forked:
        """Serve requests. Returns in forked processes only."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._user:
                    self._end()
                elif fd in self._children:
                    self._report_exit(fd)
                elif fd in self._pidfds:  # the reader of the status has ended
                    self._poll.unregister(fd)
                    signal.pidfd_send_signal(self._pidfds.pop(fd), signal.SIGKILL)
                elif fd in self._controls:
                    forked = self._answer(fd)
                    if forked is not None:
                        return forked

    def _answer(self, fd: int) -> _Forked | None:
        """Fork the process that the next request describes.

        Return its `_Forked` in the new process, and None in the server.
        """
        data, fds, *_ = socket.recv_fds(self._controls[fd], MAX_REQUEST_BYTES, NUM_FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            if fd == self._first:
                self._end()
            self._poll.unregister(fd)
            self._controls.pop(fd).close()
            return None
        reports, channel = socket.socket(fileno=fds[0]), socket.socket(fileno=fds[1])
        *output, parent_pidfd = fds[2:]
        control, control_of_child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = msgspec.msgpack.decode(data, type=_Request)
        with contextlib.suppress(Exception):  # the process itself will report what is wrong
            importlib.import_module(request.target.partition(":")[0])
        gc.collect()
        gc.freeze()  # so that collections in a process copy no memory that it shares with the server
        try:
            pid = os.fork()
        except OSError:  # memory is exhausted: the process that requested the fork reads an end of file
            pid = -1
        if pid == 0:
            reports.close()
            control.close()
            self._close_all()
            for number, each in enumerate(output, start=1):
                os.dup2(each, number)
                os.close(each)
            return _Forked(request, channel, control_of_child, parent_pidfd)
        channel.close()
        control_of_child.close()
        for passed in (*output, parent_pidfd):
            os.close(passed)
        if pid < 0:
            reports.close()
            control.close()
            return None
        pidfd = os.pidfd_open(pid)
        self._controls[control.fileno()] = control
        self._children[pidfd] = pid, reports
        self._pidfds[reports.fileno()] = pidfd
        for watched in (pidfd, control.fileno()):
            self._poll.register(watched, select.POLLIN)
        self._poll.register(reports, 0)  # hang-ups only
        with contextlib.suppress(OSError):
            socket.send_fds(reports, [str(pid).encode()], [pidfd])
        return None

    def _report_exit(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid, reports = self._children.pop(pidfd)
        if self._pidfds.pop(reports.fileno(), None) is not None:
            self._poll.unregister(reports)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with reports, contextlib.suppress(OSError):
            reports.send(frame(status), NO_SIGNAL)

    def _end(self) -> NoReturn:
        """Terminate all processes, including stopped ones, and the server."""
        for pidfd in self._children:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pid, _ in self._children.values():
            os.waitpid(pid, 0)
        os._exit(0)

    def _close_all(self) -> None:
        for control in self._controls.values():
            control.close()
        for pidfd, (_, reports) in self._children.items():
            os.close(pidfd)
            reports.close()
        os.close(self._user)


def main(control_fd: int) -> NoReturn:
    """Run a server. In each process that the server forks, run the target of the request."""
    forked = _ServerLoop(socket.socket(fileno=control_fd)).run()
    request = forked.request
    os.setsid()
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.cores)
    os.environ.clear()
    os.environb.update(request.environment)
    sys.path[:] = [os.fsdecode(folder) for folder in request.path]
    sys.argv = [request.target]
    importlib.invalidate_caches()
    for each in (forked.channel, forked.control):
        each.set_inheritable(False)
    _adopt(request.environment, forked.control)
    child.run(request.target, forked.channel, forked.parent_pidfd)


def _adopt(environment: Mapping[bytes, bytes], control: socket.socket) -> None:
    """Use the server that forked this process for all processes that this process starts."""
    global _owner
    _owner = os.getpid()
    decoded = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    _servers[_key(decoded)] = _Server(control)
