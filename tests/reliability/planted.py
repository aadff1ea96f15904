"""Faults of real processes, planted from outside: one rank fails at one point of a step, in one way, when told to.

tests/sitecustomize.py calls `plant` in each rank. What to do stands in a folder, and files in it say when.
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

# Where a rank can fail: a function that it calls there, by the module in which it is looked up.
POINTS = {
    "loading": ("moeserve.worker.loading", "load_weights"),
    "step": ("moeserve.worker.worker", "Worker.execute"),  # it has received one
    "agreement": ("moeserve.engine.process", "gather"),  # first ranks of replicas only
    "attention": ("moeserve.layers.rotary", "Rotation.apply"),  # twice a layer, between projections and cache
    "router": ("moeserve.moe.router", "Router.forward"),
    "dispatch": ("moeserve.moe.dispatch.exchange", "Exchange.choose"),  # routing is known, no token has been sent
    "wait": ("moeserve.moe.dispatch.allgather", "Gathering.wait"),  # tokens are on their way
    "experts": ("moeserve.moe.experts", "Experts.forward"),
    "combine": ("moeserve.moe.dispatch.allgather", "AllGatherDispatcher.combine"),  # outputs have not been sent
    "logits": ("moeserve.layers.linear", "OutputHead.forward"),
    "moving": (
        "moeserve.expert_placement.rebalance",
        "Rebalancer._store",
    ),  # a part of an expert has come, and is nowhere yet
    "switch": ("moeserve.expert_placement.rebalance", "Rebalancer.switch"),  # all have agreed to use what has come
    "played": ("moeserve.worker.cpu_graphs", "CapturedStep.run"),  # the others play their graphs
}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def divide() -> None:
    raise ZeroDivisionError("planted")


def exhaust() -> None:
    raise MemoryError("planted")


def allocate() -> None:
    import torch

    torch.empty(2**50, dtype=torch.uint8)


def sleep() -> None:
    time.sleep(4)


ACTIONS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (kill, stop, divide, exhaust, allocate, sleep)
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rank does one thing, once."""

    rank: int
    point: str  # of POINTS
    action: str  # of ACTIONS
    call: int = 1  # which call of the point in a step: once or twice a layer at some points


class Planted:
    """A fault, or a gate, in the processes that are started from now on, as the test sees it."""

    def __init__(self, folder: Path, fault: Fault | None = None) -> None:
        """
        Args:
            folder: an empty one. Without a fault it is a gate for rank 0.
        """
        self.folder = folder
        told = None if fault is None else asdict(fault)
        (folder / "fault.json").write_text(json.dumps(told))
        self.environment = {"MOESERVE_TEST_PLANT": f"planted:{folder}"}  # of the engine's user

    def trigger(self) -> None:
        """The next time that the rank is there, it does it."""
        (self.folder / "go").touch()

    def seconds_since(self) -> float:
        """Since it did it."""
        return time.monotonic() - float((self.folder / "done").read_text())

    # Of a gate.

    def close(self) -> None:
        """Rank 0 begins no other step, and so no rank ends one."""
        (self.folder / "held").unlink(missing_ok=True)
        _write(self.folder / "allowed", 0)

    def pass_steps(self, num_steps: int) -> None:
        """Waits until rank 0 stands before a step, lets it go on, and waits until it stands again so many further."""
        held = self._held()
        if num_steps:
            _write(self.folder / "allowed", held + num_steps - 1)
            deadline = time.monotonic() + 20
            while self._held() < held + num_steps:
                assert time.monotonic() < deadline, f"rank 0 stands before step {self._held()}"
                time.sleep(0.001)

    def open(self) -> None:
        _write(self.folder / "allowed", sys.maxsize)

    def _held(self) -> int:
        """The step before which rank 0 stands, counted from 1."""
        file, deadline = self.folder / "held", time.monotonic() + 20
        while not file.exists():
            assert time.monotonic() < deadline, "rank 0 does not come"
            time.sleep(0.001)
        return int(file.read_text())


def plant(name: str, folder: str) -> None:
    """Plant in a rank what stands in the folder, if it is meant for this rank."""
    told = json.loads(Path(folder, "fault.json").read_text())
    if name.split()[1] != str(0 if told is None else told["rank"]):
        return
    if told is None:
        _wrap("step", _gate(Path(folder)))
    else:
        _plant(Fault(**told), Path(folder))


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
    """Has something done before each call of a function."""
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
    """Whoever reads the file at the same time finds it whole."""
    file.with_suffix(".new").write_text(str(value))
    file.with_suffix(".new").replace(file)
