"""`moeserve serve` in processes of its own, and the memory, files and threads that these hold."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import psutil
from rank_processes import is_rank


@dataclass(frozen=True)
class Holdings:
    """The memory, files and threads of all processes of a server together."""

    num_bytes: int  # of memory that no other process shares, without the ranks
    num_rank_bytes: int
    num_files: int
    num_threads: int
    num_processes: int


class ServerProcess:
    """`moeserve serve`, started with some flags."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "moeserve", "serve", "--port", "0", *flags]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        lines = iter(self._process.stderr.readline, "")
        address = next((found[1] for line in lines if (found := re.search(r" at (http://\S+)/v1", line))), None)
        assert address is not None
        self.url = address
        self.pid = self._process.pid
        self._lines: list[str] = []
        # In a thread, or a full pipe would hold up the server.
        self._reader = threading.Thread(target=self._lines.extend, args=(lines,))
        self._reader.start()

    def holdings(self) -> Holdings:
        """Return what the processes hold, once no client is connected.

        Some processes end, and are started again, when a rank has died.
        """
        wait_until(lambda: all(each.status == psutil.CONN_LISTEN for each in self._sockets()))
        processes = self.processes()
        return Holdings(
            sum(each.memory_full_info().uss for each in processes if not is_rank(each)),
            sum(each.memory_full_info().uss for each in processes if is_rank(each)),
            sum(each.num_fds() for each in processes),
            sum(each.num_threads() for each in processes),
            len(processes),
        )

    def status_of(self, path: str) -> int:
        return int(httpx.get(f"{self.url}{path}", timeout=60.0).status_code)

    def post(self, path: str, key: str) -> int:
        """Return the status of a POST without a body."""
        return int(httpx.post(f"{self.url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=60).status_code)

    def num_listeners(self) -> int:
        """Return the number of processes that listen on the port."""
        return sum(each.status == psutil.CONN_LISTEN for each in self._sockets())

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]

    def _sockets(self) -> list[Any]:
        """Return the sockets on the server's port: those that listen, and the connections of clients."""
        port = int(self.url.rsplit(":", 1)[1])
        sockets = [each for process in self.processes() for each in process.net_connections("inet")]
        return [each for each in sockets if each.laddr.port == port]

    def metric(self, name: str) -> float:
        """Return a metric, summed over all of its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60.0).text
        return sum(map(float, re.findall(rf"^moeserve_{name}{{.*}} (\S+)$", text, re.MULTILINE)))

    def wait_for_readiness(self, status: int, seconds: float) -> float:
        """Wait until /ready answers with this status. Return the seconds that this took."""
        began_at = time.monotonic()
        while self.status_of("/ready") != status:
            assert time.monotonic() < began_at + seconds, f"/ready is not {status} after {seconds} s"
            time.sleep(0.02)
        return time.monotonic() - began_at

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Wait for the end of the server, and return its exit status."""
        return self._process.wait(seconds)

    def errors(self) -> str:
        """Return what the server has written to its standard error output, once it has ended."""
        self._reader.join()
        return "".join(self._lines)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._reader.join()
            assert self._process.stderr is not None
            self._process.stderr.close()


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[ServerProcess]:
    server = ServerProcess(*flags)
    try:
        yield server
    finally:
        server.end()


def wait_until(condition: Callable[[], bool], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
