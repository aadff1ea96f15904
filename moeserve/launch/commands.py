"""External commands that run as children of this process and end with it: Ray, remote shells, the user's command."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NoReturn

from moeserve.errors import EngineError, SettingsError

logger = logging.getLogger(__name__)

SECONDS_TO_END = 10.0
NUM_LINES_SHOWN = 15  # number of output lines shown of a command that failed
PR_SET_PDEATHSIG = 1  # an option of Linux's prctl


class Command:
    """A running command, and the last lines of its output."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process
        self._lines: deque[str] = deque(maxlen=NUM_LINES_SHOWN)
        self._reader: threading.Thread | None = None
        if process.stdout:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int:
        """The exit status as a shell reports it. Waits until the command has exited."""
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def last_output(self) -> str:
        """Return the last lines of output of a command that has exited."""
        if self._reader is not None:
            self._reader.join(1)
        return "\n".join(self._lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip())
            logger.info("%s: %s", self.name, line.rstrip())


@contextlib.contextmanager
def running(name: str, command: Sequence[str], environment: dict[str, str] | None) -> Iterator[Command]:
    """Run a command on this process's terminal, and terminate it when the context is left.

    Raises:
        SettingsError: the program does not exist.
    """
    process = _started(name, command, environment, stdin=None)
    with _ending(process):
        yield Command(name, process)


@contextlib.contextmanager
def running_in_background(
    name: str, command: Sequence[str], environment: dict[str, str] | None, stdin: str = ""
) -> Iterator[Command]:
    """Run a command in its own session, keep its last output, and terminate it when the context is left.

    The command also receives SIGTERM if this process is killed.

    Raises:
        SettingsError: the program does not exist.
    """
    process = _started(
        name,
        command,
        environment,
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # only this process handles a Ctrl-C in the terminal
        preexec_fn=_end_with_parent,
    )
    with _ending(process):
        if process.stdin:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(stdin)
                process.stdin.flush()
        yield Command(name, process)


def raise_ended(commands: Sequence[Command]) -> NoReturn:
    """Raise an error for the first command that has exited unexpectedly.

    Raises:
        SettingsError: the head refused this node's token.
        EngineError: the command exited for any other reason; the message has the last output.
    """
    ended = next(command for command in commands if not command.is_running)
    output = ended.last_output()
    if "InvalidAuthToken" in output:
        raise SettingsError(
            "the head has another token than this node: give all nodes the same RAY_AUTH_TOKEN or ~/.ray/auth_token"
        )
    raise EngineError(f"{ended.name} ended with status {ended.status}:\n{output}")


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP leave the context, so that all commands are terminated. Further signals are ignored."""

    def stop(number: int, _: object) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _started(
    name: str, command: Sequence[str], environment: dict[str, str] | None, **options: object
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, env=environment, text=True, errors="replace", **options)  # type: ignore[call-overload]
    except OSError as error:
        raise SettingsError(f"{name} cannot be started: {error}") from None


@contextlib.contextmanager
def _ending(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                if process.stdout:  # the command leads its own session
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        if process.stdin:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not supported on this system
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
