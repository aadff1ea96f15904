"""Processes of other engines: each in a process group of its own, with its output in a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeserve.bench.peers.environments import PeerError

SECONDS_TO_END = 10.0  # time before a process is killed
SECONDS_TO_START = 900  # vLLM compiles at its first start
LAST_LINES = 12


def start(command: Sequence[str], log: Path, variables: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
    """Start a process whose output is written to the log, unless `options` of Popen say otherwise."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        streams: dict[str, Any] = {"stdout": output, "stderr": output} | options
        # The process group is in our session: if we exit, the kernel continues a stopped group and sends it SIGHUP.
        return subprocess.Popen(command, env=variables, text=True, preexec_fn=os.setpgrp, **streams)


def run(command: Sequence[str], log: Path, variables: Mapping[str, str], advice: str = "", **options: Any) -> None:
    """Run a process to its end.

    Raises:
        PeerError: it failed. The message has the end of the log.
    """
    if code := start(command, log, variables, **options).wait():
        called = f"{Path(command[0]).name} {' '.join(command[1:3])}"
        raise PeerError(f"`{called}` ended with {code}\n{' '.join(command)}\n{log_end(log)}\n{advice}".rstrip())


def end(process: subprocess.Popen[str]) -> None:
    """Wait until a process ends, and kill it and the processes that it left behind. May be called twice."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    send_signal(process, signal.SIGKILL)
    process.wait()


def send_signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have exited
        os.killpg(process.pid, number)


def log_end(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([f"{log} ends with:", *lines])


def wait_until_ready(process: subprocess.Popen[str], url: str, name: str, log: Path) -> None:
    """Wait until a server answers.

    Raises:
        PeerError: it has ended, or does not answer in time.
    """
    deadline = time.monotonic() + SECONDS_TO_START
    while True:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise PeerError(f"{name} does not start\n{log_end(log)}")
        time.sleep(0.2)
