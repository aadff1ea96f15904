"""Runs functions on several ranks, each in a process of its own, and hands back what they return. Knows no moeserve.

    def add(place: Place, amount: int) -> int:  # in tests/distributed/test_mine.py
        return place.rank + amount

    def test_add(ranks: Ranks) -> None:  # the fixture of conftest.py
        assert ranks.run(2, "test_mine:add", amount=5) == [5, 6]

What goes in and comes out is JSON. The processes stay for the next function; those that died are replaced. Each run has
a store of its own, whose server is in the process of the tests.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

# One thread per rank, and ranks that wait leave the cores to the others.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True)
class Place:
    """Where a function runs: what it needs to join the others."""

    rank: int
    num_ranks: int
    store_host: str
    store_port: int


@dataclass(frozen=True)
class Outcome:
    """What became of a function on one rank."""

    value: Any = None
    error: str | None = None  # its traceback, or how its process died


class Ranks:
    """Processes that run one function at a time, started as they are needed."""

    def __init__(self) -> None:
        self.processes: list[RankProcess] = []  # by rank

    def run(self, num_ranks: int, function: str, within_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Call `module:name` with (Place, **arguments) on each rank: the values by rank, all of which must succeed."""
        outcomes = self.start(num_ranks, function, **arguments).outcomes(within_s)
        failures = [f"---- rank {rank}\n{out.error}" for rank, out in enumerate(outcomes) if out.error is not None]
        assert not failures, f"{function} failed\n" + "\n".join(failures)
        return [outcome.value for outcome in outcomes]

    def start(self, num_ranks: int, function: str, **arguments: Any) -> Run:
        """Begin the same without waiting, for tests in which ranks fail, die or are stopped."""
        started = []
        for rank in range(num_ranks):
            if rank < len(self.processes) and self.processes[rank].is_alive():
                continue
            started.append(RankProcess())
            if rank < len(self.processes):
                self.processes[rank].close()
            self.processes[rank : rank + 1] = started[-1:]
        for process in started:  # all have loaded torch before any function begins, and may take a while for it
            outcome = process.receive(time.monotonic() + 60)
            assert outcome.error is None, outcome.error
        return Run(self.processes[:num_ranks], function, arguments)

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.processes.clear()


class Run:
    """One function under way on some ranks."""

    def __init__(self, processes: list[RankProcess], function: str, arguments: dict[str, Any]) -> None:
        from torch.distributed import (
            TCPStore,
        )  # not at the top: processes should be told what to do before they load it

        self.processes = processes
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        self.store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        for rank, process in enumerate(processes):
            place = Place(rank, len(processes), host, port)
            process.send(dict(function=function, place=asdict(place), arguments=arguments))

    def outcomes(self, within_s: float = 60.0) -> list[Outcome]:
        """What became of each rank. One that does not end in time is killed; its stack is on the error output."""
        deadline = time.monotonic() + within_s
        return [process.receive(deadline) for process in self.processes]


class RankProcess:
    """One process, started as `python -m ranks`, and the socket over which it is told what to run."""

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        path = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *filter(None, sys.path)])
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ranks", str(its.fileno())],
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
                pass_fds=[its.fileno()],
            )
        self.socket = ours
        self.lines = ours.makefile("r", encoding="utf-8")

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, deadline: float) -> Outcome:
        self.socket.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            line = self.lines.readline()
        except TimeoutError:
            self.kill(signal.SIGUSR1)  # shows its stack
            time.sleep(0.5)
            self.close()
            return Outcome(error="did not end in time")
        except ConnectionError:
            line = ""
        if not line:
            self.close()
            return Outcome(error=f"died with status {self.process.returncode}")
        return Outcome(**json.loads(line))

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self.lines.close()
        self.socket.close()


def main(connection: socket.socket) -> None:
    """The life of one rank's process: run what it is told until its parent hangs up."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(connection, messages), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    outcome = Outcome()  # the first says that it is ready
    while True:
        connection.sendall(json.dumps(asdict(outcome)).encode() + b"\n")
        outcome = outcome_of(messages.get())


def listen(connection: socket.socket, messages: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Take messages, and end the process with its parent, whatever it is doing."""
    for line in connection.makefile("r", encoding="utf-8"):
        messages.put(json.loads(line))
    os._exit(1)


def outcome_of(message: dict[str, Any]) -> Outcome:
    module, name = message["function"].split(":")
    try:
        value = getattr(importlib.import_module(module), name)(Place(**message["place"]), **message["arguments"])
        json.dumps(value)
        return Outcome(value=value)
    except Exception:
        return Outcome(error=traceback.format_exc())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
