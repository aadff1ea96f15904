"""Faults of real processes: one rank fails at one point of a step, in one way, when a test triggers it.

`sitecustomize` calls `plant` in each rank. A file in a folder describes the fault, and another triggers it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.processes.progress_records import Phase, set_phase

# Points at which a rank can fail: a function, by the module in which it is looked up.
POINTS = {
    "loading": ("moeserve.worker.weight_sources.checkpoint_tensors", "load_weights"),
    "step": ("moeserve.worker.worker", "Worker.start"),  # a step was received
    "agreement": ("moeserve.worker.worker", "agree"),  # the ranks have exchanged rows
    "attention": ("moeserve.layers.grouped_query.attention", "Attention.forward"),
    "router": ("moeserve.layers.moe.router", "Router.forward"),
    "dispatch": (
        "moeserve.layers.moe.dispatch.exchange",
        "Exchange.choose",
    ),  # routing is known, no token has been sent
    "wait": ("moeserve.layers.moe.dispatch.allgather", "PendingAllGather.wait"),  # tokens are being sent
    "experts": ("moeserve.layers.moe.experts", "Experts.forward"),
    "combine": ("moeserve.layers.moe.dispatch.allgather", "AllGatherDispatcher.combine_pairs"),  # no output was sent
    "logits": ("moeserve.layers.linear", "OutputHead.forward"),
    # A part of an expert is being received.
    "moving": ("moeserve.layers.moe.placement.rebalance", "Rebalancer._receive"),
    "replayed": ("moeserve.worker.cpu_graphs", "CapturedStep.run"),  # the others replay their graphs
}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def divide() -> None:
    raise ZeroDivisionError("planted")


def refuse() -> None:
    raise CheckpointError("planted")


def loop() -> None:
    while True:
        pass


def loop_natively() -> None:
    ctypes.PyDLL(None).pause()  # no thread of Python runs until a signal comes


def loop_in_a_collective() -> None:
    set_phase(Phase.WAITING)  # as the C++ code of a collective does
    loop_natively()


def loop_as_if_waiting() -> None:
    set_phase(Phase.WAITING)
    loop()


def doze() -> None:
    time.sleep(2.0)


def exhaust_memory() -> None:
    """Take memory until the kernel kills this process; it chooses this one first."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    taken = []
    while True:
        taken.append(b"x" * 2**20)


FUNCTIONS = (
    kill,
    stop,
    divide,
    refuse,
    loop,
    loop_natively,
    loop_in_a_collective,
    loop_as_if_waiting,
    doze,
    exhaust_memory,
)
ACTIONS: dict[str, Callable[[], None]] = {function.__name__: function for function in FUNCTIONS}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rank does one thing, once or in several steps."""

    rank: int
    point: str  # of POINTS
    action: str  # of ACTIONS
    call: int = 1  # which call of the point in a step, from which on it does the thing: some have several in each layer
    num_calls: int = 1  # in which it does it
    num_steps: int = 1


class Planted:
    """A fault in the processes that are started from now on."""

    def __init__(self, folder: Path, fault: Fault) -> None:
        """
        Args:
            folder: an empty one.
        """
        self.folder = folder
        (folder / "fault.json").write_text(json.dumps(asdict(fault)))
        self.environment = {"MOESERVE_TEST_PLANT": f"planted:{folder}"}  # of the engine's user

    def trigger(self) -> None:
        """Let the rank fail when it is at the point next."""
        (self.folder / "go").touch()

    def stopped_pid(self, within_s: float = 200.0) -> int:
        """Return the process id of the rank, once it has come to the point."""
        deadline = time.monotonic() + within_s
        while not (self.folder / "done").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int((self.folder / "pid").read_text())

    def seconds_since(self) -> float:
        """Return the seconds since the fault."""
        return time.monotonic() - float((self.folder / "done").read_text())


def plant(name: str, folder: str) -> None:
    """Plant the fault that the folder describes, if it is for this rank, and not for one that replaces a faulty one."""
    fault = Fault(**json.loads(Path(folder, "fault.json").read_text()))
    if name.split()[1] == str(fault.rank) and not Path(folder, "done").exists():
        _plant(fault, Path(folder))


def plant_in_actors() -> None:
    """Plant the fault that the environment names in the rank of this process, if Ray starts one here."""
    from moeserve.executor.ray.actors import RankActor

    start = RankActor.start

    def start_and_plant(self: RankActor, data: bytes, *, show_progress: bool) -> bytes:
        loaded = start(self, data, show_progress=show_progress)
        plant(self.name, os.environ["MOESERVE_TEST_PLANT"].partition(":")[2])
        return loaded

    RankActor.start = start_and_plant  # type: ignore[method-assign]


def _plant(fault: Fault, folder: Path) -> None:
    num_calls = 0  # of the point in this step
    num_done = 0

    def count_anew() -> None:
        nonlocal num_calls
        num_calls = 0

    def act() -> None:
        nonlocal num_calls, num_done
        num_calls += 1
        is_due = fault.call <= num_calls < fault.call + fault.num_calls and num_done < fault.num_steps * fault.num_calls
        if is_due and (folder / "go").exists():
            num_done += 1
            _write(folder / "pid", os.getpid())
            _write(folder / "done", time.monotonic())
            ACTIONS[fault.action]()

    _wrap(fault.point, act)
    _wrap("step", count_anew)


def _wrap(point: str, before: Callable[[], None]) -> None:
    """Call `before` ahead of every call of the function at `point`."""
    module, path = POINTS[point]
    owner: Any = importlib.import_module(module)  # some are imported late
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
