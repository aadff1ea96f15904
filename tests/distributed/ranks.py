"""Runs functions on several ranks, each in a process of its own, and returns their results.

    def add(place: Place, amount: int) -> int:  # in a test module
        return place.rank + amount

    def test_add(ranks: Ranks) -> None:  # the fixture of conftest.py
        assert ranks.run(2, "test_module:add", amount=5) == [5, 6]

Arguments and results are what msgpack can hold. The processes are forked by the fork server, as an engine's are, and
stay for the next function; if one has died, all are replaced, which takes some 20 ms each. Each run has a store of its
own, whose server is in the process of the tests.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import time
import traceback
from typing import Any

import msgspec
import torch

import moeserve.engine.replica_process  # noqa: F401  so that the fork server has it loaded
from moeserve.addresses import StoreAddress
from moeserve.distributed.store_server import start_store
from moeserve.processes.child import Parent
from moeserve.processes.failures import root_cause
from moeserve.processes.local import start_process
from moeserve.processes.supervision import end_all, wait_for_messages

SECONDS_TO_LOAD = 200.0

# One thread per rank, and ranks that wait leave the cores to the others.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


class Place(msgspec.Struct, frozen=True):
    """Where a function runs, and the store where it meets the others."""

    rank: int
    num_ranks: int
    store: StoreAddress


class Order(msgspec.Struct, frozen=True, tag="order"):
    """A function to run."""

    function: str
    place: Place
    arguments: dict[str, Any]


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """The result of a function on one rank."""

    value: Any = None
    error: str | None = None  # its traceback, or how its process died


class Ranks:
    """Processes that run one function at a time, started when they are needed."""

    def __init__(self) -> None:
        self.processes: list[RankProcess] = []  # by rank

    def run(self, num_ranks: int, function: str, within_s: float = 200.0, **arguments: Any) -> list[Any]:
        """Call `module:name` with (Place, **arguments) on each rank: the values by rank, all of which must succeed."""
        outcomes = self.start(num_ranks, function, **arguments).outcomes(within_s)
        failures = [f"---- rank {rank}\n{out.error}" for rank, out in enumerate(outcomes) if out.error is not None]
        assert not failures, f"{function} failed\n" + "\n".join(failures)
        return [outcome.value for outcome in outcomes]

    def start(self, num_ranks: int, function: str, **arguments: Any) -> Run:
        """Begin the same without waiting, for tests in which ranks fail, die or are stopped."""
        if not all(process.is_alive() for process in self.processes):
            self.close()  # in survivors, gloo's threads wait for the dead without sleeping
        while len(self.processes) < num_ranks:
            self.processes.append(RankProcess())
        return Run(self.processes[:num_ranks], function, arguments)

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.processes.clear()


class Run:
    """One function under way on some ranks."""

    def __init__(self, processes: list[RankProcess], function: str, arguments: dict[str, Any]) -> None:
        self.processes = processes
        self.store = start_store()
        places = [Place(rank, len(processes), self.store.address) for rank in range(len(processes))]
        for process, place in zip(processes, places, strict=True):
            process.send(Order("ranks:load", place, {"module": function.partition(":")[0]}))
        # Imports take seconds on a busy machine, so the function begins when all ranks have done theirs.
        deadline = time.monotonic() + SECONDS_TO_LOAD
        for process in processes:
            process.receive(deadline)  # an error is raised again by the function
        for process, place in zip(processes, places, strict=True):
            process.send(Order(function, place, arguments))

    def outcomes(self, within_s: float = 200.0) -> list[Outcome]:
        """Return the outcome of each rank. One that does not end in time is killed, and its stack is shown."""
        deadline = time.monotonic() + within_s
        return [process.receive(deadline) for process in self.processes]


class RankProcess:
    """One process, which runs the functions that it is sent."""

    def __init__(self) -> None:
        environment = os.environ | ENVIRONMENT
        self._process = start_process("ranks:run_orders", "test rank", None, Outcome, environment=environment)
        self.pid: int = self._process.handle.pid  # type: ignore[attr-defined]
        self._is_closed = False

    def is_alive(self) -> bool:
        return not self._is_closed and not self._process.has_ended

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def send(self, order: Order) -> None:
        self._process.channel.send(order)
        self._process.channel.flush(60.0)  # an order may be larger than what a socket holds

    def receive(self, deadline: float) -> Outcome:
        while not self._is_closed:
            if outcomes := self._process.receive():
                return outcomes[0]
            if failures := self._process.failures():
                self.close()
                return Outcome(error=root_cause(failures).cause)
            if time.monotonic() > deadline:
                self.kill(signal.SIGUSR1)  # shows its stack
                time.sleep(0.5)
                self.close()
                return Outcome(error="did not end in time")
            wait_for_messages([self._process], max(0.01, deadline - time.monotonic()))
        return Outcome(error="closed")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            end_all([self._process])


def run_orders(parent: Parent) -> None:
    """Run functions in a rank's process until the tests close it."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    channel = parent.channel(Order)
    while orders := channel.receive(None):
        for order in orders:
            channel.send(_outcome_of(order))
            channel.flush()


def load(place: Place, module: str) -> None:
    importlib.import_module(module)


def _outcome_of(order: Order) -> Outcome:
    module, name = order.function.split(":")
    try:
        value = getattr(importlib.import_module(module), name)(order.place, **order.arguments)
        msgspec.msgpack.encode(value)
        return Outcome(value=value)
    except Exception:
        return Outcome(error=traceback.format_exc())
