"""Gives each part its time, runs it in processes of its own, and gathers what those have done. Knows no tensors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeserve.bench.gpu.part import PartName, Row
from moeserve.config.environment import environment_without

POLL_SECONDS = 0.2
END_SECONDS = 5.0  # that a process has to end after it was asked to
FINISHING_SHARE = 0.15  # of a part's time, for what is under way when nothing more is begun
# Parts whose results are right or wrong. What takes more than such a share of their time, and has not ended, is stuck;
# what began later may have been compiling.
JUDGED: tuple[PartName, ...] = ("checks", "engine", "ranks")
STUCK_SHARE = 0.7


@dataclass(frozen=True)
class Part:
    """A part's share of the time, and how many processes work on it at a time."""

    name: PartName
    share: float
    num_processes: int  # those that are not measured compile their kernels side by side


PARTS = (
    Part("checks", 0.26, num_processes=6),
    Part("engine", 0.22, num_processes=10),  # one for each family and dtype: see `COMPARISONS`
    Part("kernels", 0.28, num_processes=1),
    Part("throughput", 0.24, num_processes=1),
)
RANKS = Part("ranks", 0.22, num_processes=4)  # each of which starts two ranks at a time


@dataclass(frozen=True)
class Done:
    """What a part did."""

    part: PartName
    budget: float  # seconds
    seconds: float
    rows: list[Row]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "failed"]

    @property
    def left_out(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "left out" or "left_out" in row]


@dataclass
class Told:
    """What a process has told so far."""

    planned: list[str] = field(default_factory=list)
    begun: str | None = None
    begun_at: float = 0.0  # by our clock
    ended: set[str] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)
    num_read: int = 0  # bytes

    def read(self, path: Path) -> list[Row]:
        """Rows that came since. A line that is half written is left for later."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self.num_read)
            whole, newline, _ = file.read().rpartition(b"\n")
        if not newline:
            return []
        self.num_read += len(whole) + 1
        fresh: list[Row] = []
        for line in map(json.loads, whole.splitlines()):
            match line:
                case {"planned": names}:
                    self.planned = names
                case {"begun": name}:
                    self.begun, self.begun_at = name, time.monotonic()
                case {"ended": name}:
                    self.ended.add(name)
                    self.begun = None
                case {"done": row}:
                    fresh.append(row)
        self.rows += fresh
        return fresh


def parts_for(num_gpus: int) -> tuple[Part, ...]:
    """In order: several GPUs can do more than one."""
    return PARTS if num_gpus < 2 else (*PARTS[:2], RANKS, *PARTS[2:])


def budget(part: Part, to_come: Sequence[Part], seconds_left: float) -> float:
    """Seconds of a part: what earlier ones have not used is shared among it and those to come."""
    return max(0.0, seconds_left) * part.share / (part.share + sum(other.share for other in to_come))


def run_part(
    part: Part,
    seconds: float,
    seed: int,
    tell: Callable[[Row], None],
    command: Sequence[str] = (sys.executable, "-m", "moeserve.bench.gpu.part"),
) -> Done:
    """Runs a part for so many seconds at most, `tell` hears of each row at once.

    Args:
        command: what the part's name and options are added to.
    """
    started = time.monotonic()
    environment = environment_without("TRITON_INTERPRET")
    told = [Told() for _ in range(part.num_processes)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        files = [Path(folder) / f"{index}.jsonl" for index in range(part.num_processes)]
        processes = []
        for index, path in enumerate(files):
            options = ["--seed", str(seed), "--seconds", f"{seconds * (1 - FINISHING_SHARE):.3f}"]
            options += ["--share", f"{index}/{part.num_processes}", "--rows", str(path)]
            output = stack.enter_context((Path(folder) / f"{index}.log").open("w+b"))
            processes.append(
                subprocess.Popen(
                    [*command, part.name, *options],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # what it starts ends with it
                )
            )
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() - started < seconds:
                time.sleep(POLL_SECONDS)
                for each, path in zip(told, files, strict=True):
                    for row in each.read(path):
                        tell(row)
        finally:
            was_stopped = [_stop(process) for process in processes]
        rows: list[Row] = []
        for index, (each, path, process) in enumerate(zip(told, files, processes, strict=True)):
            fresh = each.read(path)
            log = (Path(folder) / f"{index}.log").read_text(errors="replace")
            missing = missing_rows(part.name, each, process.returncode, was_stopped[index], seconds, log)
            for row in fresh + missing:
                tell(row)
            rows += each.rows + missing
    return Done(part.name, seconds, time.monotonic() - started, rows)


def missing_rows(part: PartName, told: Told, exit_code: int, was_stopped: bool, seconds: float, log: str) -> list[Row]:
    """Rows for what was planned and has not ended."""
    rows: list[Row] = []
    has_failed = not was_stopped and exit_code != 0
    num_seconds = time.monotonic() - told.begun_at
    is_stuck = part in JUDGED and num_seconds > STUCK_SHARE * seconds
    ending = {"error": f"its process ended with exit code {exit_code}", "log": log[-2000:]}
    if not told.planned:
        if not has_failed and not was_stopped:
            return []
        reason = ending if has_failed else {"error": f"had not begun after {seconds:.0f} s", "log": log[-2000:]}
        return [{"name": f"{part}, a process", "status": "failed", **reason}]
    for name in told.planned:
        if name in told.ended:
            continue
        row: Row = {"name": name}
        if has_failed:
            row |= {"status": "failed", **(ending if name == told.begun else {"error": "its process ended before it"})}
        elif name == told.begun and is_stuck:
            error = f"was still running after {num_seconds:.0f} of the part's {seconds:.0f} s"
            row |= {"status": "failed", "error": error}
        else:
            row |= {"status": "left out", "reason": f"the part's {seconds:.0f} s were over"}
        rows.append(row)
    return rows


def _stop(process: subprocess.Popen[Any]) -> bool:
    """Ends a process that still runs, and all that it started. Whether it did."""
    was_running = process.poll() is None
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
    return was_running
