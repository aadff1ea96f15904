"""Faults of real processes: one rank fails at one point of a step, in one way, when a test triggers it.

`sitecustomize` calls `plant` in each rank. A file in a folder describes the fault, and another triggers it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Points at which a rank can fail: a function, by the module in which it is looked up.
POINTS = {
    "loading": ("moeserve.worker.loading", "load_weights"),
    "step": ("moeserve.worker.worker", "Worker.execute"),  # a step was received
    "agreement": ("moeserve.engine.process", "gather"),  # first ranks of replicas only
    "attention": ("moeserve.layers.attention", "Attention.forward"),
    "router": ("moeserve.moe.router", "Router.forward"),
    "dispatch": ("moeserve.moe.dispatch.exchange", "Exchange.choose"),  # routing is known, no token has been sent
    "wait": ("moeserve.moe.dispatch.allgather", "PendingAllGather.wait"),  # tokens are being sent
    "experts": ("moeserve.moe.experts", "Experts.forward"),
    "combine": ("moeserve.moe.dispatch.allgather", "AllGatherDispatcher.combine"),  # no output was sent
    "logits": ("moeserve.layers.linear", "OutputHead.forward"),
    # A part of an expert is being received.
    "moving": ("moeserve.expert_placement.rebalance", "Rebalancer._receive"),
    "replayed": ("moeserve.worker.cpu_graphs", "CapturedStep.run"),  # the others replay their graphs
}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def divide() -> None:
    raise ZeroDivisionError("planted")


ACTIONS: dict[str, Callable[[], None]] = {function.__name__: function for function in (kill, stop, divide)}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rank does one thing, once."""

    rank: int
    point: str  # of POINTS
    action: str  # of ACTIONS
    call: int = 1  # which call of the point in a step: some have several in each layer


class Planted:
    """A fault, or a gate before steps, in the processes that are started from now on."""

    def __init__(self, folder: Path, fault: Fault | None = None) -> None:
        """
        Args:
            folder: an empty one. Without a fault it is a gate for rank 0.
        """
        self.folder = folder
        fault_data = None if fault is None else asdict(fault)
        (folder / "fault.json").write_text(json.dumps(fault_data))
        self.environment = {"MOESERVE_TEST_PLANT": f"planted:{folder}"}  # of the engine's user

    def trigger(self) -> None:
        """Let the rank fail when it is at the point next."""
        (self.folder / "go").touch()

    def seconds_since(self) -> float:
        """Return the seconds since the fault."""
        return time.monotonic() - float((self.folder / "done").read_text())

    # For a gate:

    def close(self) -> None:
        """Stop rank 0 before its next step, so that no rank ends one."""
        (self.folder / "held").unlink(missing_ok=True)
        _write(self.folder / "allowed", 0)

    def pass_steps(self, num_steps: int) -> None:
        """Let rank 0 run so many steps, and wait until it stops again."""
        held = self._held()
        if num_steps:
            _write(self.folder / "allowed", held + num_steps - 1)
            deadline = time.monotonic() + 20
            while self._held() < held + num_steps:
                assert time.monotonic() < deadline, f"rank 0 waits before step {self._held()}"
                time.sleep(0.001)

    def open(self) -> None:
        _write(self.folder / "allowed", sys.maxsize)

    def _held(self) -> int:
        """Return the step before which rank 0 waits, counted from 1."""
        file, deadline = self.folder / "held", time.monotonic() + 20
        while not file.exists():
            assert time.monotonic() < deadline, "rank 0 does not reach the gate"
            time.sleep(0.001)
        return int(file.read_text())


def plant(name: str, folder: str) -> None:
    """Plant the fault that the folder describes, if it is for this rank."""
    fault_data = json.loads(Path(folder, "fault.json").read_text())
    if name.split()[1] != str(0 if fault_data is None else fault_data["rank"]):
        return
    if fault_data is None:
        _wrap("step", _gate(Path(folder)))
    else:
        _plant(Fault(**fault_data), Path(folder))


def _plant(fault: Fault, folder: Path) -> None:
    num_calls = 0  # of the point in this step
    is_done = False

    def count_anew() -> None:
        nonlocal num_calls
        num_calls = 0

    def act() -> None:
        nonlocal num_calls, is_done
        num_calls += 1
        if num_calls == fault.call and not is_done and (folder / "go").exists():
            is_done = True
            _write(folder / "done", time.monotonic())
            ACTIONS[fault.action]()

    _wrap(fault.point, act)
    _wrap("step", count_anew)


def _gate(folder: Path) -> Callable[[], None]:
    allowed, held = folder / "allowed", folder / "held"
    num_begun = 0

    def pass_gate() -> None:
        nonlocal num_begun
        num_begun += 1
        while num_begun > (int(allowed.read_text()) if allowed.exists() else math.inf):
            _write(held, num_begun)
            time.sleep(0.002)

    return pass_gate


def _wrap(point: str, before: Callable[[], None]) -> None:
    """Call a function before each call of another."""
    module, path = POINTS[point]
    owner: Any = sys.modules[module]
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    original = getattr(owner, name)

    def planted(*arguments: Any, **settings: Any) -> Any:
        before()
        return original(*arguments, **settings)

    setattr(owner, name, planted)


def _write(file: Path, value: float) -> None:
    """Write a file so that a reader at the same time finds all of it."""
    file.with_suffix(".new").write_text(str(value))
    file.with_suffix(".new").replace(file)
